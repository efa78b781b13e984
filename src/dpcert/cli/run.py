"""``dpcert run``."""

from . import _options as o


def run(
    source: o.Source = None,
    sigma: o.Sigma = None,
    epsilon: o.Epsilon = None,
    delta: o.Delta = None,
    seed: o.Seed = None,
    out: o.Out = None,
    examples: o.Examples = None,
    device: o.Device = None,
    set_: o.Set = None,
) -> None:
    """Train, certify, summarise and report: the whole way in one command.

    Example:  dpcert run fashion-mnist/dp-gaussian --sigma 0.25 --examples 1000
    """
    from ..runs import run as experiment
    from ..store.runs import FIGURES, REPORT
    from .certify import certify_and_tell
    from .report import report
    from .train import train_and_tell

    chosen = o.assignments(set_, sigma=sigma, epsilon=epsilon, delta=delta, seed=seed, device=device, examples=examples)
    config = experiment.resolve(source, chosen)
    folder = out or experiment.default_out(config)
    train_and_tell(config, folder)
    certify_and_tell(folder, experiment.request_of(config), config.train.device)
    report([folder], html=folder / REPORT, figures=folder / FIGURES)
