"""Data sets, networks, methods and training runs: what the comparisons and the paper's tables are made of."""
