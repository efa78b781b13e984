"""The grid behind the paper's tables and figures: a cell is one training run, a target is a table or figure of cells."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._validate import one_of
from ..errors import ConfigError
from ..methods import METHODS
from ..runs import presets
from ..runs.config import Config
from ..runs.resolve import resolve
from . import targets
from .published import BASELINES, COMPARED, SIGMAS

DATASETS = presets.DATASETS
TEST_IMAGES = 10_000  # of each of the data sets
_PRESET_SIGMA = 0.5
_SEVERAL_SEEDS = ("regular", "dpsgd", "psac", "dp-gaussian")  # methods whose spread over seeds is measured, at sigma 0.5

Change = tuple[tuple[str, Any], ...]  # config keys that differ from the preset, with their values


def has_noisy_views(method: str) -> bool:
    """Whether sigma also affects training, not only certification."""
    return METHODS[method].views != "none"


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

    def cost(self) -> float:
        """Training examples times epochs times the method's cost; 1 is one example of DPSGD."""
        config, row = self.config(), METHODS[self.method]
        views = config.build_method().views.count
        usual = 3 if has_noisy_views(self.method) else 1  # `Row.cost` was measured with K = 2 copies plus the original
        return 60_000 * config.train.epochs * row.cost * views / usual


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
    changes: dict[str, tuple[Change, ...]] = field(default_factory=dict)  # by data set: dp-gaussian's lines of an ablation
    certified: bool = True
    seeds: bool = False
    samples: bool = False
    attacks: tuple[str, ...] = ()
    in_all: bool = True  # False for the appendix's larger grids, which must be named explicitly

    def needs(self, datasets: Sequence[str] = DATASETS) -> list[Need]:
        """The cells, in the order in which they run."""
        needs = []
        for dataset in [name for name in datasets if name in self.datasets]:
            for method in self.methods:
                noisy = has_noisy_views(method)
                for sigma in self.sigmas if noisy else (_PRESET_SIGMA,):
                    for seed in self._seeds(method, sigma):
                        for change in self._changes(dataset, method):
                            at = (sigma,) if noisy else self.sigmas
                            cell = Cell(dataset, method, sigma, seed, change)
                            needs.append(Need(cell, at if self.certified else (), self.samples, self.attacks))
        return needs

    def _seeds(self, method: str, sigma: float) -> range:
        return range(3) if self.seeds and method in _SEVERAL_SEEDS and sigma == _PRESET_SIGMA else range(1)

    def _changes(self, dataset: str, method: str) -> tuple[Change, ...]:
        return self.changes.get(dataset, ((),)) if method == "dp-gaussian" else ((),)


def _lines(key: str, values: Iterable[float], usual: float) -> tuple[Change, ...]:
    return tuple(() if value == usual else ((key, value),) for value in values)


