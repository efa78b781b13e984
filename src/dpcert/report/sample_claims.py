"""The paper's sentences about per-sample metrics, radii and FGSM (Section 5.2 and the appendix)."""

from collections.abc import Callable

import numpy as np

from ..analysis.correlate import correlation, drawn_groups
from .claims import BASELINES, SIGMAS, SIMILAR, VARIANTS, Claim, Finding, titled
from .paper import TITLES
from .shelf import Measured, Sample, Shelf

METRICS: dict[str, Callable[[Sample], float]] = {
    "Hessian norm": lambda sample: sample.hessian_norm,
    "gradient norm": lambda sample: sample.gradient_norm,
    "Lipschitz constant": lambda sample: sample.lipschitz,
}
TAUS = (0.5, 1.0, 1.5)
_SMALLEST = 1e-12  # a metric of exactly 0 has no logarithm
_BIMODAL = 5 / 9  # Sarle's coefficient of a uniform distribution; more speaks for two modes
_POINT = 0.01
_FEWEST = 30


def values_of(run: Measured, metric: str) -> np.ndarray:
    """A metric, an entry for each image."""
    return np.array([METRICS[metric](sample) for sample in run.samples])


def logs(run: Measured, metric: str) -> np.ndarray:
    """log10 of it."""
    logarithms: np.ndarray = np.log10(np.maximum(values_of(run, metric), _SMALLEST))
    return logarithms


def radii(run: Measured) -> np.ndarray:
    """The certified radius of the same images."""
    return np.array([sample.radius for sample in run.samples])


def by_radius(run: Measured, metric: str, sigma: float) -> tuple[np.ndarray, np.ndarray]:
    """Images grouped by radius: the middle of each group, and the log of the group's mean metric."""
    groups = drawn_groups(values_of(run, metric), radii(run), sigma)
    return np.array([group.middle for group in groups]), np.log10([group.mean for group in groups])


def bimodality(values: np.ndarray) -> float:
    """Sarle's coefficient with its correction for small samples: above 5/9 a distribution is likely to have two modes."""
    n, centred = len(values), values - values.mean()
    deviation = centred.std()
    if n < 4 or deviation == 0:
        return 0.0
    skew, kurtosis = float((centred**3).mean() / deviation**3), float((centred**4).mean() / deviation**4) - 3
    return (skew**2 + 1) / (kurtosis + 3 * (n - 1) ** 2 / ((n - 2) * (n - 3)))


def _mode(values: np.ndarray) -> float:
    counts, edges = np.histogram(values, bins=20)
    place = int(counts.argmax())
    return float((edges[place] + edges[place + 1]) / 2)


def analysed(shelf: Shelf, dataset: str, methods: tuple[str, ...], sigma: float) -> list[Measured] | None:
    """A run of each method with per-sample metrics, or None."""
    runs = shelf.all_certified(dataset, methods, sigma)
    return runs if runs is not None and all(len(run.samples) >= _FEWEST for run in runs) else None


def regular_has_the_greatest_mode(shelf: Shelf, dataset: str, sigma: float) -> Finding | None:
    """The mode of Regular's gradient norms is above those of DPSGD, PSAC and DP-Gaussian."""
    runs = analysed(shelf, dataset, (*BASELINES, "dp-gaussian"), sigma)
    if runs is None:
        return None
    modes = [_mode(logs(run, "gradient norm")) for run in runs]
    words = ", ".join(f"{titled(run)} {mode:.1f}" for run, mode in zip(runs, modes, strict=True))
    return Finding(modes[0] > max(modes[1:]), f"mode of log10: {words}")


def dpsgd_is_bimodal(shelf: Shelf, dataset: str, sigma: float) -> Finding | None:
    """DPSGD's gradient norms have two modes, Regular's one (Sarle's coefficient against 5/9)."""
    runs = analysed(shelf, dataset, ("dpsgd", "regular"), sigma)
    if runs is None:
        return None
    dpsgd, regular = (bimodality(logs(run, "gradient norm")) for run in runs)
    return Finding(dpsgd > _BIMODAL > regular, f"coefficient {dpsgd:.2f} for DPSGD, {regular:.2f} for Regular (limit 0.56)")


def fewer_large_values(shelf: Shelf, dataset: str, sigma: float) -> Finding | None:
    """The 90 % quantile of each metric is lower for DP-Gaussian than for DPSGD and PSAC."""
    runs = analysed(shelf, dataset, ("dp-gaussian", "dpsgd", "psac"), sigma)
    if runs is None:
        return None
    tops = {metric: [float(np.quantile(logs(run, metric), 0.9)) for run in runs] for metric in METRICS}
    words = "; ".join(f"{metric} {' / '.join(f'{v:.2f}' for v in values)}" for metric, values in tops.items())
    good = all(values[0] < min(values[1:]) for values in tops.values())
    return Finding(good, f"log10 of the 90 % quantile, DP-Gaussian / DPSGD / PSAC: {words}")


