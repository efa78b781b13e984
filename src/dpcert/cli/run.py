"""``dpcert run``."""

import typer

from . import _options as o


def run(
    source: o.Source = None,
    sigma: o.Sigma = None,
    epsilon: o.Epsilon = None,
    delta: o.Delta = None,
    seed: o.Seed = None,
    out: o.Out = None,
    model: o.Model = None,
    data: o.Data = None,
    examples: o.Examples = None,
    device: o.Device = None,
    processes: o.Processes = None,
    set_: o.Set = None,
) -> None:
    """Train, certify and write a report in one command.

    Rerun the same command to resume an interrupted run. Rerunning a finished run changes nothing.

    Example:  dpcert run fashion-mnist/dp-gaussian --sigma 0.25 --examples 1000
    """
    world = o.joined(processes)
    from ..runs.certify import request_of
    from ..runs.resolve import default_out, resolve
    from ..store.runs import FIGURES, REPORT
    from .certify import certify_and_print
    from .report import report
    from .train import train_and_print

    chosen = o.assignments(
        set_, model=model, data=data, sigma=sigma, epsilon=epsilon, delta=delta, seed=seed, device=device, examples=examples
    )
    config = resolve(source, chosen, typer.echo)
    folder = out or default_out(config, source)
    train_and_print(config, folder, o.factory_of(model), world)
    world.wait()  # until rank 0 has written the model
    with o.opened(folder, model, data, o.own_device(world, config.train.device)) as loaded:
        certify_and_print(loaded, request_of(config, loaded.smoothing()), world)
    if not world.is_first:
        return
    report([folder], html=folder / REPORT, figures=folder / FIGURES, data=data)
