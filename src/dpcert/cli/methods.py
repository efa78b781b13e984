"""``dpcert methods``."""


def methods() -> None:
    """The training methods: what each is made of, where the paper has it, and what a step costs beside DPSGD's (K = 2).

    docs/methods.md says when to use which.

    Example:  dpcert methods
    """
    from ..methods import METHODS
    from ._show import print_table

    rows = [
        (name, r.views, r.regulariser, r.clip, "no" if r.clip == "none" else "yes", f"{r.cost:.1f} x", r.source)
        for name, r in METHODS.items()
    ]
    print_table(("method", "views", "regulariser", "clip", "private", "cost", "in the paper"), rows)
