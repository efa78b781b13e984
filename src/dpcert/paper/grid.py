"""The grid behind the paper's tables and figures: a cell is one training run, a target is a table or figure of cells."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._validate import one_of
from ..errors import ConfigError
from ..methods import ALL_METHODS, PRIOR
from ..runs import presets
from ..runs.config import Config
from ..runs.resolve import resolve
from ..training.phases import phases_of
from ..views import ADVERSARIAL
from . import targets
from .published import BASELINES, CIFAR10, COMPARED, SIGMAS, VARIANTS

DATASETS = presets.DATASETS  # trained from scratch, as in the paper
FINE_TUNED = (CIFAR10,)  # from the packaged backbone, which is not the paper's
ALL_DATASETS = (*DATASETS, *FINE_TUNED)
TEST_IMAGES = 10_000  # of each of the data sets
_EXAMPLES = 1000  # images per run, unless --examples says otherwise
_FINE_TUNED_EXAMPLES, _FINE_TUNED_BASELINE, _FINE_TUNED_ANALYZED, _PRIOR_EXAMPLES = 500, 200, 200, 500
_CERTIFIED_MORE = ("dp-gaussian", "dp-smoothadv")  # on CIFAR-10: the reference, and the variant with the largest ACR
_CIFAR10_RECORDS = 50_000
_BACKWARD, _HEAD_STEP = 2.0, 0.001  # of a row, in forward passes of the backbone
_PRESET_SIGMA = 0.5
_SEVERAL_SEEDS = ("regular", "dpsgd", "psac", "dp-gaussian")  # methods whose spread over seeds is measured, at sigma 0.5

Change = tuple[tuple[str, Any], ...]  # config keys that differ from the preset, with their values


def has_noisy_views(method: str) -> bool:
    """Whether sigma also affects training, not only certification."""
    return ALL_METHODS[method].views != "none"


@dataclass(frozen=True)
class Cell:
    """One training run of the grid: a preset, its sigma and seed, and what differs from the preset."""

    dataset: str
    method: str
    sigma: float = _PRESET_SIGMA
    seed: int = 0
    change: Change = ()

    def __post_init__(self) -> None:
        if not has_noisy_views(self.method):  # one run serves all sigmas
            object.__setattr__(self, "sigma", _PRESET_SIGMA)

    @property
    def preset(self) -> str:
        """The preset's name."""
        return f"{self.dataset}/{self.method}"

    @property
    def name(self) -> str:
        """The name of the run directory; it contains only what differs from the defaults."""
        sigma = "" if self.sigma == _PRESET_SIGMA else f"-sigma{self.sigma:.2f}"
        seed = "" if self.seed == 0 else f"-seed{self.seed}"
        return f"{self.dataset}-{self.method}{sigma}{seed}{change_name(self.change)}"

    def config(self) -> Config:
        """The training request."""
        return resolve(self.preset, {"method.sigma": self.sigma, "train.seed": self.seed, **dict(self.change)})

    def options(self) -> list[str]:
        """The request as options of ``dpcert train``."""
        words = [self.preset, "--sigma", f"{self.sigma:g}", "--seed", str(self.seed)]
        for key, value in self.change:
            words += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
        return words

    @property
    def is_fine_tuned(self) -> bool:
        """Whether the run starts from public weights: its work is measured in other units."""
        return self.dataset in FINE_TUNED

    def examples(self, kind: str) -> int:
        """The number of test images that a piece of work of this kind uses by default."""
        if self.method in PRIOR:
            return _PRIOR_EXAMPLES
        if not self.is_fine_tuned or kind == "attack":
            return _EXAMPLES
        if kind == "analyze":  # the same images for all methods
            return _FINE_TUNED_ANALYZED
        if not has_noisy_views(self.method):
            return _FINE_TUNED_BASELINE
        return _EXAMPLES if self.method in _CERTIFIED_MORE else _FINE_TUNED_EXAMPLES

    @property
    def noise_inside(self) -> bool:
        """Whether the noise that certifies is inside the model: its certificates have a law of their own."""
        return ALL_METHODS[self.method].noise_inside

    @property
    def skips_misclassified(self) -> bool:
        """Whether images that the smoothed model misclassifies get no radius: ACR and certified accuracy stay the same."""
        return self.config().certify.skip_misclassified

    def cost(self) -> float:
        """Training examples times epochs times the method's cost; 1 is one example of DPSGD.

        For a fine-tuned run, 1 is one forward pass of the backbone. The head phase computes the features of its views once.
        """
        config, row = self.config(), ALL_METHODS[self.method]
        noisy = has_noisy_views(self.method)
        views = config.build_method().views.count
        usual = 3 if noisy else 1  # `Row.cost` was measured with K = 2 copies plus the original
        per_example = row.cost * views / usual
        if not self.is_fine_tuned:
            return 60_000 * config.train.epochs * per_example
        total = 0.0
        for phase in phases_of(config.settings(), _CIFAR10_RECORDS, config.model.train, adversarial=row.views in ADVERSARIAL):
            rows = phase.steps * phase.batch_size
            if phase.trains_the_head_first:
                features = config.head.copies + 1 if noisy else 1
                total += features * (_CIFAR10_RECORDS + _HEAD_STEP * rows)
            else:
                total += rows * per_example * (1 + _BACKWARD)
        return total


