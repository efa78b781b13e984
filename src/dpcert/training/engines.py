"""Which engine a phase uses: rank 0 chooses by measurement, all ranks use the same, and a resumed run repeats the choice."""

from torch import nn

from ..errors import RunError
from ..gradients.choose import AUTO, COMPILED, choose, name_of, repeat, was_measured
from ..gradients.engine import Engine, LossOfOne
from ..scale.world import World
from ..workers import worker_count

_MUST, _MAY = "!", "?"


def engines_for(
    world: World,
    asked: str,
    before: str,
    network: nn.Module,
    loss: LossOfOne,
    input_shape: tuple[int, ...],
    rows: int,
    checkpointing: bool = False,
) -> tuple[tuple[Engine, ...], str]:
    """Return the engines of this rank, one per worker, and the name of the choice for checkpoints.

    `asked` is the setting. `before` is the name in the checkpoint that a run resumes from, on rank 0; empty if the phase starts
    now. `rows` is what the phase will work on. A rank that cannot make the same machine code as rank 0 leaves all ranks without
    it, unless the run was started with it, or the user asked for it: then this raises on every rank.
    """
    workers, made = worker_count(next(network.parameters()).device), list[Engine]()

    def decide() -> bytes:
        if asked == AUTO and was_measured(before):
            return f"{_MUST}{before}".encode()
        share = 0 if before else rows // world.size
        made.extend(choose(asked, network, loss, input_shape, workers, checkpointing, share))
        return f"{_MUST if asked == COMPILED else _MAY}{name_of(made[0])}".encode()

    decided = world.first(decide).decode()
    name = decided[1:]
    if was_measured(name):
        engines = tuple(made) or repeat(name, network, input_shape, workers, checkpointing)
        if not world.any(engines is None) and engines is not None:
            return engines, name
        if decided.startswith(_MUST):
            raise RunError(
                f"the gradients of this run are computed by {name!r}, which cannot be made here with the same bits; "
                "resume it where it was started, or accept other rounding errors: --set gradients.engine=layerwise"
            )
        made.clear()
    engines = tuple(made) or choose(asked, network, loss, input_shape, workers, checkpointing)
    return engines, name_of(engines[0])
