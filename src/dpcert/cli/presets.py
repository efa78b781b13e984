"""``dpcert presets``."""

import typer


def presets() -> None:
    """List the presets: settings of the paper for a data set and a method.

    sigma is 0.5 unless you pass --sigma (the paper uses 0.25, 0.5 and 1.0).

    Example:  dpcert run mnist/dp-gaussian --sigma 0.25
    """
    from ..runs import presets as p
    from ..runs.resolve import resolve
    from ._show import print_table

    configs = {name: resolve(name, {}) for name in p.names()}
    rows = []
    for method in dict.fromkeys(name.split("/")[1] for name in configs):
        of_method = [config for name, config in configs.items() if name.split("/")[1] == method]
        built = of_method[0].build_method()
        epsilons = {"inf" if built.clip_rule.name == "none" else f"{config.privacy.epsilon:g}" for config in of_method}
        settings = [configs.get(f"{dataset}/{method}") for dataset in p.DATASETS]
        cells = [
            "" if c is None else f"{c.train.optimizer} {c.train.learning_rate:g}/{c.train.batch_size}/{c.train.epochs:g}"
            for c in settings
        ]
        rows.append((method, " or ".join(sorted(epsilons)), str(built.views.copies), *cells))
    print_table(("method", "epsilon", "K", *p.DATASETS), rows)
    deltas = ", ".join(sorted({f"{config.privacy.delta:g}" for config in configs.values()}))
    typer.echo("A preset is DATASET/METHOD: dpcert run fashion-mnist/psac")
    typer.echo("Cells: optimizer, learning rate/batch size/epochs.")
    typer.echo(f"K: noisy copies per image. delta: {deltas}.")
