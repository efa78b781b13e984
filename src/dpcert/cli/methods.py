"""``dpcert methods``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..methods import Row


def methods() -> None:
    """List the training methods, their parts and their cost.

    Views are the noisy or adversarial copies of an image. The clip bounds the influence of one image on a step.

    Cost is the time of a training step relative to dpsgd, with two copies of each image (K = 2).

    The second list has the systems that the paper compares with. "as-published" ones train as the released code does.

    docs/methods.md explains when to use which.

    Example:  dpcert methods
    """
    from ..methods import METHODS, PRIOR
    from ..privacy.unbounded import UNBOUNDED
    from ._show import print_table

    def private(row: Row) -> str:
        return "no" if row.clip in UNBOUNDED else "yes"

    rows = [(name, _parts(row), private(row), f"{row.cost:.1f}x", row.source) for name, row in METHODS.items()]
    print_table(("method", "parts", "private", "cost", "in the paper"), rows)
    systems = [(name, private(row), f"{row.cost:.1f}x", row.source) for name, row in PRIOR.items()]
    print_table(("system", "private", "cost", "source"), systems)


def _parts(recipe: Row) -> str:
    """The parts that differ from plain training on unmodified images."""
    parts = {" views": recipe.views, "": recipe.regulariser, " clip": recipe.clip}
    return ", ".join(f"{part}{kind}" for kind, part in parts.items() if part != "none") or "plain training"
