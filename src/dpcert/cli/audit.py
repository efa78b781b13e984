"""``dpcert audit``."""

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import AuditError, ConfigError
from ..rounding import ceil_text, floor_text
from . import _options as o

if TYPE_CHECKING:
    from ..methods import Method
    from ..models.factory import Factory
    from ..training.audit import OneStepAudit, TrainingAudit, Trainings


def audit(
    method: Annotated[list[str] | None, typer.Argument(help="Methods to audit.", show_default="all private methods")] = None,
    runs: Annotated[
        int | None,
        typer.Option(min=10, help="Audit whole trainings: this many with a canary and as many without.", show_default=False),
    ] = None,
    one_run: Annotated[bool, typer.Option("--one-run", help="Audit a single training with many canaries.")] = False,
    draws: Annotated[
        int, typer.Option(min=100, help="Number of steps with the canary, and as many without (default audit).")
    ] = 10_000,
    noise_multiplier: Annotated[float, typer.Option(help="Noise multiplier (rho in the output) of the audited step.")] = 1.0,
    canaries: Annotated[int, typer.Option(min=10, help="Number of canaries (--one-run).")] = 2000,
    epsilon: Annotated[float, typer.Option(help="Privacy budget of the audited trainings (--runs, --one-run).")] = 4.0,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps of the audited trainings.")] = 4,
    sampling_probability: Annotated[float, typer.Option(help="Poisson sampling probability q of the audited trainings.")] = 1.0,
    confidence: Annotated[
        float | None,
        typer.Option(
            help="Confidence of the bound: 1 minus the probability of a false alarm.", show_default="0.999; --one-run 0.99"
        ),
    ] = None,
    delta: Annotated[float, typer.Option(help="Privacy budget delta.")] = 1e-5,
    sigma: Annotated[float, typer.Option(help="Standard deviation of the noise added to the images.")] = 0.25,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="Audit the step of a custom model, built for 1 x 4 x 4 images and 5 classes (not with --runs, --one-run).",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed that makes the audit reproducible.", show_default=False)] = None,
) -> None:
    """Audit the training: measure an empirical lower bound on epsilon for each method.

    The audit trains a tiny model with and without one extra record, the canary.

    It measures how well an attacker with full access to the training (white-box) tells the two apart.

    Default: one training step on all records (q = 1), repeated many times. Takes about 40 s per method on one core.

    --runs N: whole trainings. Takes about 30 s per method for N = 500.

    --one-run: a single training with many canaries. Takes about a second per method.

    A bound above the promised epsilon refutes the promise. A bound near 0 shows nothing.

    The printed ceiling is the largest bound that the audit could show.

    Example:  dpcert audit dp-gaussian dp-stability --draws 10000

    Example:  dpcert audit dp-gaussian --one-run
    """
    import torch

    from ..methods import ALL_METHODS, METHODS
    from ..methods import method as build_method
    from ..privacy.unbounded import UNBOUNDED
    from ..training.audit import Trainings, require_a_promise

    if one_run and runs is not None:
        raise ConfigError("--runs and --one-run are two different audits; give one of them")
    if model is not None and (one_run or runs is not None):
        raise ConfigError("--model audits one step; leave out --runs and --one-run, which train a linear model")
    factory = o.factory_of(model)
    rows = ALL_METHODS if runs is None and not one_run and model is None else METHODS
    chosen = [
        build_method(name, sigma=sigma) for name in method or [name for name, row in rows.items() if row.clip not in UNBOUNDED]
    ]
    for one in chosen:
        require_a_promise(one)
    torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other
    if runs is None and not one_run:
        broken = _steps(chosen, draws, noise_multiplier, 0.999 if confidence is None else confidence, delta, seed, factory)
        what = "step"
    else:
        wanted = [Trainings(one, epsilon, delta, steps, sampling_probability) for one in chosen]
        broken = _trainings(wanted, runs, canaries, confidence, seed)
        what = "training"
    if broken:
        raise AuditError(f"the {what} of {', '.join(broken)} leaks more than it is charged for")


def _steps(
    chosen: "list[Method]",
    draws: int,
    noise_multiplier: float,
    confidence: float,
    delta: float,
    seed: int | None,
    factory: "Factory | None",
) -> list[str]:
    from ..training.audit import one_step
    from ._show import print_table, progress_bar

    audits: list[OneStepAudit] = []
    for one in chosen:
        with progress_bar(one.name, "steps") as progress:
            audits.append(
                one_step(
                    one,
                    draws=draws,
                    noise_multiplier=noise_multiplier,
                    confidence=confidence,
                    delta=delta,
                    seed=seed,
                    factory=factory,
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
            a.verdict,
        )
        for a in audits
    ]
    print_table(("method", "epsilon at least", "without assuming Gaussian", "promised", "share", "promise"), rows)
    typer.echo(
        f"one step, q = 1, rho = {noise_multiplier:g}, delta = {delta:g}, 2 x {draws} draws, confidence {confidence:g}; "
        f"the most these draws could show: {audits[0].bound.ceiling:.2f}"
    )
    return [a.method for a in audits if not a.holds]


def _trainings(
    wanted: "list[Trainings]", runs: int | None, canaries: int, confidence: float | None, seed: int | None
) -> list[str]:
    from ..training.audit import many_runs, one_run
    from ._show import print_table, progress_bar

    sure = confidence if confidence is not None else (0.99 if runs is None else 0.999)
    audits: list[TrainingAudit] = []
    for trainings in wanted:
        if runs is None:
            audits.append(one_run(trainings, canaries=canaries, confidence=sure, seed=seed))
            continue
        with progress_bar(trainings.method.name, "trainings") as progress:
            audits.append(many_runs(trainings, runs=runs, confidence=sure, seed=seed, progress=progress))
    rows = [
        (a.method, floor_text(a.at_least, 3), ceil_text(a.promised, 3), floor_text(a.ceiling, 2), a.verdict) for a in audits
    ]
    print_table(("method", "epsilon at least", "promised", "ceiling", "promise"), rows)
    first = wanted[0]
    how = f"one training, {canaries} canaries" if runs is None else f"2 x {runs} trainings"
    typer.echo(
        f"{how} of {first.steps} steps, q = {first.sampling_probability:g}, delta = {first.delta:g}, confidence {sure:g}; "
        "the ceiling is the most that this audit could show"
    )
    return [a.method for a in audits if not a.holds]
