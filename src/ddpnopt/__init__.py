"""ddpnopt: differential dynamic programming as a PyTorch optimizer."""

__version__ = "0.1.0"
