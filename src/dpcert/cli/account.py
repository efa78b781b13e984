"""``dpcert account``."""

from typing import Annotated

import typer

from .._validate import finite_in
from ..errors import ConfigError
from ..rounding import ceil_text


def account(
    epsilon: Annotated[float | None, typer.Option(help="Privacy budget epsilon.", show_default=False)] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="Standard deviation of the gradient noise, divided by the clip norm.", show_default=False),
    ] = None,
    delta: Annotated[float, typer.Option(help="Privacy budget delta; choose it well below 1 / N.")] = 1e-5,
    size: Annotated[int, typer.Option(min=1, help="Number of training records (N); treated as public.")] = 60_000,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Expected batch size (B); a step samples each record with probability B / N.")
    ] = 512,
    epochs: Annotated[float, typer.Option(help="Number of epochs; the number of steps is floor(epochs * N / B).")] = 40.0,
    steps: Annotated[int | None, typer.Option(min=0, help="Number of steps, instead of --epochs.", show_default=False)] = None,
) -> None:
    """Compute the noise that a privacy budget needs, or the budget that a noise gives. Needs no data.

    Pass --epsilon to get the noise multiplier, --noise-multiplier to get epsilon, or both to get the number of steps.

    Example:  dpcert account --epsilon 3 --delta 1e-5 --size 60000 --batch-size 512 --epochs 40
    """
    from ..privacy import accounting
    from ..privacy.tradeoff import TradeOff, membership_sentence

    if epsilon is None and noise_multiplier is None:
        raise ConfigError("give --epsilon (to get the noise), --noise-multiplier (to get epsilon), or both (to get the steps)")
    if batch_size > size:
        raise ConfigError(f"--batch-size is {batch_size}, larger than --size {size}; lower it")
    finite_in("--epochs", epochs, 0.0, 1e9)
    q, step_count = batch_size / size, int(epochs * size / batch_size) if steps is None else steps
    typer.echo(f"Poisson sampling q = {q:.6g}, delta = {delta:g}, neighbors: {accounting.RELATION}")
    if epsilon is not None and noise_multiplier is not None:
        allowed = accounting.steps_within(
            epsilon=epsilon, delta=delta, noise_multiplier=noise_multiplier, sampling_probability=q
        )
        typer.echo(
            f"epsilon {epsilon:g} and noise multiplier {noise_multiplier:g} allow {allowed} steps ({allowed * q:.2f} epochs)"
        )
        return
    if noise_multiplier is None:
        assert epsilon is not None
        noise_multiplier = accounting.calibrate(epsilon=epsilon, delta=delta, sampling_probability=q, steps=step_count)
    spent = accounting.epsilon(noise_multiplier=noise_multiplier, sampling_probability=q, steps=step_count, delta=delta)
    renyi = accounting.rdp_epsilon(noise_multiplier=noise_multiplier, sampling_probability=q, steps=step_count, delta=delta)
    typer.echo(
        f"noise multiplier {noise_multiplier:g}, {step_count} steps: "
        f"epsilon = {ceil_text(spent, 4)} (PLD), {ceil_text(renyi, 4)} by RDP"
    )
    releases = [accounting.GaussianSteps(noise_multiplier, q, step_count)]
    typer.echo(membership_sentence(TradeOff(*accounting.privacy_profile(releases))))
