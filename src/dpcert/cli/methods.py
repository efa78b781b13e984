"""``dpcert methods``."""


def methods() -> None:
    """The training methods: what each is made of, and where the paper has it.

    Example:  dpcert methods
    """
    from ..methods import METHODS
    from ._show import print_table

    rows = [
        (name, r.views, r.regulariser, r.clip, "no" if r.clip == "none" else "yes", r.source) for name, r in METHODS.items()
    ]
    print_table(("method", "views", "regulariser", "clip", "private", "in the paper"), rows)
