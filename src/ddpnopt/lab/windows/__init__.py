"""`ddpnopt bench lr-window`: over how many decades of the learning rate a method trains."""