def change_name(change: Change) -> str:
    """What differs from the preset, as a suffix of a directory name."""
    return "".join(
        ("" if value else "-replaced") if key == "method.keep_original" else f"-{key.split('.')[1]}{value:g}"
        for key, value in change
    )


@dataclass(frozen=True)
class Need:
    """What a target needs of one cell: certificates at these sigmas, per-sample metrics, attacks."""

    cell: Cell
    sigmas: tuple[float, ...] = ()
    samples: bool = False
    attacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """A table or figure of the paper: its methods and sigmas, and what is measured."""

    name: str
    paper: str
    methods: tuple[str, ...] = ()
    sigmas: tuple[float, ...] = (_PRESET_SIGMA,)
    datasets: tuple[str, ...] = DATASETS
    cifar10: tuple[float, ...] = ()  # its sigmas on CIFAR-10; empty if it does not cover CIFAR-10
    changes: dict[str, tuple[Change, ...]] = field(default_factory=dict)  # by data set: dp-gaussian's lines of an ablation
    certified: bool = True
    seeds: bool = False
    samples: bool = False
    attacks: tuple[str, ...] = ()
    in_all: bool = True  # False for the appendix's larger grids, which must be named explicitly

    def covered(self, datasets: Sequence[str] = ALL_DATASETS) -> tuple[str, ...]:
        """Those of the data sets that the target is about."""
        return tuple(name for name in datasets if name in self.datasets or (name == CIFAR10 and self.cifar10))

    def sigmas_on(self, dataset: str) -> tuple[float, ...]:
        """The sigmas of one data set."""
        return self.cifar10 if dataset == CIFAR10 else self.sigmas

    def needs(self, datasets: Sequence[str] = ALL_DATASETS) -> list[Need]:
        """The cells, in the order in which they run."""
        needs = []
        for dataset in self.covered(datasets):
            sigmas = self.sigmas_on(dataset)
            for method in self.methods:
                noisy = has_noisy_views(method)
                for sigma in sigmas if noisy else (_PRESET_SIGMA,):
                    at = (sigma,) if noisy else self._of_one_run(sigmas)
                    for seed in self._seeds(dataset, method, sigma):
                        for change in self._changes(dataset, method):
                            cell = Cell(dataset, method, sigma, seed, change)
                            needs.append(Need(cell, at if self.certified else (), self.samples, self.attacks))
        return needs

    def _of_one_run(self, sigmas: tuple[float, ...]) -> tuple[float, ...]:
        """The sigmas of a run without noisy views. `dpcert analyze` needs the certificates at the preset's sigma."""
        return tuple(sorted({*sigmas, _PRESET_SIGMA})) if self.samples else sigmas

    def _seeds(self, dataset: str, method: str, sigma: float) -> range:
        several = self.seeds and dataset in DATASETS and method in _SEVERAL_SEEDS and sigma == _PRESET_SIGMA
        return range(3) if several else range(1)

    def _changes(self, dataset: str, method: str) -> tuple[Change, ...]:
        return self.changes.get(dataset, ((),)) if method == "dp-gaussian" else ((),)


