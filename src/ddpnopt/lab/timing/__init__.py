"""`ddpnopt bench speed`: time and memory of a step, as ratios taken in one run."""
