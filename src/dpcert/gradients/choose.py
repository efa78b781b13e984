"""Choose the engine for a model: the fastest one that agrees with the reference, otherwise the reference engine.

If the run is long enough to pay for it, ``auto`` measures more on this processor: a chain of known layers as machine code; for
large weights, which library multiplies and whether machine code sums (`parts.Arithmetic`). The choice has a name (`name_of`)
that is stored in checkpoints: a resumed run, and every rank, repeats it with `repeat`.
"""

import time

import torch
from torch import Tensor, nn

from ..chains.layers import layers_of
from ..errors import ConfigError
from ..isolation import dissimilar_rows
from ..losses import cross_entropy
from .compiled import Compiled, compiled_engine
from .engine import Clip, Engine, LossOfOne, trainable
from .layerwise import Layerwise
from .parts import PLAIN, arithmetics, is_large
from .vmap import clipped_sum, per_example_gradients

AUTO, COMPILED, LAYERWISE, VMAP = ENGINES = ("auto", "compiled", "layerwise", "vmap")
_WORTH_COMPILING = 20.0  # seconds of processor time; compiling takes about two and saves half of the others
_CLEARLY_FASTER = 0.9
_TIMED_ROWS = 96
_WORTH_COMPARING = 20_000  # rows of a model with large weights; to compare all ways to compute their gradients takes 1,500
_AGREEMENT = 1e-3  # of an example's largest gradient: float32 rounding is far below, a wrong rule far above


def choose(
    name: str,
    model: nn.Module,
    loss: LossOfOne,
    input_shape: tuple[int, ...],
    workers: int = 1,
    checkpointing: bool = False,
    rows: int = 0,
) -> tuple[Engine, ...]:
    """Return the engine called `name`, one instance per worker; ``auto`` uses `layerwise` where it supports the model.

    `rows` is how many rows (examples x views) it will work on: with many, ``auto`` uses `compiled` where that is faster.
    ``compiled`` and ``layerwise`` raise where they do not support the model. The reference engine uses one worker: it swaps its
    weights into the model itself. It keeps all activations, so `checkpointing` raises where it would be used.
    """
    if checkpointing and name in (COMPILED, VMAP):
        raise ConfigError(f"gradients.checkpointing is on, but engine {name} keeps all activations; use auto or turn it off")
    if name == VMAP:
        return (clipped_sum,)
    if name == COMPILED:
        return _each(_compiled_or_refuse(model, loss, input_shape), workers)
    engine = Layerwise(checkpointing)
    reason = engine.unsupported(model, input_shape) or _disagreement(engine, model, loss, input_shape)
    if reason is None:
        fastest = None if name == LAYERWISE or checkpointing else _faster_than(engine, model, loss, input_shape, rows)
        return _each(fastest or engine, workers, checkpointing)
    if checkpointing:
        raise ConfigError(f"gradients.checkpointing cannot be used with this model: {reason}; turn it off")
    if name == LAYERWISE:
        raise ConfigError(f"gradients.engine layerwise does not support this model: {reason}; use vmap or auto")
    return (clipped_sum,)


def name_of(engine: Engine) -> str:
    """Return the name of a choice. If it was made by measurement, further words identify the bits that it gives."""
    if isinstance(engine, Compiled):
        return f"{COMPILED} {engine.fingerprint}"
    return f"{LAYERWISE} {engine.arithmetic.name}".strip() if isinstance(engine, Layerwise) else VMAP


def was_measured(name: str) -> bool:
    """Return whether the choice called `name` was made by measurement, so that another processor may have made another."""
    return " " in name


def repeat(
    name: str, model: nn.Module, input_shape: tuple[int, ...], workers: int = 1, checkpointing: bool = False
) -> tuple[Engine, ...] | None:
    """Return the measured choice called `name`; None if this machine cannot make machine code that computes the same bits.

    `checkpointing` changes no bit. Machine code for a chain does without.
    """
    engines: list[Compiled | Layerwise | None] = (
        [compiled_engine(model, input_shape, Layerwise())]
        if name.startswith(COMPILED)
        else [Layerwise(checkpointing, arithmetic) for arithmetic in arithmetics()]
    )
    found = next((engine for engine in engines if engine is not None and name_of(engine) == name), None)
    return None if found is None else _each(found, workers, checkpointing)


