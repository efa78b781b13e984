"""Several processes: the ranks of one run."""
