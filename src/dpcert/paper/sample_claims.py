"""The paper's claims about per-sample metrics, radii and FGSM (Section 5.2 and the appendix).

Metrics and attacks are measured for seed 0 only; radii use all seeds.
"""

from collections.abc import Callable

import numpy as np

from ..analysis.correlate import THRESHOLDS, correlation, drawn_groups
from ..store.records import METRICS
from . import targets
from .claims import MUCH, SIMILAR, Claim, Finding, titled
from .published import BASELINES, CIFAR10, COMPARED, SIGMAS, TITLES, VARIANTS
from .result_index import Measured, ResultIndex

NORMS = ("gradient_norm", "hessian_norm")
_SMALLEST = 1e-12  # a metric of exactly 0 has no logarithm
_BIMODAL = 5 / 9  # Sarle's coefficient of a uniform distribution; a larger value suggests two modes
_POINT = 0.01
_FEWEST = 30


def values_of(run: Measured, metric: str) -> np.ndarray:
    """A metric, one entry per image."""
    return np.array([getattr(sample, metric) for sample in run.samples])


def logs(run: Measured, metric: str) -> np.ndarray:
    """log10 of a metric, one entry per image."""
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
    """Sarle's coefficient with its correction for small samples: above 5/9, a distribution probably has two modes."""
    n, centered = len(values), values - values.mean()
    deviation = centered.std()
    if n < 4 or deviation == 0:
        return 0.0
    skew, kurtosis = float((centered**3).mean() / deviation**3), float((centered**4).mean() / deviation**4) - 3
    return (skew**2 + 1) / (kurtosis + 3 * (n - 1) ** 2 / ((n - 2) * (n - 3)))


def _mode(values: np.ndarray) -> float:
    counts, edges = np.histogram(values, bins=20)
    place = int(counts.argmax())
    return float((edges[place] + edges[place + 1]) / 2)


def analyzed(index: ResultIndex, dataset: str, methods: tuple[str, ...], sigma: float) -> list[Measured] | None:
    """A run of each method with per-sample metrics; None if one is missing."""
    runs = index.all_certified(dataset, methods, sigma)
    return runs if runs is not None and all(len(run.samples) >= _FEWEST for run in runs) else None