def stability_is_apart(shelf: Shelf, dataset: str, sigma: float) -> Finding | None:
    """DP-Stability: higher gradient and Hessian norms, a lower Lipschitz constant than the other variants (mean of logs)."""
    others = tuple(name for name in VARIANTS if name != "dp-stability")
    runs = analysed(shelf, dataset, ("dp-stability", *others), sigma)
    if runs is None:
        return None
    means = {metric: [float(logs(run, metric).mean()) for run in runs] for metric in METRICS}
    above = all(means[metric][0] > max(means[metric][1:]) for metric in ("Hessian norm", "gradient norm"))
    below = means["Lipschitz constant"][0] < min(means["Lipschitz constant"][1:])
    words = "; ".join(f"{m} {v[0]:.2f} against {min(v[1:]):.2f} to {max(v[1:]):.2f}" for m, v in means.items())
    return Finding(above and below, f"mean log10: {words}")


def correlations(run: Measured, sigma: float) -> dict[str, float]:
    """Of radius and log metric over the groups of images, for each metric."""
    groups = {metric: drawn_groups(values_of(run, metric), radii(run), sigma) for metric in METRICS}
    return {
        metric: _correlation(np.array([group.middle for group in own]), np.array([group.mean for group in own]))
        for metric, own in groups.items()
    }


def _correlation(radius: np.ndarray, metric: np.ndarray) -> float:
    return correlation(metric, radius).pearson or 0.0


def negative_correlation(shelf: Shelf, dataset: str, sigma: float) -> Finding | None:
    """For every method and metric the log metric falls with the radius."""
    runs = analysed(shelf, dataset, (*BASELINES, *VARIANTS), sigma)
    if runs is None:
        return None
    found = {f"{titled(run)} {metric}": value for run in runs for metric, value in correlations(run, sigma).items()}
    weakest = max(found, key=lambda name: found[name])
    negative = sum(value < 0 for value in found.values())
    return Finding(negative == len(found), f"{negative} of {len(found)} negative; weakest {weakest} {found[weakest]:+.2f}")


def lipschitz_is_closest(shelf: Shelf, dataset: str, sigma: float) -> Finding | None:
    """Over single images of the private models, the Lipschitz constant has the strongest correlation with the radius."""
    runs = analysed(shelf, dataset, ("dpsgd", "psac", *VARIANTS), sigma)
    if runs is None:
        return None
    mean = {metric: float(np.mean([_correlation(radii(run), values_of(run, metric)) for run in runs])) for metric in METRICS}
    strongest = min(mean, key=lambda metric: mean[metric])
    words = ", ".join(f"{metric} {value:+.2f}" for metric, value in mean.items())
    return Finding(strongest == "Lipschitz constant", f"mean correlation of {len(runs)} methods: {words}")


def higher_below_tau(metric: str) -> Callable[[Shelf, str, float], Finding | None]:
    """A check that images with a radius below tau have a higher mean log metric, for every method and tau."""

    def check(shelf: Shelf, dataset: str, sigma: float) -> Finding | None:
        runs = analysed(shelf, dataset, (*BASELINES, *VARIANTS), sigma)
        if runs is None:
            return None
        gaps = {}
        for run in runs:
            for tau in TAUS:
                below, values = radii(run) < tau, logs(run, metric)
                if below.any() and not below.all():
                    gaps[f"{titled(run)} at tau {tau:g}"] = float(values[below].mean() - values[~below].mean())
        smallest = min(gaps, key=lambda name: gaps[name])
        higher = sum(gap > 0 for gap in gaps.values())
        return Finding(higher == len(gaps), f"{higher} of {len(gaps)}; smallest gap {smallest} {gaps[smallest]:+.2f} (log10)")

    return check


def baselines_spike_at_zero(shelf: Shelf, dataset: str, sigma: float) -> Finding | None:
    """For Regular, DPSGD and PSAC the fullest tenth of the radii is the one at 0."""
    runs = shelf.all_certified(dataset, BASELINES, sigma)
    if runs is None:
        return None
    spikes = [np.histogram(run.earned, bins=10, range=(0, 3.3 * sigma))[0] for run in runs]
    words = ", ".join(f"{titled(run)} {100 * float((run.earned == 0).mean()):.0f} %" for run in runs)
    return Finding(all(int(spike.argmax()) == 0 for spike in spikes), f"not certified at any radius: {words}")


def gaussian_above_one(shelf: Shelf, dataset: str, sigma: float) -> Finding | None:
    """DP-Gaussian certifies most images at more than 1.0, and the fullest bin is the last, at about 1.6."""
    run = shelf.certified(dataset, "dp-gaussian", sigma)
    if run is None:
        return None
    counts, edges = np.histogram(run.earned, bins=np.arange(0.0, 1.8, 0.1))
    share, mode = float((run.earned > 1.0).mean()), float(edges[int(counts.argmax())])
    return Finding(share > 0.5 and mode >= 1.5 - 1e-9, f"{100 * share:.0f} % above 1.0; mode {mode:.1f} to {mode + 0.1:.1f}")


