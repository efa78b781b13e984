"""What the paper compares: names and settings that the grid runs by and the report shows by. Its figures: `report/paper.py`."""

SIGMAS = (0.25, 0.5, 1.0)
BASELINES = ("regular", "dpsgd", "psac")
VARIANTS = ("dp-gaussian", "dp-smoothadv", "dp-stability", "dp-macer")  # of DP-CERT
COMPARED = (*BASELINES, *VARIANTS)  # the rows of Table 1
BUDGET = (3.0, 1e-5)  # (epsilon, delta) of its private rows
TABLE_1_COPIES = 2  # K of its DP-CERT rows, beside the original
THRESHOLDS = (0.5, 1.0, 1.5)  # tau: radii that per-sample metrics are split at
