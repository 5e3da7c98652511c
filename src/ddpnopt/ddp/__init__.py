"""Differential dynamic programming on plain tensors: the sweep of Algorithm 3, value functions, terminal, losses."""
