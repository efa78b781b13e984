"""Several processes: the ranks of one run, and executors that run many tasks, here or on a Ray cluster."""
