"""The names of the targets of ``dpcert reproduce``, and of the folders it uses."""

from pathlib import Path

TABLE_1 = "table1"
CERTIFIED_ACCURACY = "figure-certified-accuracy"
CIFAR10_COMPARISON = "figure-cifar10-comparison"
CONSISTENCY_PSAC = "ablation-consistency-psac"
AUGMENTATIONS = "ablation-augmentations"
LEARNING_RATE = "ablation-learning-rate"
CLIP_NORM = "ablation-clip-norm"
METRIC_HISTOGRAMS = "figure-metric-histograms"
METRICS_BY_RADIUS = "figure-metrics-by-radius"
METRICS_SPLIT = "figure-metrics-split"
RADII = "figure-radii"
FGSM = "figure-fgsm"
PRIOR = "prior"  # the quoted systems, trained here
CONSISTENCY_PSAC_FULL, AUGMENTATIONS_FULL, METRIC_HISTOGRAMS_FULL = (
    f"{name}-full" for name in (CONSISTENCY_PSAC, AUGMENTATIONS, METRIC_HISTOGRAMS)
)
ALL = "all"  # every target but the appendix's larger grids

RESULTS = Path("results")  # the run directories, unless --results says otherwise
LOGS = "logs"  # its subfolder with the output of the child processes
