"""Per-example gradients, clipped and summed, by engines that share one contract."""
