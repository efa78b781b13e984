"""``dpcert audit``."""

from typing import Annotated

import typer

from ..errors import AuditError, ConfigError
from ..rounding import floor_text


def audit(
    method: Annotated[
        list[str] | None, typer.Argument(help="Methods, or nothing for all private ones.", show_default=False)
    ] = None,
    draws: Annotated[int, typer.Option(min=100, help="Steps taken with the canary, and as many without.")] = 10_000,
    noise_multiplier: Annotated[float, typer.Option(help="Noise over sensitivity (rho) of the audited step.")] = 1.0,
    confidence: Annotated[float, typer.Option(help="1 minus the chance of a false alarm.")] = 0.999,
    delta: Annotated[float, typer.Option(help="Failure probability of the budget.")] = 1e-5,
    sigma: Annotated[float, typer.Option(help="Noise of the views.")] = 0.25,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes the audit reproducible.", show_default=False)] = None,
) -> None:
    """Attack the training step itself: an empirical lower bound on epsilon, for each method.

    Takes one real step (q = 1) of a tiny model many times, with and without a canary record, and measures how well a white-box
    adversary tells the two apart. A bound above the promised epsilon refutes the promise; a bound near 0 shows nothing.
    About 40 s a method on one core.

    Example:  dpcert audit dp-gaussian dp-stability --draws 10000
    """
    import torch

    from ..methods import METHODS
    from ..methods import method as named
    from ..training.audit import one_step
    from ._show import print_table, progress_bar

    names = method or [name for name, row in METHODS.items() if row.clip != "none"]
    chosen = [named(name, sigma=sigma) for name in names]
    for one in chosen:
        if one.clip_rule.name == "none":
            raise ConfigError(f"method {one.name} does not clip: it promises nothing that could be audited")
    torch.set_num_threads(1)  # tensors of a few numbers: more threads only wait for each other
    found = []
    for one in chosen:
        with progress_bar(one.name, "steps") as progress:
            found.append(
                one_step(
                    one,
                    draws=draws,
                    noise_multiplier=noise_multiplier,
                    confidence=confidence,
                    delta=delta,
                    seed=seed,
                    progress=progress,
                )
            )
    rows = [
        (
            a.method,
            floor_text(a.bound.gaussian_epsilon, 3),
            floor_text(a.bound.any_epsilon, 3),
            f"{a.exact_epsilon:.3f}",
            f"{100 * a.share:.0f} %",
            "holds" if a.holds else "BROKEN",
        )
        for a in found
    ]
    print_table(("method", "epsilon at least", "without assuming Gaussian", "promised", "share", "promise"), rows)
    typer.echo(
        f"one step, q = 1, rho = {noise_multiplier:g}, delta = {delta:g}, 2 x {draws} draws, confidence {confidence:g}; "
        f"the most these draws could show: {found[0].bound.ceiling:.2f}"
    )
    broken = [a.method for a in found if not a.holds]
    if broken:
        raise AuditError(f"the step of {', '.join(broken)} leaks more than it is charged for")
