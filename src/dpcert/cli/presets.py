"""``dpcert presets``."""


def presets() -> None:
    """The presets, with the settings in which they differ; sigma is 0.5 unless --sigma says otherwise.

    Example:  dpcert run mnist/dp-gaussian --sigma 0.25
    """
    from ..experiment import presets as p
    from ..experiment.run import resolve
    from ._show import print_table

    rows = []
    for name in p.names():
        c = resolve(name, {})
        budget = f"({c.privacy.epsilon:g}, {c.privacy.delta:g})" if c.build_method().clip_rule.name != "none" else "not private"
        rows.append(
            (
                name,
                budget,
                f"{c.train.optimizer} {c.train.learning_rate:g}",
                str(c.train.batch_size),
                f"{c.train.epochs:g}",
                str(c.build_method().views.copies),
                "0.25, 0.5, 1.0",
            )
        )
    print_table(("preset", "epsilon, delta", "optimiser", "batch", "epochs", "K", "sigmas of the paper"), rows)
