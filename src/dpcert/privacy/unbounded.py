"""Clip rules that give no guarantee, by name, and why. A run with one of them has epsilon = inf, for this reason."""

UNBOUNDED = {
    "none": "gradients are not clipped",
    "noiseless": "no noise is added",
    "batchmean": (
        "the mean of a batch is clipped instead of each gradient: one record moves it by up to 2 C, its noise is for C / B"
    ),
    "unperturbed": (
        "gradients are neither clipped nor noised, and noise that is drawn once for all examples cancels in x_i - x_j"
    ),
}
