"""``dpcert methods``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..methods import Row


def methods() -> None:
    """List the training methods: their parts, their cost per step relative to DPSGD (K = 2), their place in the paper.

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
