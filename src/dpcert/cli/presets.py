"""``dpcert presets``."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ..runs.config import Config

_WIDTH = 80


def presets() -> None:
    """List the presets: settings for a data set and a method.

    mnist, fashion-mnist and cifar10-crossvit have the paper's settings. cifar10 fine-tunes the packaged backbone instead,
    and cifar10-efficientnet a model with ImageNet weights.

    cifar10 trains the head of the backbone only. --set model.train=last:2,norms adds a second phase that trains more layers.

    DATASET/best is not a method of the paper but the recipe with the best certificates that we know.

    mnist and cifar10 also have presets of the systems that the paper quotes (dpcert methods lists them).

    sigma is 0.5 unless you pass --sigma (the paper uses 0.25, 0.5 and 1.0).

    Example:  dpcert run mnist/dp-gaussian --sigma 0.25
    """
    from ..methods import METHODS
    from ..privacy.unbounded import UNBOUNDED
    from ..runs import presets as p
    from ..runs.resolve import resolve
    from ._show import print_table

    configs = {name: resolve(name, {}) for name in p.method_names() if name.split("/")[1] in METHODS}
    rows = []
    for method in dict.fromkeys(name.split("/")[1] for name in configs):
        of_method = [config for name, config in configs.items() if name.split("/")[1] == method]
        built = of_method[0].build_method()
        epsilons = {"inf" if built.clip_rule.name in UNBOUNDED else f"{config.privacy.epsilon:g}" for config in of_method}
        cells = [_steps(configs[f"{dataset}/{method}"]) for dataset in p.DATASETS]
        rows.append((method, " or ".join(sorted(epsilons)), str(built.views.copies), *cells))
    print_table(("method", "epsilon", "K", *p.DATASETS), rows)
    deltas = ", ".join(sorted({f"{config.privacy.delta:g}" for config in configs.values()}))
    typer.echo(f"A preset is DATASET/METHOD (dpcert run fashion-mnist/psac) or DATASET/{p.BEST}.")
    typer.echo(f"Cells: optimizer, learning rate/batch size/epochs. K: noisy copies. delta: {deltas}")
    for family in p.FINE_TUNED:
        text = _family(family, {name.split("/")[1]: c for name, c in configs.items() if name.startswith(f"{family}/")})
        typer.echo(textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


def _steps(config: Config) -> str:
    train = config.train
    return f"{train.optimizer} {train.learning_rate:g}/{train.batch_size}/{train.epochs:g}"


def _family(family: str, configs: dict[str, Config]) -> str:
    """The phases of the presets of one family: those of most methods, then the methods that differ."""
    phases = {method: _phases(config) for method, config in configs.items()}
    usual = Counter(phases.values()).most_common(1)[0][0]
    model, copies = next(iter(configs.values())).model.name, f", K{usual.rpartition('K')[2]}"
    sentences = [f"{family}/METHOD, public {model}: {usual}."]
    others = dict.fromkeys(words for words in phases.values() if words != usual)
    for words in others:
        methods = ", ".join(_shortened([method for method in phases if phases[method] == words]))
        sentences.append(f"{methods}: {words.removeprefix(f'{usual}; ').removesuffix(copies)}.")
    return " ".join(sentences)


def _shortened(methods: list[str]) -> list[str]:
    """Names of which only the first part is new: ``psac, psac+a, psac+b`` is ``psac, +a, +b``."""
    bases = [method.partition("+")[0] for method in methods]
    return [
        method.removeprefix(base) if base in bases[:place] and "+" in method else method
        for place, (method, base) in enumerate(zip(methods, bases, strict=True))
    ]


def _phases(config: Config) -> str:
    """The phases that the preset runs, and K; a method without noisy views has K = 0 in every family."""
    from ..training.phases import phases_of
    from ..views import ADVERSARIAL

    head, main = config.head, f"{config.model.train} {_steps(config)}, K {config.method.copies}"
    steps = f"{head.steps} full-batch steps" if head.batch_size is None else f"{head.steps} steps of {head.batch_size}"
    first = f"head {head.optimizer} {head.learning_rate:g}, {steps}, K {head.copies}"
    adversarial = config.build_method().views.name in ADVERSARIAL
    phases = phases_of(config.settings(), config.train.batch_size, config.model.train, adversarial=adversarial)
    return "; then ".join(first if phase.trains_the_head_first else main for phase in phases)