REPLACED: Change = (("method.copies", 1), ("method.keep_original", False))  # the line that the paper labels 0
_COPIES = {name: (REPLACED, *_lines("method.copies", (2, 4, 6, 8), 2)) for name in DATASETS}
_RATES = {
    "mnist": _lines("train.learning_rate", (0.25, 0.5, 1.0), 0.5),
    "fashion-mnist": _lines("train.learning_rate", (2.0, 4.0, 8.0), 4.0),
}
_CLIPS = {name: _lines("privacy.clip_norm", (0.01, 0.05, 0.1, 0.2, 0.5), 0.1) for name in DATASETS}
_CONSISTENCY = tuple(f"{base}{part}" for base in ("dp-gaussian", "dp-smoothadv") for part in ("", "+psac", "+consistency"))
_MNIST = ("mnist",)

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(targets.TABLE_1, "Table 1 (Section 5)", COMPARED, SIGMAS, seeds=True),
        Target(targets.CERTIFIED_ACCURACY, "certified accuracy by radius (Appendix, MNIST and Fashion-MNIST)", COMPARED,
               SIGMAS),
        Target(targets.CIFAR10_COMPARISON, "comparison with SecureSGD, StoBatch, TransDenoiser on CIFAR-10 (Section 5)"),
        Target(targets.CONSISTENCY_PSAC, "consistency and PSAC (Section 5.1, left figure)", _CONSISTENCY),
        Target(targets.AUGMENTATIONS, "number of augmentations K (Section 5.1, right figure)", ("dpsgd", "dp-gaussian"),
               changes=_COPIES),
        Target(targets.LEARNING_RATE, "learning rate (Appendix, table)", ("dp-gaussian",), (0.25,), changes=_RATES,
               certified=False),
        Target(targets.CLIP_NORM, "clip norm (Appendix, table)", ("dp-gaussian",), (0.25,), changes=_CLIPS, certified=False),
        Target(targets.METRIC_HISTOGRAMS, "per-sample metrics by method (Section 5.2, RQ1)", COMPARED, datasets=_MNIST,
               samples=True),
        Target(targets.METRICS_BY_RADIUS, "metrics by certified radius (Section 5.2, RQ2)", COMPARED, datasets=_MNIST,
               samples=True),
        Target(targets.METRICS_SPLIT, "metrics above and below a radius tau (Appendix)", COMPARED, datasets=_MNIST,
               samples=True),
        Target(targets.RADII, "distribution of certified radii (Appendix)", (*BASELINES, "dp-gaussian"), datasets=_MNIST),
        Target(targets.FGSM, "accuracy under FGSM (Appendix)", COMPARED, SIGMAS, attacks=("fgsm",)),
        Target(targets.CONSISTENCY_PSAC_FULL, "the same at all sigmas (Appendix)", _CONSISTENCY, SIGMAS, in_all=False),
        Target(targets.AUGMENTATIONS_FULL, "the same at all sigmas (Appendix)", ("dpsgd", "dp-gaussian"), SIGMAS,
               changes=_COPIES, in_all=False),
        Target(targets.METRIC_HISTOGRAMS_FULL, "the same, both data sets, all sigmas (Appendix)", COMPARED, SIGMAS,
               samples=True, in_all=False),
    )
}  # fmt: skip


def targets_of(names: Sequence[str], datasets: Sequence[str] = DATASETS) -> list[Target]:
    """The targets with these names; ``all`` means every target except the appendix's larger grids."""
    chosen: dict[str, Target] = {}
    for name in names:
        if name == targets.ALL:
            chosen |= {key: target for key, target in TARGETS.items() if target.in_all and _about(target, datasets)}
        elif not _about(TARGETS[one_of("target", name, (*TARGETS, targets.ALL))], datasets):
            about = " and ".join(TARGETS[name].datasets)
            raise ConfigError(f"{name} is about {about}, --dataset is {datasets[0]}; leave --dataset out")
        else:
            chosen[name] = TARGETS[name]
    return list(chosen.values())


def _about(target: Target, datasets: Sequence[str]) -> bool:
    return not target.methods or any(name in target.datasets for name in datasets)


def datasets_of(names: Sequence[str] | None) -> list[str]:
    """The requested data sets; both if none is named."""
    for name in names or ():
        if name in ("cifar10", "cifar-10"):
            raise ConfigError("data set 'cifar10' is not run here: it comes in a later issue; choose mnist or fashion-mnist")
        one_of("data set", name, DATASETS)
    return [name for name in DATASETS if not names or name in names]


# The most important targets run first, in this order; then the other requested ones.
_FIRST = (
    (targets.TABLE_1, DATASETS),
    (targets.AUGMENTATIONS, ("fashion-mnist",)),
    (targets.CONSISTENCY_PSAC, ("fashion-mnist",)),
    (targets.METRIC_HISTOGRAMS, _MNIST),
    (targets.FGSM, DATASETS),
)
_TURNS = {"dp-gaussian": 0, "dpsgd": 0, "regular": 1, "psac": 1}
_TURN_OF_SEEDS, _LAST_TURN = 2, 3


def in_order(targets: Sequence[Target], datasets: Sequence[str]) -> list[Need]:
    """Everything the targets need, the most important first; a cell appears again if a later target measures more of it."""
    steps = [(TARGETS[name], about) for name, about in _FIRST if TARGETS[name] in targets]
    steps += [(target, DATASETS) for target in targets]
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