def _lines(key: str, values: Iterable[float], usual: float) -> tuple[Change, ...]:
    return tuple(() if value == usual else ((key, value),) for value in values)


REPLACED: Change = (("method.copies", 1), ("method.keep_original", False))  # the line that the paper labels 0
_COPIES = {name: (REPLACED, *_lines("method.copies", (2, 4, 6, 8), 2)) for name in DATASETS}
_RATES = {
    "mnist": _lines("train.learning_rate", (0.25, 0.5, 1.0), 0.5),
    "fashion-mnist": _lines("train.learning_rate", (2.0, 4.0, 8.0), 4.0),
    CIFAR10: (),  # a table of CrossViT-Tiny, which is not run here
}
_CLIPS = {name: _lines("privacy.clip_norm", (0.01, 0.05, 0.1, 0.2, 0.5), 0.1) for name in DATASETS} | {CIFAR10: ()}
_CONSISTENCY = tuple(f"{base}{part}" for base in ("dp-gaussian", "dp-smoothadv") for part in ("", "+psac", "+consistency"))
_MNIST, _LOWEST = ("mnist",), (0.25,)

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(targets.TABLE_1, "Table 1 (Section 5)", COMPARED, SIGMAS, cifar10=SIGMAS, seeds=True),
        Target(targets.CERTIFIED_ACCURACY, "certified accuracy by radius (Section 5: CIFAR-10; Appendix: the others)", COMPARED,
               SIGMAS, cifar10=SIGMAS),
        Target(targets.CIFAR10_COMPARISON, "comparison with SecureSGD, StoBatch, TransDenoiser on CIFAR-10 (Section 5)",
               VARIANTS, SIGMAS, datasets=(), cifar10=SIGMAS),
        Target(targets.CONSISTENCY_PSAC, "consistency and PSAC (Section 5.1, left figure)", _CONSISTENCY),
        Target(targets.AUGMENTATIONS, "number of augmentations K (Section 5.1, right figure)", ("dpsgd", "dp-gaussian"),
               changes=_COPIES),
        Target(targets.LEARNING_RATE, "learning rate (Appendix, table)", ("dp-gaussian",), (0.25,), cifar10=(0.25,),
               changes=_RATES, certified=False),
        Target(targets.CLIP_NORM, "clip norm (Appendix, table)", ("dp-gaussian",), (0.25,), cifar10=(0.25,), changes=_CLIPS,
               certified=False),
        Target(targets.METRIC_HISTOGRAMS, "per-sample metrics by method (Section 5.2, RQ1)", COMPARED, datasets=_MNIST,
               cifar10=_LOWEST, samples=True),
        Target(targets.METRICS_BY_RADIUS, "metrics by certified radius (Section 5.2, RQ2)", COMPARED, datasets=_MNIST,
               cifar10=_LOWEST, samples=True),
        Target(targets.METRICS_SPLIT, "metrics above and below a radius tau (Appendix)", COMPARED, datasets=_MNIST,
               samples=True),
        Target(targets.RADII, "distribution of certified radii (Appendix)", (*BASELINES, "dp-gaussian"), datasets=_MNIST),
        Target(targets.FGSM, "accuracy under FGSM (Appendix)", COMPARED, SIGMAS, cifar10=SIGMAS, attacks=("fgsm",)),
        Target(targets.PRIOR, "not in the paper: the systems it quotes, trained and certified alike", (*VARIANTS, *PRIOR),
               datasets=_MNIST, cifar10=_LOWEST, in_all=False),
        Target(targets.CONSISTENCY_PSAC_FULL, "the same at all sigmas (Appendix)", _CONSISTENCY, SIGMAS, in_all=False),
        Target(targets.AUGMENTATIONS_FULL, "the same at all sigmas (Appendix)", ("dpsgd", "dp-gaussian"), SIGMAS,
               changes=_COPIES, in_all=False),
        Target(targets.METRIC_HISTOGRAMS_FULL, "the same, both data sets, all sigmas (Appendix)", COMPARED, SIGMAS,
               samples=True, in_all=False),
    )
}  # fmt: skip


