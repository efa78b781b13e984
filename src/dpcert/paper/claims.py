"""The paper's claims about its tables and figures, each as a function of rows. A claim holds, does not hold, is undecided (the
rows cannot decide it), or was not run. Figures are means over the seeds of a line, as in the table.

The sentences are our short versions; `where` is their place in the paper. For "similar", "little" and "largely unchanged" we
use the tolerance of the verdicts, 5 % of ACR; for "much better", twice that; for "fall off drastically", half of a figure;
and for "no dramatic drop", 2 points of accuracy.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..certification.metrics import radii_to_show
from . import targets
from .published import (
    BASELINES,
    CIFAR10,
    CLIP_NORM,
    LEARNING_RATE,
    NEEDS_CROSSVIT,
    QUOTED,
    QUOTED_RADII,
    SIGMAS,
    TITLES,
    VARIANTS,
)
from .result_index import Measured, ResultIndex, Seeds
from .verdicts import NOT_RUN

EVERYWHERE = "all"  # instead of a data set: all those on which we train the paper's own model
SIMILAR = 0.05
MUCH = 2 * SIMILAR
_SIMILAR_POINTS = 3.0  # of certified accuracy: the tolerance of the verdicts
_DRASTIC = 0.5
_DRAMATIC_POINTS = 2.0
_STATES = {True: "holds", False: "does not hold", None: "undecided"}


@dataclass(frozen=True)
class Finding:
    """Whether a claim holds, and the figures that show it; `holds` is None if the rows cannot decide it."""

    holds: bool | None
    figures: str


Check = Callable[[ResultIndex, str, float], Finding | None]  # None: a run it needs is missing


@dataclass(frozen=True)
class Claim:
    """One claim of the paper, checked for each data set and sigma."""

    target: str
    where: str
    sentence: str
    check: Check
    sigmas: tuple[float, ...] = (0.5,)
    datasets: tuple[str, ...] = ("mnist", "fashion-mnist")
    everywhere: bool = False  # about no single sigma


@dataclass(frozen=True)
class Judged:
    """A claim with its result."""

    claim: Claim
    dataset: str
    sigma: float
    finding: Finding | None

    @property
    def state(self) -> str:
        """The result in words."""
        return NOT_RUN if self.finding is None else _STATES[self.finding.holds]


def judge(
    claims: Iterable[Claim], index: ResultIndex, target: str, datasets: Sequence[str], sigmas: Sequence[float]
) -> list[Judged]:
    """All claims about one target."""
    return [
        Judged(claim, dataset, sigma, claim.check(index, dataset, sigma))
        for claim in claims
        if claim.target == target
        for dataset in claim.datasets
        if dataset in datasets or (dataset == EVERYWHERE and any(name != CIFAR10 for name in datasets))
        for sigma in claim.sigmas
        if sigma in sigmas or dataset == CIFAR10 or claim.everywhere
    ]


def titled(run: Seeds | Measured) -> str:
    """The method as the paper spells it."""
    return TITLES[run.place.method]


def _acr(runs: Iterable[Seeds]) -> str:
    return ", ".join(f"{titled(run)} {run.acr:.3f}" for run in runs)


def _gain(new: float, old: float) -> float | None:
    """The relative gain; None if `old` is 0, as for a model that certifies no image."""
    return new / old - 1 if old > 0 else None


def _collapsed(runs: Iterable[Seeds]) -> Finding:
    return Finding(None, f"no image is certified, so there is nothing to compare with: {_acr(runs)}")


def _groups(index: ResultIndex, dataset: str, sigma: float) -> tuple[list[Seeds], list[Seeds]] | None:
    ours, others = index.all_seeds(dataset, VARIANTS, sigma), index.all_seeds(dataset, BASELINES, sigma)
    return None if ours is None or others is None else (ours, others)


def higher_acr(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """Every variant's ACR above every baseline's."""
    groups = _groups(index, dataset, sigma)
    if groups is None:
        return None
    low, high = min(groups[0], key=lambda run: run.acr), max(groups[1], key=lambda run: run.acr)
    return Finding(low.acr > high.acr, f"lowest of DP-CERT: {_acr([low])}; highest baseline: {_acr([high])}")


def higher_at_quarter(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """The same for certified accuracy at radius 0.25."""
    groups = _groups(index, dataset, sigma)
    if groups is None:
        return None
    low, high = (pick(group, key=lambda run: run.share(0.25)) for pick, group in zip((min, max), groups, strict=True))
    shares = [f"{titled(run)} {100 * run.share(0.25):.1f} %" for run in (low, high)]
    return Finding(low.share(0.25) > high.share(0.25), f"lowest of DP-CERT: {shares[0]}; highest baseline: {shares[1]}")


def much_better(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """Every variant's ACR, the area under its curve, is more than 10 % above every baseline's."""
    groups = _groups(index, dataset, sigma)
    if groups is None:
        return None
    low, high = min(groups[0], key=lambda run: run.acr), max(groups[1], key=lambda run: run.acr)
    if low.acr == 0:
        return _collapsed((low, high)) if high.acr == 0 else Finding(False, _acr((low, high)))
    lead = _gain(low.acr, high.acr)
    reached = [r for r in radii_to_show(sigma) if any(run.share(r) > 0 for group in groups for run in group)]
    margins = {r: min(run.share(r) for run in groups[0]) - max(run.share(r) for run in groups[1]) for r in reached}
    worst = min(margins, key=lambda r: margins[r])
    ahead = "" if lead is None else f" ({100 * lead:+.0f} %)"
    words = f"{_acr((low, high))}{ahead}; smallest margin of a curve {100 * margins[worst]:+.1f} points, at radius {worst:g}"
    return Finding(lead is None or lead > MUCH, words)


def lower_clean_accuracy(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """The mean clean accuracy of the variants is below PSAC's."""
    ours, psac = index.all_seeds(dataset, VARIANTS, sigma), index.seeds(dataset, "psac", sigma)
    if ours is None or psac is None or psac.clean is None:
        return None
    clean = [run.clean for run in ours if run.clean is not None]
    if len(clean) < len(ours):
        return None
    mean = sum(clean) / len(clean)
    return Finding(mean < psac.clean, f"DP-CERT {min(clean):.2f} to {max(clean):.2f} %, PSAC {psac.clean:.2f} %")


