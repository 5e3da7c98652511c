"""Benchmarks: how much the learning rate matters, and what a step costs."""
