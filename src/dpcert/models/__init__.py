"""Plain modules on inputs in [0, 1], and the check that none of their layers mixes examples."""