def regular_has_the_greatest_mode(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """The mode of Regular's gradient norms is above those of DPSGD, PSAC and DP-Gaussian."""
    runs = analyzed(index, dataset, (*BASELINES, "dp-gaussian"), sigma)
    if runs is None:
        return None
    modes = [_mode(logs(run, "gradient_norm")) for run in runs]
    words = ", ".join(f"{titled(run)} {mode:.1f}" for run, mode in zip(runs, modes, strict=True))
    return Finding(modes[0] > max(modes[1:]), f"mode of log10: {words}")


def dpsgd_is_bimodal(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """DPSGD's gradient norms have two modes, Regular's one (Sarle's coefficient against 5/9)."""
    runs = analyzed(index, dataset, ("dpsgd", "regular"), sigma)
    if runs is None:
        return None
    dpsgd, regular = (bimodality(logs(run, "gradient_norm")) for run in runs)
    return Finding(dpsgd > _BIMODAL > regular, f"coefficient {dpsgd:.2f} for DPSGD, {regular:.2f} for Regular (limit 0.56)")


def fewer_large_values(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """The 90 % quantile of each metric is lower for DP-Gaussian than for DPSGD and PSAC."""
    runs = analyzed(index, dataset, ("dp-gaussian", "dpsgd", "psac"), sigma)
    if runs is None:
        return None
    tops = {metric: [float(np.quantile(logs(run, metric), 0.9)) for run in runs] for metric in METRICS}
    words = "; ".join(f"{METRICS[metric]} {' / '.join(f'{v:.2f}' for v in values)}" for metric, values in tops.items())
    good = all(values[0] < min(values[1:]) for values in tops.values())
    return Finding(good, f"log10 of the 90 % quantile, DP-Gaussian / DPSGD / PSAC: {words}")


def stability_is_apart(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """DP-Stability: higher gradient and Hessian norms, a lower Lipschitz constant than the other variants (mean of logs)."""
    others = tuple(name for name in VARIANTS if name != "dp-stability")
    runs = analyzed(index, dataset, ("dp-stability", *others), sigma)
    if runs is None:
        return None
    means = {metric: [float(logs(run, metric).mean()) for run in runs] for metric in METRICS}
    above = all(means[metric][0] > max(means[metric][1:]) for metric in NORMS)
    below = means["lipschitz"][0] < min(means["lipschitz"][1:])
    words = "; ".join(f"{METRICS[m]} {v[0]:.2f} against {min(v[1:]):.2f} to {max(v[1:]):.2f}" for m, v in means.items())
    return Finding(above and below, f"mean log10: {words}")


def stability_has_lower_lipschitz(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """DP-Stability's median Lipschitz constant is more than 10 % below that of each other variant."""
    others = tuple(name for name in VARIANTS if name != "dp-stability")
    runs = analyzed(index, dataset, ("dp-stability", *others), sigma)
    if runs is None:
        return None
    medians = [float(np.median(values_of(run, "lipschitz"))) for run in runs]
    words = ", ".join(f"{titled(run)} {value:.3g}" for run, value in zip(runs, medians, strict=True))
    return Finding(medians[0] < (1 - MUCH) * min(medians[1:]), f"median: {words}")


def _quantiles(run: Measured, metric: str) -> np.ndarray:
    return np.asarray(np.quantile(logs(run, metric), np.linspace(0.01, 0.99, 99)))


def psac_is_closer_to_regular(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """The mean distance of the quantiles of log norms from Regular's is smaller for PSAC than for DPSGD."""
    runs = analyzed(index, dataset, ("regular", "psac", "dpsgd"), sigma)
    if runs is None:
        return None
    far = {}
    for metric in NORMS:
        regular, psac, dpsgd = (_quantiles(run, metric) for run in runs)
        far[metric] = (float(np.abs(psac - regular).mean()), float(np.abs(dpsgd - regular).mean()))
    words = "; ".join(f"{METRICS[metric]} {psac:.2f} / {dpsgd:.2f}" for metric, (psac, dpsgd) in far.items())
    return Finding(all(psac < dpsgd for psac, dpsgd in far.values()), f"distance from Regular (log10), PSAC / DPSGD: {words}")


def gaussian_is_shifted_lower(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """The median of each metric is lower for DP-Gaussian than for DPSGD and PSAC."""
    runs = analyzed(index, dataset, ("dp-gaussian", "dpsgd", "psac"), sigma)
    if runs is None:
        return None
    medians = {metric: [float(np.median(logs(run, metric))) for run in runs] for metric in METRICS}
    words = "; ".join(f"{METRICS[metric]} {' / '.join(f'{v:.2f}' for v in values)}" for metric, values in medians.items())
    good = all(values[0] < min(values[1:]) for values in medians.values())
    return Finding(good, f"log10 of the median, DP-Gaussian / DPSGD / PSAC: {words}")


def stability_is_apart_at_equal_radii(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """Against each other method, over the radii both reach: a higher mean gradient norm, a lower mean Lipschitz constant."""
    runs = analyzed(index, dataset, ("dp-stability", *(name for name in COMPARED if name != "dp-stability")), sigma)
    if runs is None:
        return None
    gradient, lipschitz = (_gaps(runs[0], runs[1:], metric, sigma) for metric in ("gradient_norm", "lipschitz"))
    if not len(gradient) == len(lipschitz) == len(runs) - 1:
        return Finding(None, "DP-Stability shares no group of radii with another method")
    low, high = min(gradient, key=lambda name: gradient[name]), max(lipschitz, key=lambda name: lipschitz[name])
    words = f"{METRICS['gradient_norm']} at least {gradient[low]:+.2f} (against {low}), "
    words += f"{METRICS['lipschitz']} at most {lipschitz[high]:+.2f} (against {high})"
    return Finding(gradient[low] > 0 > lipschitz[high], f"log10, at equal radii: {words}")


def _gaps(run: Measured, others: list[Measured], metric: str, sigma: float) -> dict[str, float]:
    """For each other method: the mean difference of the log metrics, over the groups of radii that both have."""
    ours, gaps = _by_group(run, metric, sigma), {}
    for other in others:
        theirs = _by_group(other, metric, sigma)
        shared = sorted(ours.keys() & theirs.keys())
        if shared:
            gaps[titled(other)] = float(np.mean([ours[radius] - theirs[radius] for radius in shared]))
    return gaps


def _by_group(run: Measured, metric: str, sigma: float) -> dict[float, float]:
    middles, values = by_radius(run, metric, sigma)
    return dict(zip(middles.tolist(), values.tolist(), strict=True))


def correlations(run: Measured, sigma: float) -> dict[str, float | None]:
    """The correlation of radius and log metric over the groups of images, for each metric."""
    groups = {metric: drawn_groups(values_of(run, metric), radii(run), sigma) for metric in METRICS}
    return {
        metric: _correlation(np.array([group.middle for group in members]), np.array([group.mean for group in members]))
        for metric, members in groups.items()
    }


def _correlation(radius: np.ndarray, metric: np.ndarray) -> float | None:
    """The correlation of the radius and the log metric; None if it is undefined."""
    return correlation(metric, radius).pearson


def negative_correlation(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """For every method and metric, the log metric falls with the radius."""
    runs = analyzed(index, dataset, COMPARED, sigma)
    if runs is None:
        return None
    values = {f"{titled(run)} {METRICS[m]}": value for run in runs for m, value in correlations(run, sigma).items()}
    known = {name: value for name, value in values.items() if value is not None}
    unknown = [name for name in values if name not in known]
    if not known:
        return Finding(None, "the images of no method lie in three groups of radii")
    weakest = max(known, key=lambda name: known[name])
    negative = sum(value < 0 for value in known.values())
    words = f"{negative} of {len(known)} negative; weakest {weakest} {known[weakest]:+.2f}"
    if unknown:
        words += f"; too few groups of radii: {', '.join(unknown)}"
    return Finding(False if negative < len(known) else None if unknown else True, words)


def lipschitz_is_closest(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """Over single images of the private models, the Lipschitz constant has the most negative correlation with the radius."""
    runs = analyzed(index, dataset, ("dpsgd", "psac", *VARIANTS), sigma)
    if runs is None:
        return None
    each = {metric: [_correlation(radii(run), values_of(run, metric)) for run in runs] for metric in METRICS}
    known = {metric: [value for value in values if value is not None] for metric, values in each.items()}
    if any(len(values) < len(runs) for values in known.values()):
        return Finding(None, "radii or metrics of a method are all equal: they have no correlation")
    mean = {metric: float(np.mean(values)) for metric, values in known.items()}
    strongest = min(mean, key=lambda metric: mean[metric])
    words = ", ".join(f"{METRICS[metric]} {value:+.2f}" for metric, value in mean.items())
    return Finding(strongest == "lipschitz" and mean[strongest] < 0, f"mean correlation of {len(runs)} methods: {words}")


def higher_below_tau(metric: str) -> Callable[[ResultIndex, str, float], Finding | None]:
    """A check that images with a radius below tau have a higher mean log metric, for every method and tau."""

    def check(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
        runs = analyzed(index, dataset, COMPARED, sigma)
        if runs is None:
            return None
        gaps = {}
        for run in runs:
            for tau in THRESHOLDS:
                below, values = radii(run) < tau, logs(run, metric)
                if below.any() and not below.all():
                    gaps[f"{titled(run)} at tau {tau:g}"] = float(values[below].mean() - values[~below].mean())
        if not gaps:
            return Finding(None, "no method has images on both sides of a tau")
        smallest = min(gaps, key=lambda name: gaps[name])
        higher = sum(gap > 0 for gap in gaps.values())
        return Finding(higher == len(gaps), f"{higher} of {len(gaps)}; smallest gap {smallest} {gaps[smallest]:+.2f} (log10)")

    return check


def more_fall_below_as_tau_grows(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """Of the images with a Lipschitz constant above the method's median, more are below the largest tau than below the
    smallest, for every method where some are above the smallest."""
    runs = analyzed(index, dataset, COMPARED, sigma)
    if runs is None:
        return None
    counts = {}
    for run in runs:
        values = logs(run, "lipschitz")
        high = radii(run)[values > np.median(values)]
        if (high >= THRESHOLDS[0]).any():
            counts[titled(run)] = [int((high < tau).sum()) for tau in THRESHOLDS]
    if not counts:
        return Finding(None, f"no method has a large Lipschitz constant at a radius of {THRESHOLDS[0]:g} or more")
    words = ", ".join(f"{name} {' / '.join(map(str, below))}" for name, below in counts.items())
    taus = " / ".join(f"{tau:g}" for tau in THRESHOLDS)
    return Finding(all(below[-1] > below[0] for below in counts.values()), f"images below tau {taus}: {words}")


def baselines_spike_at_zero(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """For Regular, DPSGD and PSAC, the fullest of ten bins of radii is the one at 0."""
    runs = index.all_seeds(dataset, BASELINES, sigma)
    if runs is None:
        return None
    spikes = [np.histogram(run.earned, bins=10, range=(0, 3.3 * sigma))[0] for run in runs]
    words = ", ".join(f"{titled(run)} {100 * float((run.earned == 0).mean()):.0f} %" for run in runs)
    return Finding(all(int(spike.argmax()) == 0 for spike in spikes), f"not certified at any radius: {words}")


def gaussian_above_one(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """DP-Gaussian certifies most images at more than 1.0, and its fullest bin is the last one, at about 1.6."""
    run = index.seeds(dataset, "dp-gaussian", sigma)
    if run is None:
        return None
    counts, edges = np.histogram(run.earned, bins=np.arange(0.0, 1.8, 0.1))
    share, mode = float((run.earned > 1.0).mean()), float(edges[int(counts.argmax())])
    return Finding(share > 0.5 and mode >= 1.5 - 1e-9, f"{100 * share:.0f} % above 1.0; mode {mode:.1f} to {mode + 0.1:.1f}")


def _attacked(index: ResultIndex, dataset: str, sigma: float) -> dict[str, dict[float, float]] | None:
    curves = {}
    for method in COMPARED:
        run = index.get(dataset, method, sigma)
        if run is None or not run.fgsm:
            return None
        curves[method] = {strength: row.accuracy for strength, row in sorted(run.fgsm.items())}
    return curves if len({tuple(curve) for curve in curves.values()}) == 1 else None


def stability_is_best_under_fgsm(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """At no strength is DP-Stability more than a point below another method; at some, it is more than a point above all."""
    curves = _attacked(index, dataset, sigma)
    if curves is None:
        return None
    best = {s: max(curve[s] for name, curve in curves.items() if name != "dp-stability") for s in curves["dp-stability"]}
    lead = {strength: curves["dp-stability"][strength] - other for strength, other in best.items()}
    return _ahead(lead, "other")


def variants_above_baselines(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """At no strength are the other variants over a point below a baseline; at some, they are over a point above all."""
    curves = _attacked(index, dataset, sigma)
    if curves is None:
        return None
    ours = [name for name in VARIANTS if name != "dp-stability"]
    strengths = list(curves["dpsgd"])
    lead = {s: min(curves[name][s] for name in ours) - max(curves[name][s] for name in BASELINES) for s in strengths}
    return _ahead(lead, "baseline")


def _ahead(lead: dict[float, float], of: str) -> Finding:
    words = ", ".join(f"{100 * value:+.1f} at {strength:g}" for strength, value in lead.items())
    return Finding(min(lead.values()) >= -_POINT and max(lead.values()) > _POINT, f"points ahead of the best {of}: {words}")


def three_variants_alike(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """DP-Gaussian, DP-SmoothAdv and DP-MACER within 5 points of each other at every strength."""
    curves = _attacked(index, dataset, sigma)
    if curves is None:
        return None
    ours = [curves[name] for name in VARIANTS if name != "dp-stability"]
    apart = {s: max(curve[s] for curve in ours) - min(curve[s] for curve in ours) for s in ours[0]}
    widest = max(apart, key=lambda s: apart[s])
    return Finding(apart[widest] <= SIMILAR, f"at most {100 * apart[widest]:.1f} points apart, at strength {widest:g}")


_RQ1, _RQ2 = "Section 5.2 (RQ1)", "Section 5.2 (RQ2)"
_D3 = "Appendix D.3"
_MNIST = ("mnist",)
_BOTH = ("mnist", "fashion-mnist")
_CIFAR, _LOWEST = (CIFAR10,), (0.25,)  # CIFAR-10 is analyzed at this sigma only

SAMPLE_CLAIMS: tuple[Claim, ...] = (
    *(
        Claim(target, where, sentence, check, sigmas, datasets)
        for target, sigmas, datasets in (
            (targets.METRIC_HISTOGRAMS, (0.5,), _MNIST),
            (targets.METRIC_HISTOGRAMS, _LOWEST, _CIFAR),
            (targets.METRIC_HISTOGRAMS_FULL, SIGMAS, _BOTH),
        )
        for where, sentence, check in (
            (_RQ1, "Regular's gradient norms have a mode far above the private methods'", regular_has_the_greatest_mode),
            (_RQ1, "DPSGD's gradient norms are bimodal, Regular's are not", dpsgd_is_bimodal),
            (_RQ2, "DP-Gaussian has fewer images with large metrics than DPSGD and PSAC", fewer_large_values),
            (_RQ1, "PSAC's gradient and Hessian norms are closer to Regular's than DPSGD's are", psac_is_closer_to_regular),
            (_RQ1, "DP-Gaussian shifts the metrics lower (medians below DPSGD's and PSAC's)", gaussian_is_shifted_lower),
            (_RQ1, "DP-Stability: higher gradient and Hessian norms, lower Lipschitz constants", stability_is_apart),
        )
    ),
    Claim(targets.METRIC_HISTOGRAMS, "Section 6", "fine-tuned with DP-Stability, models have much lower Lipschitz constants",
          stability_has_lower_lipschitz, _LOWEST, _CIFAR),
    *(
        Claim(targets.METRICS_BY_RADIUS, _RQ2, sentence, check, sigmas, datasets)
        for sigmas, datasets in (((0.5,), _MNIST), (_LOWEST, _CIFAR))
        for check, sentence in (
            (negative_correlation, "log metrics fall with the certified radius, for all methods"),
            (lipschitz_is_closest, "the Lipschitz constant is closest to the radius among private models"),
            (
                stability_is_apart_at_equal_radii,
                "DP-Stability at equal radii: higher gradient norms, lower Lipschitz constants",
            ),
        )
    ),
    *(
        Claim(targets.METRICS_SPLIT, _D3, f"images below tau have a higher {METRICS[metric]}", higher_below_tau(metric),
              datasets=_MNIST)
        for metric in METRICS
    ),
    Claim(targets.METRICS_SPLIT, _D3, "as tau grows, more images with a large local Lipschitz constant are below it",
          more_fall_below_as_tau_grows, datasets=_MNIST),
    Claim(targets.RADII, _D3, f"{', '.join(TITLES[name] for name in BASELINES)} have a large spike of images not certified",
          baselines_spike_at_zero, datasets=_MNIST),
    Claim(targets.RADII, _D3, "DP-Gaussian certifies most images above 1.0, the mode is at 1.6", gaussian_above_one,
          datasets=_MNIST),
    Claim(targets.FGSM, _D3, "DP-Stability is the best under FGSM", stability_is_best_under_fgsm, SIGMAS,
          (*_BOTH, *_CIFAR)),
    Claim(targets.FGSM, _D3, "the other variants are above the baselines", variants_above_baselines, SIGMAS,
          (*_BOTH, *_CIFAR)),
    Claim(targets.FGSM, _D3, "DP-Gaussian, DP-SmoothAdv, DP-MACER are alike (within 5 points)", three_variants_alike, SIGMAS,
          (*_BOTH, *_CIFAR)),
)  # fmt: skip