def _each(engine: Compiled | Layerwise, workers: int, checkpointing: bool = False) -> tuple[Engine, ...]:
    if isinstance(engine, Compiled):
        return (engine, *(engine.another(Layerwise()) for _ in range(workers - 1)))
    return (engine, *(Layerwise(checkpointing, engine.arithmetic) for _ in range(workers - 1)))


def _compiled_or_refuse(model: nn.Module, loss: LossOfOne, input_shape: tuple[int, ...]) -> Compiled:
    engine = compiled_engine(model, input_shape, Layerwise())
    reason = "it is not a chain of layers that it knows, or there is no C++ compiler here"
    found = reason if engine is None else _disagreement(engine, model, loss, input_shape)
    if engine is None or found is not None:
        raise ConfigError(f"gradients.engine compiled does not support this model: {found}; use auto")
    return engine


def _faster_than(
    plain: Layerwise, model: nn.Module, loss: LossOfOne, input_shape: tuple[int, ...], rows: int
) -> Compiled | Layerwise | None:
    """Return an engine that agrees and is clearly faster on this processor, if the rows are worth looking for one."""
    chain, large = layers_of(model, input_shape) is not None, rows > _WORTH_COMPARING and _has_large_weights(model)
    if not rows or not (chain or large):
        return None
    try:
        seconds = _seconds(plain, model, input_shape)
        if rows * seconds / _TIMED_ROWS <= _WORTH_COMPILING:
            return None
        code = compiled_engine(model, input_shape, Layerwise()) if chain else None
        others = [Layerwise(arithmetic=other) for other in arithmetics() if other != PLAIN] if large else []
        timed = {
            _seconds(engine, model, input_shape): engine
            for engine in ([code] if code else others)
            if _disagreement(engine, model, loss, input_shape) is None
        }
        return timed[min(timed)] if timed and min(timed) < _CLEARLY_FASTER * seconds else None
    except RuntimeError:  # too little memory for the comparison; a step takes fewer rows at a time if it must
        return None


def _has_large_weights(model: nn.Module) -> bool:
    on_the_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return on_the_cpu and any(is_large(parameter.numel()) for parameter in trainable(model).values())


class _Unclipped:
    def factors(self, norms: Tensor, clip_norm: float) -> Tensor:
        return torch.ones_like(norms)

    def sensitivity(self, clip_norm: float) -> float:
        return float("inf")


def _seconds(engine: Engine, model: nn.Module, input_shape: tuple[int, ...]) -> float:
    """Return the processor time for `_TIMED_ROWS` made-up rows on this thread; other programs hardly change it.

    The loss is the cross-entropy, whatever the method's: that one may need more views than the one view of these rows.
    """
    views = torch.rand((_TIMED_ROWS, 1, *input_shape), generator=torch.Generator().manual_seed(0))
    labels, best = torch.zeros(_TIMED_ROWS, dtype=torch.long), float("inf")
    for _ in range(4):
        began = time.thread_time()
        engine(model, cross_entropy, views, labels, Clip(_Unclipped(), 1.0))
        best = min(best, time.thread_time() - began)
    return best


def _disagreement(engine: Layerwise | Compiled, model: nn.Module, loss: LossOfOne, input_shape: tuple[int, ...]) -> str | None:
    """Compare with the reference engine on dissimilar examples; detects a forward that uses its weights in an unusual way."""
    device = next(model.parameters()).device
    rows = dissimilar_rows(input_shape)
    views = torch.stack([rows, rows.flip(0)], dim=1).to(device)
    labels = torch.zeros(len(views), dtype=torch.long, device=device)
    expected = per_example_gradients(model, loss, views, labels)
    scale = torch.stack([gradient.flatten(1).abs().amax(dim=1) for gradient in expected.values()]).amax(dim=0)
    try:
        found = engine.per_example(model, loss, views, labels)
        for name, gradient in expected.items():  # one parameter at a time: all of them may not fit in memory twice
            difference = (found[name].instantiate() - gradient.flatten(1)).abs().amax(dim=1)
            if bool((difference > _AGREEMENT * scale).any()):
                return f"its gradient of {name!r} differs from the reference engine's"
    except (RuntimeError, KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None
