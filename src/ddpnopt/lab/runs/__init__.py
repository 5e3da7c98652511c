"""One training run as data: configuration, outcome, store, and the ways to carry many of them out."""
