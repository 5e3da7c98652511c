"""The paper's tables and figures, one file per item, named as in `ddpnopt reproduce`."""
