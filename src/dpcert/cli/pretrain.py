"""``dpcert pretrain``."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from . import _options as o


def pretrain(
    data: Annotated[
        Path,
        typer.Option(
            metavar="PUBLIC.npz|DIR",
            help="Public images: arrays x (uint8) and y (labels), optionally source; or folders CLASS/*.png.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE.safetensors", help="Weights file to write; the model card goes next to it as .md.")
    ],
    model: Annotated[
        str, typer.Option(help="resnet-32 (0.73 M parameters), resnet-48 (1.6 M), or feature-cnn for small images (14 k).")
    ] = "resnet-32",
    epochs: Annotated[int, typer.Option(help="Passes over the public images.")] = 24,
    batch_size: Annotated[int, typer.Option(help="Images per step.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 0.4,
    precision: Annotated[
        str,
        typer.Option(
            help="float32, or bfloat16: about twice as fast on GPUs and on CPUs with AVX512-BF16 or AMX, slow on others."
        ),
    ] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the initial weights, the order of the images and the noise.")] = 0,
    describe: Annotated[
        str, typer.Option(help="Description of the images for the model card.", show_default="the file's name")
    ] = "",
    license_: Annotated[str, typer.Option("--license", help="License of the images for the model card.")] = "not stated",
    device: o.Device = None,
) -> None:
    """Pretrain a backbone on PUBLIC images with Gaussian noise, without privacy.

    Never pass private images: the result has no privacy guarantee. Near-duplicates of CIFAR-10 images are left out.

    Rerun the same command to resume.

    Example:  dpcert pretrain --data public32.npz --out backbone.safetensors --epochs 24
    """
    import torch

    from ..data.registry import private_sketches
    from ..pretraining.images import load_public
    from ..pretraining.settings import Settings
    from ..pretraining.train import pretrain as run
    from ..store.durable import sha256_hex
    from ._show import progress_bar

    settings = Settings(
        model=model, epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, precision=precision, seed=seed
    )
    if out.suffix != ".safetensors" or not out.parent.is_dir():  # fail now, not after hours of training
        raise ConfigError(f"--out is {out}, must be a file FILE.safetensors in a folder that exists; create the folder first")
    if out.exists():
        typer.echo(f"{out} already exists, nothing to do; remove it to pretrain again")
        return
    images = load_public(data, private_sketches())
    about = {"data": describe or data.name, "license": license_, "data_sha256": sha256_hex(images.images.tobytes())}
    with progress_bar("pretrain", "steps") as training:
        card = run(images, out, settings, about=about, device=torch.device(device or "cpu"), progress=training)
    for sigma, accuracy in card["accuracy"].items():
        typer.echo(f"sigma {sigma}: accuracy {accuracy:.1%} on the held-out public images")
    typer.echo(f"weights: {out}\ncard: {out.with_suffix('.md')}")
