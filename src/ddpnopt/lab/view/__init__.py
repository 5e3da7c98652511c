"""`ddpnopt view`: the diagnostics of a training as curves, in the terminal and as a page."""
