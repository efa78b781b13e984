"""``dpcert audit``."""

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import AuditError, ConfigError
from ..rounding import ceil_text, floor_text

if TYPE_CHECKING:
    from ..methods import Method
    from ..training.audit import OneStepAudit, TrainingAudit, Trainings


def audit(
    method: Annotated[
        list[str] | None, typer.Argument(help="Methods, or nothing for all private ones.", show_default=False)
    ] = None,
    runs: Annotated[
        int | None, typer.Option(min=10, help="Audit whole trainings: N with a canary, N without.", show_default=False)
    ] = None,
    one_run: Annotated[bool, typer.Option("--one-run", help="Audit ONE training with many canaries.")] = False,
    draws: Annotated[int, typer.Option(min=100, help="Steps taken with the canary, and as many without.")] = 10_000,
    noise_multiplier: Annotated[float, typer.Option(help="Noise over sensitivity (rho) of the audited step.")] = 1.0,
    canaries: Annotated[int, typer.Option(min=10, help="Canaries of --one-run.")] = 2000,
    epsilon: Annotated[float, typer.Option(help="Budget of the audited trainings (--runs, --one-run).")] = 4.0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the audited trainings.")] = 4,
    sampling_probability: Annotated[float, typer.Option(help="q of the audited trainings.")] = 1.0,
    confidence: Annotated[
        float | None, typer.Option(help="1 minus the chance of a false alarm.", show_default="0.999; --one-run 0.99")
    ] = None,
    delta: Annotated[float, typer.Option(help="Failure probability of the budget.")] = 1e-5,
    sigma: Annotated[float, typer.Option(help="Noise of the views.")] = 0.25,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes the audit reproducible.", show_default=False)] = None,
) -> None:
    """Attack the training itself: an empirical lower bound on epsilon, for each method.

    By default takes one real step (q = 1) of a tiny model many times, with and without a canary record, and measures how well
    a white-box adversary tells the two apart (about 40 s a method on one core). --runs N does the same with whole trainings
    (about 30 s a method for N = 500), --one-run with a single training and many canaries (a second). A bound above the
    promised epsilon refutes the promise; a bound near 0 shows nothing; none can pass its ceiling.

    Example:  dpcert audit dp-gaussian dp-stability --draws 10000

    Example:  dpcert audit dp-gaussian --one-run
    """
    import torch

    from ..methods import METHODS
    from ..methods import method as named
    from ..training.audit import Trainings, require_a_promise

    if one_run and runs is not None:
        raise ConfigError("--runs and --one-run are two different audits; give one of them")
    chosen = [named(name, sigma=sigma) for name in method or [name for name, row in METHODS.items() if row.clip != "none"]]
    for one in chosen:
        require_a_promise(one)
    torch.set_num_threads(1)  # tensors of a few numbers: more threads only wait for each other
    if runs is None and not one_run:
        broken = _steps(chosen, draws, noise_multiplier, 0.999 if confidence is None else confidence, delta, seed)
        what = "step"
    else:
        wanted = [Trainings(one, epsilon, delta, steps, sampling_probability) for one in chosen]
        broken = _trainings(wanted, runs, canaries, confidence, seed)
        what = "training"
    if broken:
        raise AuditError(f"the {what} of {', '.join(broken)} leaks more than it is charged for")


def _steps(
    chosen: "list[Method]", draws: int, noise_multiplier: float, confidence: float, delta: float, seed: int | None
) -> list[str]:
    from ..training.audit import one_step
    from ._show import print_table, progress_bar

    found: list[OneStepAudit] = []
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
            a.verdict,
        )
        for a in found
    ]
    print_table(("method", "epsilon at least", "without assuming Gaussian", "promised", "share", "promise"), rows)
    typer.echo(
        f"one step, q = 1, rho = {noise_multiplier:g}, delta = {delta:g}, 2 x {draws} draws, confidence {confidence:g}; "
        f"the most these draws could show: {found[0].bound.ceiling:.2f}"
    )
    return [a.method for a in found if not a.holds]


def _trainings(
    wanted: "list[Trainings]", runs: int | None, canaries: int, confidence: float | None, seed: int | None
) -> list[str]:
    from ..training.audit import many_runs, one_run
    from ._show import print_table, progress_bar

    sure = confidence if confidence is not None else (0.99 if runs is None else 0.999)
    found: list[TrainingAudit] = []
    for trainings in wanted:
        if runs is None:
            found.append(one_run(trainings, canaries=canaries, confidence=sure, seed=seed))
            continue
        with progress_bar(trainings.method.name, "trainings") as progress:
            found.append(many_runs(trainings, runs=runs, confidence=sure, seed=seed, progress=progress))
    rows = [(a.method, floor_text(a.at_least, 3), ceil_text(a.promised, 3), floor_text(a.ceiling, 2), a.verdict) for a in found]
    print_table(("method", "epsilon at least", "promised", "ceiling", "promise"), rows)
    first = wanted[0]
    how = f"one training, {canaries} canaries" if runs is None else f"2 x {runs} trainings"
    typer.echo(
        f"{how} of {first.steps} steps, q = {first.sampling_probability:g}, delta = {first.delta:g}, confidence {sure:g}; "
        "the ceiling is the most that this audit could show"
    )
    return [a.method for a in found if not a.holds]
