"""``dpcert methods``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..methods import Row


def methods() -> None:
    """List the training methods, their parts and their cost.

    Views are the noisy or adversarial copies of an image. The clip bounds the influence of one image on a step.

    Cost is the time of a training step relative to dpsgd, with two copies of each image (K = 2).

    The last six are the systems that the paper compares with. "as-published" ones train as the released code does.

    docs/methods.md explains when to use which.

    Example:  dpcert methods
    """
    from ..methods import ALL_METHODS
    from ..privacy.unbounded import UNBOUNDED
    from ._show import print_table

    rows = [
        (name, _parts(row), "no" if row.clip in UNBOUNDED else "yes", f"{row.cost:.1f}x", row.source)
        for name, row in ALL_METHODS.items()
    ]
    print_table(("method", "parts", "private", "cost", "source"), rows)


def _parts(recipe: "Row") -> str:
    """The parts that differ from plain training on unmodified images."""
    parts = {" views": recipe.views, "": recipe.regulariser, " clip": recipe.clip}
    return ", ".join(f"{part}{kind}" for kind, part in parts.items() if part != "none") or "plain training"
