"""``dpcert verify``."""

from pathlib import Path
from typing import Annotated

import typer


def verify(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN|BUNDLE.zip", help="Run directory, or bundle written by dpcert export.", show_default=False),
    ],
) -> None:
    """Verify a run from its public files: check ledger and hashes, recompute epsilon, every radius and every figure.

    The ledger lists every noisy training step; epsilon follows from it. Needs no secret and no images.

    Prints each check as ok, FAILED or not checked, with the reason. Exits with code 2 if a check failed.

    Example:  dpcert verify runs/mnist-dp-gaussian
    """
    from ..release.files import read_public_files
    from ..release.verify import FAILED, NOT_CHECKED, OK, require_verified
    from ..release.verify import verify as all_checks

    files = read_public_files(run)
    checks = all_checks(files)
    for check in checks:
        typer.echo(f"{check.outcome:<12} {check.name}: {check.detail}")
    count = {outcome: sum(check.outcome == outcome for check in checks) for outcome in (OK, FAILED, NOT_CHECKED)}
    typer.echo(f"{count[OK]} ok, {count[FAILED]} failed, {count[NOT_CHECKED]} not checked")
    require_verified(files, checks)
