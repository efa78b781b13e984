"""More than one process: executors that run tasks on this machine or on a Ray cluster."""
