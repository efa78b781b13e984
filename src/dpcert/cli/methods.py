"""``dpcert methods``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..methods import Row


def methods() -> None:
    """List the training methods, their parts and their cost.

    Views are the noisy or adversarial copies of an image. The clip bounds the influence of one image on a step.

    Cost is the time of a training step relative to dpsgd, with two copies of each image (K = 2).

    docs/methods.md explains when to use which.

    Example:  dpcert methods
    """
    from ..methods import METHODS
    from ._show import print_table

    rows = [(name, _parts(r), "no" if r.clip == "none" else "yes", f"{r.cost:.1f}x", r.source) for name, r in METHODS.items()]
    print_table(("method", "parts", "private", "cost", "in the paper"), rows)


def _parts(recipe: "Row") -> str:
    """The parts that differ from plain training on unmodified images."""
    parts = {" views": recipe.views, "": recipe.regulariser, " clip": recipe.clip}
    return ", ".join(f"{part}{kind}" for kind, part in parts.items() if part != "none") or "plain training"
