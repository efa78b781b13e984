"""Options that several commands share."""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, ModelError, RankError
from ..scale.environment import place

if TYPE_CHECKING:
    from ..models.factory import Factory
    from ..runs.open import OpenRun
    from ..scale.world import World

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="PRESET|FILE.toml",
        help="Name of a preset (see dpcert presets) or path of a config file, e.g. the config.toml of another run.",
        show_default="mnist/dp-gaussian",
    ),
]
RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run directory written by dpcert run or dpcert train.", show_default=False)
]
Sigma = Annotated[
    float | None,
    typer.Option(
        help="Standard deviation of the Gaussian noise added to the images (pixels are in [0, 1]), in training and in "
        "certification. Methods that train without noise, e.g. dpsgd, use it in certification only.",
        show_default="from the preset",
    ),
]
Epsilon = Annotated[
    float | None, typer.Option(help="Privacy budget epsilon; smaller is more private.", show_default="from the preset")
]
Delta = Annotated[
    float | None,
    typer.Option(
        help="Privacy budget delta; choose it well below 1 / (number of training images).", show_default="from the preset"
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=2**63 - 1,
        help="Seed of the initial weights and of the certification noise. It does not affect the privacy noise.",
        show_default="random",
    ),
]
Out = Annotated[Path | None, typer.Option(help="Run directory to create or resume.", show_default="runs/<dataset>-<method>")]
Device = Annotated[str | None, typer.Option(help="PyTorch device: cpu, cuda, cuda:1, mps ...", show_default="cpu")]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FACTORY",
        help="Custom model: FACTORY(input_shape, classes) returns an nn.Module. Or the name of a built-in model, e.g. cnn. "
        "A finished run with a custom model needs it again.",
        show_default=False,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.npz|DIR",
        help="Custom data: arrays x_train, y_train, x_test, y_test (in an .npz file, or in a folder as x_train.npy ..., "
        "which are read from disk if large), or images train/CLASS/*.png and test/CLASS/*.png. "
        "A finished run remembers the path: pass it again only if the data has moved.",
        show_default=False,
    ),
]
Examples = Annotated[
    str | None,
    typer.Option(
        metavar="N|all",
        help="Number of test images to certify, evenly spaced over the test set.",
        show_default="500, or all if fewer",
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1024,
        help="Number of processes on this machine that share the work; the result differs only by rounding. "
        "With --device cuda each has its own GPU. Several machines: torchrun -m dpcert ...",
        show_default="1",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(help="Number of tasks to run in parallel.", show_default="1; with --on ray what the nodes can hold"),
]
On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="processes|ray[://HOST:PORT]",
        help="Where to run: processes of this machine, or a Ray cluster. All nodes must see the folder of the runs at the same "
        "path. ray alone uses the cluster in RAY_ADDRESS, or starts Ray on this machine.",
    ),
]
CpusPerTask = Annotated[
    int | None, typer.Option(help="Cores of each task.", show_default="the cores of this machine / jobs; with --on ray 1")
]
GpusPerTask = Annotated[int, typer.Option(help="GPUs of each task. 1 or more runs on CUDA, 0 on the CPU.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override a config key, e.g. --set train.epochs=1. Repeatable. The config.toml of a run shows the keys.",
        show_default=False,
    ),
]


typed: list[str] = []  # the command line of this process, set by `app.main`


def joined(processes: int | None) -> "World":
    """Return this process's place among the ranks; with ``--processes``, start them instead, and exit as they do."""
    here = place()
    if processes is not None and processes > 1 and here.size == 1:
        from ..scale.launch import launch, this_command

        sys.exit(launch(this_command(typed), processes))  # the ranks have said why
    if processes is not None and processes != here.size:
        raise RankError(f"--processes is {processes}, but torchrun started {here.size} ranks; leave --processes out")
    from ..scale.world import join

    return join()


def own_device(world: "World", device: str | None) -> str:
    """The device of this rank; with ``--device cuda`` each rank of a machine has its own GPU."""
    from ..training.ranks import device_name

    return device_name(world, device or "cpu")


def show_help_without_command(context: typer.Context) -> None:
    """Print the help of a command group that was called without a command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def examples_of(text: str | None) -> int | str | None:
    """Parse ``--examples``: a number or "all"; None if it was not given."""
    if text is None or text == "all":
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ConfigError(f"--examples is {text!r}, must be a whole number of at least 1, or all")


def factory_of(model: str | None) -> "Factory | None":
    """The factory behind ``--model``; None if it was not given or names a built-in model."""
    from ..models.factory import import_factory, is_factory_name

    return import_factory(model) if model is not None and is_factory_name(model) else None


def factory_for(run: Path, model: str | None) -> "Factory | None":
    """The factory behind ``--model`` for a finished run, which keeps the built-in model it was trained with."""
    from ..runs.resolve import read_config

    factory = factory_of(model)
    if model is not None and factory is None and (trained := read_config(run).model.name) != model:
        raise ModelError(f"--model is {model!r}, {run} was trained with {trained!r}; leave --model out")
    return factory


@contextlib.contextmanager
def opened(run: Path, model: str | None, data: Path | None, device: str | None) -> "Iterator[OpenRun]":
    """Open a finished run, with a progress bar if its data must be downloaded."""
    from ..runs.open import open_run
    from ._show import progress_bar

    with progress_bar("data", "bytes") as fetching:
        yield open_run(run, factory_for(run, model), data, device=device or "cpu", data_progress=fetching)


@contextlib.contextmanager
def all_opened(runs: Sequence[Path], model: str | None, data: Path | None, device: str | None) -> "Iterator[list[OpenRun]]":
    """Open finished runs; runs with the same data settings share the images in memory."""
    from ..runs.open import open_run
    from ..runs.resolve import read_config
    from ._show import progress_bar

    loaded: list[OpenRun] = []
    with progress_bar("data", "bytes") as fetching:
        for run in runs:
            like = [other.data for other in loaded if other.config.data == read_config(run).data]
            given = like[0] if like else data
            loaded.append(open_run(run, factory_for(run, model), given, device=device or "cpu", data_progress=fetching))
        yield loaded


def assignments(
    set_: list[str] | None,
    *,
    model: str | None = None,
    data: Path | None = None,
    sigma: float | None,
    epsilon: float | None,
    delta: float | None,
    seed: int | None,
    device: str | None,
    examples: str | None = None,
) -> Mapping[str, Any]:
    """The options as config keys; ``--set`` overrides the other options."""
    from ..runs.config import parse_assignment
    from ..runs.resolve import seed_everything_visible

    given: dict[str, Any] = {"method.sigma": sigma, "privacy.epsilon": epsilon, "privacy.delta": delta, "train.device": device}
    given |= {"model.name": model, "data.path": None if data is None else str(data)}
    chosen = {key: value for key, value in given.items() if value is not None} | seed_everything_visible(seed)
    if examples is not None:
        chosen["certify.examples"] = examples_of(examples)
    return chosen | dict(parse_assignment(text) for text in set_ or [])