def no_drastic_fall(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """Neither ACR nor certified accuracy at 0.25 falls below half of its value at sigma 0.25, for every variant."""
    first, last = index.all_seeds(dataset, VARIANTS, SIGMAS[0]), index.all_seeds(dataset, VARIANTS, sigma)
    if first is None or last is None:
        return None
    if min(run.acr for run in first) == 0:
        return _collapsed(first)
    pairs = list(zip(first, last, strict=True))
    good = all(b.acr >= _DRASTIC * a.acr and b.share(0.25) >= _DRASTIC * a.share(0.25) for a, b in pairs)
    words = (
        f"{titled(a)} {a.acr:.3f} to {b.acr:.3f}, {100 * a.share(0.25):.1f} to {100 * b.share(0.25):.1f} %" for a, b in pairs
    )
    return Finding(good, "; ".join(words))


def dpsgd_not_always_below_regular(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """At some data set and sigma, DPSGD's ACR is not below Regular's: one place proves it, only all places refute it."""
    places = [(name, s) for name in ("mnist", "fashion-mnist") for s in SIGMAS]
    available = {place: runs for place in places if (runs := index.all_seeds(place[0], ("dpsgd", "regular"), place[1]))}
    shown = any(runs[0].acr >= runs[1].acr for runs in available.values())
    if not shown and len(available) < len(places):
        return None
    words = (f"{TITLES[name]} {s:g}: {runs[0].acr:.3f} to {runs[1].acr:.3f}" for (name, s), runs in available.items())
    return Finding(shown, f"DPSGD to Regular, {', '.join(words)}")


def similar_variants(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """All four ACRs are within 5 % of the best."""
    ours = index.all_seeds(dataset, VARIANTS, sigma)
    if ours is None:
        return None
    gain = _gain(min(run.acr for run in ours), max(run.acr for run in ours))
    return _collapsed(ours) if gain is None else Finding(-gain <= SIMILAR, f"{_acr(ours)}: {-100 * gain:.1f} % apart")


def transdenoiser_lead(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """TransDenoiser is less than 40 % better than SecureSGD; uses quoted figures, no run of ours."""
    ahead = [100 * (a / b - 1) for a, b in zip(QUOTED["TransDenoiser"], QUOTED["SecureSGD"], strict=True)]
    words = ", ".join(f"{lead:.0f} % at {radius:g}" for lead, radius in zip(ahead, QUOTED_RADII, strict=True))
    return Finding(max(ahead) < 40, words)


def _against_transdenoiser(runs: Iterable[Seeds]) -> dict[str, list[float]]:
    """For each run, its certified accuracy at the quoted radii divided by TransDenoiser's."""
    return {
        titled(run): [100 * run.share(r) / quoted for r, quoted in zip(QUOTED_RADII, QUOTED["TransDenoiser"], strict=True)]
        for run in runs
    }


def surpass_transdenoiser(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """Every variant is above TransDenoiser at every quoted radius."""
    ours = index.all_seeds(dataset, VARIANTS, sigma)
    if ours is None:
        return None
    smallest = {name: min(ratios) for name, ratios in _against_transdenoiser(ours).items()}
    place = {name: QUOTED_RADII[ratios.index(min(ratios))] for name, ratios in _against_transdenoiser(ours).items()}
    words = ", ".join(f"{name} {ratio:.2f} times at {place[name]:g}" for name, ratio in smallest.items())
    return Finding(min(smallest.values()) > 1, f"smallest lead: {words}")


def far_above_transdenoiser(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """At radius 0.7 the best variant is more than 250 % better, which is 3.5 times as good."""
    ours = index.all_seeds(dataset, VARIANTS, sigma)
    if ours is None:
        return None
    best = max(ours, key=lambda run: run.share(QUOTED_RADII[-1]))
    share, quoted = 100 * best.share(QUOTED_RADII[-1]), QUOTED["TransDenoiser"][-1]
    words = f"{titled(best)} {share:.2f} %, TransDenoiser {quoted:.2f} %: {100 * (share / quoted - 1):+.0f} %"
    return Finding(share / quoted - 1 > 2.5, words)


def up_to_two_and_a_half_times(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """At some quoted radius a variant reaches 2.5 times TransDenoiser's certified accuracy."""
    ours = index.all_seeds(dataset, VARIANTS, sigma)
    if ours is None:
        return None
    ratios = _against_transdenoiser(ours)
    best = max(ratios, key=lambda name: max(ratios[name]))
    most = max(ratios[best])
    return Finding(most >= 2.5, f"{best} {most:.2f} times at {QUOTED_RADII[ratios[best].index(most)]:g}")


def stability_is_most_accurate(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """DP-Stability has the highest clean accuracy of the variants."""
    ours = index.all_seeds(dataset, VARIANTS, sigma)
    clean = {run.place.method: run.clean for run in ours or () if run.clean is not None}
    if ours is None or len(clean) < len(ours):
        return None
    others = max(value for name, value in clean.items() if name != "dp-stability")
    words = ", ".join(f"{TITLES[name]} {value:.2f} %" for name, value in clean.items())
    return Finding(clean["dp-stability"] > others, words)


def stability_is_competitive(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """DP-Stability's certified accuracy at 0.25 is at most 3 points below the best variant's, its ACR at most 5 %."""
    ours = index.all_seeds(dataset, VARIANTS, sigma)
    if ours is None:
        return None
    stability = next(run for run in ours if run.place.method == "dp-stability")
    best, most = max(ours, key=lambda run: run.share(0.25)), max(ours, key=lambda run: run.acr)
    gain = _gain(stability.acr, most.acr)
    if gain is None:
        return _collapsed(ours)
    points = 100 * (stability.share(0.25) - best.share(0.25))
    words = f"{points:+.1f} points at 0.25 against {titled(best)}; ACR {100 * gain:+.1f} % against {titled(most)}"
    return Finding(-gain <= SIMILAR and -points <= _SIMILAR_POINTS + 1e-9, words)


def gaussian_is_as_good_as_smoothadv(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """DP-Gaussian's ACR is at most 5 % below DP-SmoothAdv's."""
    runs = index.all_seeds(dataset, ("dp-gaussian", "dp-smoothadv"), sigma)
    if runs is None:
        return None
    gain = _gain(runs[0].acr, runs[1].acr)
    return _collapsed(runs) if gain is None else Finding(-gain <= SIMILAR, f"{_acr(runs)}: {100 * gain:+.1f} %")


def needs_crossvit(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """For claims about the settings of the paper's own CIFAR-10 model: rows of another backbone cannot decide them."""
    return Finding(None, NEEDS_CROSSVIT)


def _without_gain(base: str, part: str) -> Check:
    def check(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
        runs = index.all_seeds(dataset, (base, f"{base}+{part}"), sigma)
        if runs is None:
            return None
        gain = _gain(runs[1].acr, runs[0].acr)
        return _collapsed(runs) if gain is None else Finding(gain <= SIMILAR, f"{_acr(runs)}: {100 * gain:+.1f} %")

    return check


def simplest_is_as_good(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """DP-Gaussian within 5 % of the best of the six."""
    names = [f"{base}{part}" for base in VARIANTS[:2] for part in ("", "+psac", "+consistency")]
    runs = index.all_seeds(dataset, names, sigma)
    if runs is None:
        return None
    best = max(runs, key=lambda run: run.acr)
    gain = _gain(runs[0].acr, best.acr)
    if gain is None:
        return _collapsed(runs)
    return Finding(-gain <= SIMILAR, f"{_acr([runs[0]])}, best {_acr([best])}: {-100 * gain:.1f} % below it")


COPIES = {"0": "copies1-replaced", "2": "", "4": "copies4", "6": "copies6", "8": "copies8"}


def _by_copies(index: ResultIndex, dataset: str, sigma: float, lines: Iterable[str] = COPIES) -> dict[str, Seeds] | None:
    by_line = {line: index.seeds(dataset, "dp-gaussian", sigma, COPIES[line]) for line in lines}
    return {line: runs for line, runs in by_line.items() if runs} if all(by_line.values()) else None


def little_gain_beyond_two(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """K = 4, 6, 8 gain at most 5 % ACR over K = 2."""
    runs = _by_copies(index, dataset, sigma, ("2", "4", "6", "8"))
    if runs is None:
        return None
    gain = _gain(max(run.acr for run in runs.values()), runs["2"].acr)
    if gain is None:
        return _collapsed([runs["2"]])
    words = ", ".join(f"K={line} {run.acr:.3f}" for line, run in runs.items())
    return Finding(gain <= SIMILAR, f"{words}: at most {100 * gain:+.1f} %")


def unchanged_by_copies(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """Certified accuracy of the five lines stays within 5 points at each radius."""
    runs = _by_copies(index, dataset, sigma)
    if runs is None:
        return None
    shares = {r: [run.share(r) for run in runs.values()] for r in radii_to_show(sigma)}
    widest = max(shares, key=lambda r: max(shares[r]) - min(shares[r]))
    width = max(shares[widest]) - min(shares[widest])
    return Finding(width <= SIMILAR, f"at most {100 * width:.1f} points between the lines, at radius {widest:g}")


def copies_above_dpsgd(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """Every line, 0 included, has a larger ACR than DPSGD."""
    runs, dpsgd = _by_copies(index, dataset, sigma), index.seeds(dataset, "dpsgd", sigma)
    if runs is None or dpsgd is None:
        return None
    lowest = min(run.acr for run in runs.values())
    return Finding(lowest > dpsgd.acr, f"lowest of the lines {lowest:.3f}, {_acr([dpsgd])}")


def fewer_copies_keep_accuracy(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
    """Clean accuracy with K = 2 is not below that with K = 8."""
    runs = _by_copies(index, dataset, sigma, ("2", "4", "6", "8"))
    clean = {line: run.clean for line, run in (runs or {}).items() if run.clean is not None}
    if runs is None or len(clean) < len(runs):
        return None
    return Finding(clean["2"] >= clean["8"], ", ".join(f"K={line} {value:.2f} %" for line, value in clean.items()))


def swept(index: ResultIndex, dataset: str, table: dict[tuple[str, float], float], key: str) -> dict[float, float | None]:
    """Our clean accuracy for each value of a sweep of DP-Gaussian at sigma 0.25; the preset's value needs no change.

    Our CIFAR-10 runs train another model with other settings: none of them belongs in the paper's sweep.
    """
    if dataset == CIFAR10:
        return {value: None for name, value in table if name == dataset}
    accuracies: dict[float, float | None] = {}
    for value in [value for name, value in table if name == dataset]:
        run = index.get(dataset, "dp-gaussian", 0.25, f"{key}{value:g}") or (
            index.get(dataset, "dp-gaussian", 0.25) if _is_preset(table, dataset, value) else None
        )
        accuracies[value] = None if run is None else run.clean
    return accuracies


def _is_preset(table: dict[tuple[str, float], float], dataset: str, value: float) -> bool:
    """Whether this is the paper's setting, which is the best of its sweep."""
    return max((v for name, v in table if name == dataset), key=lambda v: table[dataset, v]) == value


def _sweep(table: dict[tuple[str, float], float], key: str, judged: Callable[[dict[float, float], float], bool]) -> Check:
    def check(index: ResultIndex, dataset: str, sigma: float) -> Finding | None:
        accuracies = swept(index, dataset, table, key)
        values = {value: clean for value, clean in accuracies.items() if clean is not None}
        if len(values) < len(accuracies):
            return None
        preset = next(value for value in values if _is_preset(table, dataset, value))
        return Finding(judged(values, preset), ", ".join(f"{value:g}: {clean:.2f} %" for value, clean in values.items()))

    return check


def _is_best(values: dict[float, float], preset: float) -> bool:
    return values[preset] >= max(values.values())


def _no_drop(values: dict[float, float], preset: float) -> bool:
    order = sorted(values)
    place = order.index(preset)
    return all(values[preset] - values[near] <= _DRAMATIC_POINTS for near in order[max(0, place - 1) : place + 2])


SWEEPS = {  # of DP-Gaussian: the paper's figures and the config key that is varied
    targets.LEARNING_RATE: (LEARNING_RATE, "learning_rate"),
    targets.CLIP_NORM: (CLIP_NORM, "clip_norm"),
}
_T1, _CURVES, _CIFAR = targets.TABLE_1, targets.CERTIFIED_ACCURACY, targets.CIFAR10_COMPARISON
_S5, _S51, _APPENDIX = "Section 5", "Section 5.1", "Appendix D.2"
_ONLY_CIFAR, _ALL = (CIFAR10,), ("mnist", "fashion-mnist", CIFAR10)

CLAIMS: tuple[Claim, ...] = (
    Claim(_T1, _S5, "all DP-CERT rows have a larger ACR than Regular, DPSGD and PSAC", higher_acr, SIGMAS, _ALL),
    Claim(_T1, _S5, "all DP-CERT rows have a higher certified accuracy at 0.25 than the baselines", higher_at_quarter, SIGMAS,
          _ALL),
    Claim(_T1, _S5, "DP-CERT's clean accuracy is generally below PSAC's", lower_clean_accuracy, SIGMAS, _ALL),
    Claim(_T1, _S5, "DP-CERT's ACR and certified accuracy do not fall off drastically (to below half) from sigma 0.25 to 1.0",
          no_drastic_fall, (1.0,), _ALL),
    Claim(_T1, _S5, "DPSGD's ACR is not always below that of non-private training", dpsgd_not_always_below_regular, (0.5,),
          (EVERYWHERE,), everywhere=True),
    Claim(_T1, _S5, "all DP-CERT methods perform alike (ACR within 5 %)", similar_variants, SIGMAS, _ALL),
    Claim(_T1, _S5, "Gaussian augmentations are as good as adversarial ones (ACR at most 5 % below)",
          gaussian_is_as_good_as_smoothadv, SIGMAS, _ONLY_CIFAR),
    Claim(_T1, _S5, "for fine-tuning, DP-Stability has the highest clean accuracy of all variants", stability_is_most_accurate,
          SIGMAS, _ONLY_CIFAR),
    Claim(_T1, _S5, "and its certified accuracy is competitive (at 0.25 within 3 points of the best, ACR within 5 %)",
          stability_is_competitive, SIGMAS, _ONLY_CIFAR),
    Claim(_CURVES, "Appendix D.1", "all DP-CERT variants do much better than Regular, DPSGD and PSAC (ACR by over 10 %)",
          much_better, SIGMAS),
    Claim(_CURVES, _S5, "all DP-CERT variants significantly outperform the baselines (ACR by over 10 %)", much_better, SIGMAS,
          _ONLY_CIFAR),
    Claim(_CIFAR, _S5, "TransDenoiser is less than 40 % better than SecureSGD", transdenoiser_lead, (0.5,), _ONLY_CIFAR,
          everywhere=True),
    Claim(_CIFAR, _S5, "all DP-CERT variants surpass TransDenoiser", surpass_transdenoiser, SIGMAS, _ONLY_CIFAR),
    Claim(_CIFAR, _S5, "at radius 0.7 the best DP-CERT is over 250 % better than TransDenoiser", far_above_transdenoiser,
          SIGMAS, _ONLY_CIFAR),
    Claim(_CIFAR, "Abstract", "DP-CERT has up to 2.5 times the certified accuracy of the leading prior work",
          up_to_two_and_a_half_times, SIGMAS, _ONLY_CIFAR),
    *(
        Claim(target, _S51, f"{word} brings {TITLES[base]} no gain of ACR (at most 5 %)", _without_gain(base, part), sigmas)
        for target, sigmas in ((targets.CONSISTENCY_PSAC, (0.5,)), (targets.CONSISTENCY_PSAC_FULL, SIGMAS))
        for base in VARIANTS[:2]
        for part, word in (("consistency", "consistency"), ("psac", "PSAC"))
    ),
    Claim(targets.CONSISTENCY_PSAC, _S51, "DP-Gaussian does as well as any of the six (within 5 %)", simplest_is_as_good),
    *(
        Claim(target, where, sentence, check, sigmas)
        for target, sigmas in ((targets.AUGMENTATIONS, (0.5,)), (targets.AUGMENTATIONS_FULL, SIGMAS))
        for where, sentence, check in (
            (_S51, "certified accuracy is largely unchanged by K (lines within 5 points)", unchanged_by_copies),
            (_APPENDIX, "beyond K = 2 there is little gain (ACR at most 5 %)", little_gain_beyond_two),
            (_APPENDIX, "any augmentation, including line 0, is better than DPSGD", copies_above_dpsgd),
            (_S51, "fewer augmentations keep the clean accuracy better (K = 2 against 8)", fewer_copies_keep_accuracy),
        )
    ),
    *(
        Claim(target, _APPENDIX, sentence, _sweep(table, key, judged), (0.25,))
        for target, (table, key) in SWEEPS.items()
        for sentence, judged in (("the paper's setting has the highest clean accuracy", _is_best),
                                 ("no dramatic drop next to it (at most 2 points)", _no_drop))
    ),
    *(
        Claim(target, _APPENDIX, sentence, needs_crossvit, (0.25,), _ONLY_CIFAR)
        for target in SWEEPS
        for sentence in ("the paper's setting has the highest clean accuracy", "no dramatic drop next to it (at most 2 points)")
    ),
)  # fmt: skip