def _attacked(shelf: Shelf, dataset: str, sigma: float) -> dict[str, dict[float, float]] | None:
    found = {}
    for method in (*BASELINES, *VARIANTS):
        run = shelf.get(dataset, method, sigma)
        if run is None or not run.fgsm:
            return None
        found[method] = {strength: row.accuracy for strength, row in sorted(run.fgsm.items())}
    return found if len({tuple(curve) for curve in found.values()}) == 1 else None


def stability_is_best_under_fgsm(shelf: Shelf, dataset: str, sigma: float) -> Finding | None:
    """DP-Stability is at no strength more than a point below any other method, and somewhere more than a point above all."""
    found = _attacked(shelf, dataset, sigma)
    if found is None:
        return None
    best = {s: max(curve[s] for name, curve in found.items() if name != "dp-stability") for s in found["dp-stability"]}
    lead = {strength: found["dp-stability"][strength] - other for strength, other in best.items()}
    words = ", ".join(f"{100 * value:+.1f} at {strength:g}" for strength, value in lead.items())
    return Finding(min(lead.values()) >= -_POINT and max(lead.values()) > _POINT, f"points ahead of the best other: {words}")


def variants_above_baselines(shelf: Shelf, dataset: str, sigma: float) -> Finding | None:
    """The other three variants are not more than a point below any baseline, and somewhere more than a point above all."""
    found = _attacked(shelf, dataset, sigma)
    if found is None:
        return None
    ours = [name for name in VARIANTS if name != "dp-stability"]
    strengths = list(found["dpsgd"])
    lead = {s: min(found[name][s] for name in ours) - max(found[name][s] for name in BASELINES) for s in strengths}
    words = ", ".join(f"{100 * value:+.1f} at {strength:g}" for strength, value in lead.items())
    return Finding(min(lead.values()) >= -_POINT and max(lead.values()) > _POINT, f"points ahead of the best baseline: {words}")


def three_variants_alike(shelf: Shelf, dataset: str, sigma: float) -> Finding | None:
    """DP-Gaussian, DP-SmoothAdv and DP-MACER within 5 points of each other at every strength."""
    found = _attacked(shelf, dataset, sigma)
    if found is None:
        return None
    ours = [found[name] for name in VARIANTS if name != "dp-stability"]
    apart = {s: max(curve[s] for curve in ours) - min(curve[s] for curve in ours) for s in ours[0]}
    widest = max(apart, key=lambda s: apart[s])
    return Finding(apart[widest] <= SIMILAR, f"at most {100 * apart[widest]:.1f} points apart, at strength {widest:g}")


_RQ1, _RQ2 = "Section 5.2 (RQ1)", "Section 5.2 (RQ2)"
_D3 = "Appendix D.3"
_MNIST = ("mnist",)
_BOTH = ("mnist", "fashion-mnist")

SAMPLE_CLAIMS: tuple[Claim, ...] = (
    *(
        Claim(f"figure-metric-histograms{full}", where, sentence, check, sigmas, datasets)
        for full, sigmas, datasets in (("", (0.5,), _MNIST), ("-full", SIGMAS, _BOTH))
        for where, sentence, check in (
            (_RQ1, "Regular's gradient norms have a mode far above the private methods'", regular_has_the_greatest_mode),
            (_RQ1, "DPSGD's gradient norms are bimodal, Regular's are not", dpsgd_is_bimodal),
            (_RQ2, "DP-Gaussian has fewer images with large metrics than DPSGD and PSAC", fewer_large_values),
            (_RQ1, "DP-Stability: higher gradient and Hessian norms, lower Lipschitz constants", stability_is_apart),
        )
    ),
    Claim("figure-metrics-by-radius", _RQ2, "log metrics fall with the certified radius, for all methods", negative_correlation,
          datasets=_MNIST),
    Claim("figure-metrics-by-radius", _RQ2, "the Lipschitz constant is closest to the radius among private models",
          lipschitz_is_closest, datasets=_MNIST),
    *(
        Claim("figure-metrics-split", _D3, f"images below tau have a higher {metric}", higher_below_tau(metric),
              datasets=_MNIST)
        for metric in METRICS
    ),
    Claim("figure-radii", _D3, f"{', '.join(TITLES[name] for name in BASELINES)} have a large spike of images not certified",
          baselines_spike_at_zero, datasets=_MNIST),
    Claim("figure-radii", _D3, "DP-Gaussian certifies most images above 1.0, the mode is at 1.6", gaussian_above_one,
          datasets=_MNIST),
    Claim("figure-fgsm", _D3, "DP-Stability is the best under FGSM", stability_is_best_under_fgsm, SIGMAS),
    Claim("figure-fgsm", _D3, "the other variants are above the baselines", variants_above_baselines, SIGMAS),
    Claim("figure-fgsm", _D3, "DP-Gaussian, DP-SmoothAdv, DP-MACER are alike (within 5 points)", three_variants_alike, SIGMAS),
)  # fmt: skip