def targets_of(names: Sequence[str], datasets: Sequence[str] = ALL_DATASETS) -> list[Target]:
    """The targets with these names; ``all`` means every target except the appendix's larger grids."""
    chosen: dict[str, Target] = {}
    for name in names:
        if name == targets.ALL:
            chosen |= {key: target for key, target in TARGETS.items() if target.in_all and target.covered(datasets)}
        elif not TARGETS[one_of("target", name, (*TARGETS, targets.ALL))].covered(datasets):
            about = " and ".join(TARGETS[name].covered())
            raise ConfigError(f"{name} is about {about}, --dataset is {datasets[0]}; leave --dataset out")
        else:
            chosen[name] = TARGETS[name]
    return list(chosen.values())


def datasets_of(names: Sequence[str] | None) -> list[str]:
    """The requested data sets; all if none is named."""
    for name in names or ():
        one_of("data set", name, ALL_DATASETS)
    return [name for name in ALL_DATASETS if not names or name in names]


# The most important targets run first, in this order; then the other requested ones.
_FIRST = (
    (targets.TABLE_1, DATASETS),
    (targets.AUGMENTATIONS, ("fashion-mnist",)),
    (targets.CONSISTENCY_PSAC, ("fashion-mnist",)),
    (targets.METRIC_HISTOGRAMS, _MNIST),
    (targets.FGSM, DATASETS),
    (targets.TABLE_1, FINE_TUNED),
)
_FINE_TUNED_TURNS = ("dp-gaussian", "dpsgd", "dp-stability", "dp-macer", "dp-smoothadv", "regular", "psac")
_TURNS = {"dp-gaussian": 0, "dpsgd": 0, "regular": 1, "psac": 1}
_TURN_OF_SEEDS, _LAST_TURN = 2, 3


def in_order(targets: Sequence[Target], datasets: Sequence[str]) -> list[Need]:
    """Everything the targets need, the most important first; a cell appears again if a later target measures more of it."""
    steps: list[tuple[Target, tuple[str, ...]]] = [(TARGETS[name], about) for name, about in _FIRST if TARGETS[name] in targets]
    steps += [(target, ALL_DATASETS) for target in targets]
    known: dict[Cell, Need] = {}
    parts = []
    for target, about in steps:
        for need in sorted(target.needs([name for name in datasets if name in about]), key=_turn):
            old = known.get(need.cell)
            rest = need if old is None else _beyond(need, old)
            if old is None or rest != Need(need.cell):
                parts.append(rest)
            known[need.cell] = _joined(need, old or Need(need.cell))
    return parts


def _turn(need: Need) -> int:
    if need.cell.is_fine_tuned:
        known = need.cell.method in _FINE_TUNED_TURNS
        return _LAST_TURN + 1 + (_FINE_TUNED_TURNS.index(need.cell.method) if known else len(_FINE_TUNED_TURNS))
    return _TURN_OF_SEEDS if need.cell.seed else _TURNS.get(need.cell.method, _LAST_TURN)


def _beyond(need: Need, old: Need) -> Need:
    sigmas = tuple(sigma for sigma in need.sigmas if sigma not in old.sigmas)
    attacks = tuple(name for name in need.attacks if name not in old.attacks)
    return Need(need.cell, sigmas, need.samples and not old.samples, attacks)


def _joined(need: Need, old: Need) -> Need:
    sigmas, attacks = (tuple(sorted({*a, *b})) for a, b in ((old.sigmas, need.sigmas), (old.attacks, need.attacks)))
    return Need(need.cell, sigmas, old.samples or need.samples, attacks)


def needs_of(targets: Sequence[Target], datasets: Sequence[str]) -> list[Need]:
    """Everything the targets need, each cell once."""
    merged: dict[Cell, Need] = {}
    for target in targets:
        for need in target.needs(datasets):
            merged[need.cell] = _joined(need, merged.get(need.cell, Need(need.cell)))
    return list(merged.values())
