"""``dpcert methods``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..methods import Row


def methods() -> None:
    """The training methods: what each is made of, where the paper has it, and what a step costs beside DPSGD's (K = 2).

    docs/methods.md says when to use which.

    Example:  dpcert methods
    """
    from ..methods import METHODS
    from ._show import print_table

    rows = [(name, _parts(r), "no" if r.clip == "none" else "yes", f"{r.cost:.1f}x", r.source) for name, r in METHODS.items()]
    print_table(("method", "made of", "private", "cost", "in the paper"), rows)


def _parts(recipe: "Row") -> str:
    """What differs from plain training on the images as they are."""
    parts = {" views": recipe.views, "": recipe.regulariser, " clip": recipe.clip}
    return ", ".join(f"{part}{kind}" for kind, part in parts.items() if part != "none") or "plain training"
