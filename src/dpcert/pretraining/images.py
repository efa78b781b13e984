"""Public images for pretraining: where they come from, what is left out of them, and how a batch is made."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data import folder
from ..data.arrays import read_npz
from ..data.fingerprint import digests, shared_share, sketch
from ..data.memory import available_memory
from ..errors import DataError
from ..rng import Purpose, bulk_normal, uniform_words

CLEAN_SHARE = 0.125
UNIFORM_SHARE = 0.125  # sigma uniform in (0, 1], so that every sigma up to 1 is covered
SIGMAS = (0.25, 0.5, 1.0)  # the rest of a batch, in equal parts
NOISE_LAW = (
    f"Gaussian, sigma 0 for {CLEAN_SHARE:.1%} of the images, uniform in (0, 1] for {UNIFORM_SHARE:.1%}, "
    f"else one of {', '.join(map(str, SIGMAS))}"
)
LARGEST_SHIFT = 4
_MOST_OVERLAP = 0.01
_MOST_CLASSES = 100_000


@dataclass(frozen=True)
class PublicImages:
    """Images ``uint8 [n, channels, height, width]`` with labels; each image belongs to one source with classes of its own."""

    images: np.ndarray
    labels: np.ndarray
    sources: np.ndarray
    sketch: list[str]
    removed: int

    @property
    def classes(self) -> tuple[int, ...]:
        """The number of classes of each source."""
        return tuple(int(self.labels[self.sources == source].max()) + 1 for source in range(int(self.sources.max()) + 1))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    def __len__(self) -> int:
        return len(self.images)

    def take(self, rows: np.ndarray) -> "PublicImages":
        """Some of the images, as a collection with the same sketch."""
        return PublicImages(self.images[rows], self.labels[rows], self.sources[rows], self.sketch, self.removed)


def near_duplicates() -> frozenset[str]:
    """Digests of public images that nearly repeat an image of CIFAR-10 (scripts/near_duplicates.py made the list)."""
    text = resources.files(__package__).joinpath("near_duplicates.txt").read_text(encoding="ascii")
    return frozenset(line for line in text.splitlines() if not line.startswith("#"))


def load_public(path: Path, private_sketches: dict[str, list[str]]) -> PublicImages:
    """The public images of an .npz file with arrays x, y and, for several sources, source; or of a folder of pictures.

    Near-duplicates of CIFAR-10 are left out. Data with images of a registered private set is refused.
    """
    images, labels, sources = _read_folder(path) if path.is_dir() else _read_arrays(path)
    found = digests(images)
    for name, known in private_sketches.items():
        if shared_share(known, found) > _MOST_OVERLAP:
            raise DataError(
                f"{path} holds images of {name}, which is a private data set here; pretrain on other, public images"
            )
    listed = near_duplicates()
    keep = np.array([digest not in listed for digest in found])
    return PublicImages(
        images[keep], labels[keep].astype(np.int64), sources[keep].astype(np.int64), sketch(found), int((~keep).sum())
    )


def _read_folder(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pictures of ``CLASS/*.png`` or ``train/CLASS/*.png``: one source."""
    listed = folder.listing(path / "train" if (path / "train").is_dir() else path)
    images = folder.read(listed, available_memory(), listed.files[0])
    return images, np.array(listed.labels, dtype=np.int64), np.zeros(len(images), dtype=np.int64)


def _read_arrays(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    arrays = read_npz(path, ("x", "y"), optional=("source",))
    images, labels = _checked_images(path, arrays["x"]), arrays["y"]
    sources = arrays.get("source", np.zeros(len(images), np.int64))
    for name, values in (("y", labels), ("source", sources)):
        if values.shape != (len(images),) or values.dtype.kind not in "iu":
            raise DataError(
                f"{path}: {name} must be a whole number for each of the {len(images)} images, got {values.shape} {values.dtype}"
            )
        if values.min() < 0 or values.max() >= _MOST_CLASSES:
            raise DataError(f"{path}: {name} holds {values.min()} to {values.max()}, must be 0, 1, 2 ...")
    return images, labels, sources


def _checked_images(path: Path, images: np.ndarray) -> np.ndarray:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
        raise DataError(
            f"{path}: x has shape {list(images.shape)} and dtype {images.dtype}, must be uint8 [n, 1 or 3, height, width]"
        )
    return images


def split(data: PublicImages, held_out: int, key: bytes) -> tuple[PublicImages, PublicImages]:
    """(for training, held out): `held_out` images chosen by the key, to measure accuracy on."""
    order = np.argsort(uniform_words(key, Purpose.SAMPLING, len(data)), kind="stable")
    return data.take(np.sort(order[held_out:])), data.take(np.sort(order[:held_out]))


def epoch_order(size: int, key: bytes, epoch: int) -> np.ndarray:
    """A permutation that depends on (key, epoch) only."""
    return np.argsort(uniform_words(key, Purpose.SAMPLING, size, step=epoch + 1), kind="stable")


def noisy_batch(data: PublicImages, rows: np.ndarray, key: bytes, step: int, device: torch.device) -> Tensor:
    """The batch of one step: flipped, shifted, with noise. A function of (key, step) and the rows."""
    words = uniform_words(key, Purpose.VIEWS, 3 * len(rows), step).reshape(3, -1)
    flip = torch.from_numpy((words[0] & 1).astype(bool))
    shifts = (
        torch.from_numpy(((words[0] >> 8) % (2 * LARGEST_SHIFT + 1)).astype(np.int64)),
        torch.from_numpy(((words[0] >> 32) % (2 * LARGEST_SHIFT + 1)).astype(np.int64)),
    )
    pixels = _flipped_and_shifted(torch.from_numpy(data.images[rows]), flip, *shifts).to(device).float() / 255.0
    sigmas = torch.from_numpy(_sigmas(words[1] / 2.0**64, words[2] / 2.0**64)).to(device)
    noise = bulk_normal(key, Purpose.VIEWS, tuple(pixels.permute(0, 2, 3, 1).shape), device, step, part=1)
    return pixels + sigmas[:, None, None, None] * noise.permute(0, 3, 1, 2)


def _sigmas(kind: np.ndarray, where: np.ndarray) -> np.ndarray:
    """The noise of each row, from two uniform numbers."""
    fixed = np.array(SIGMAS)[np.minimum((where * len(SIGMAS)).astype(int), len(SIGMAS) - 1)]
    drawn = np.where(kind < CLEAN_SHARE + UNIFORM_SHARE, 1.0 - where, fixed)
    return np.where(kind < CLEAN_SHARE, 0.0, drawn).astype(np.float32)


def _flipped_and_shifted(images: Tensor, flip: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Each image shifted by up to `LARGEST_SHIFT` pixels (black comes in) and mirrored where asked; channels last in memory."""
    height, width = images.shape[2:]
    padded = torch.nn.functional.pad(images, [LARGEST_SHIFT] * 4)
    rows = torch.arange(height) + down[:, None]
    columns = torch.arange(width).expand(len(images), -1)
    columns = torch.where(flip[:, None], columns.flip(1), columns) + right[:, None]
    each = torch.arange(len(images))[:, None, None]
    return padded.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
