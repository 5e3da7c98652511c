"""One self-contained HTML page of everything reproduced: `ddpnopt report`."""
