"""Layers as linear maps: products with their Jacobians, per-sample gradients, Gram matrices."""
