"""Many small networks trained at once: the weights of R runs in one tensor, every product a batched one."""
