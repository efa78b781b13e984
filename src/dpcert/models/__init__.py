"""Models for inputs in [0, 1], and the check that no layer mixes examples."""
