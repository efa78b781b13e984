"""Per-example gradients, clipped and summed; engines that agree on one contract."""
