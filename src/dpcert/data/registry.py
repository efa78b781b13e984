"""Data sets by name: files, digests of their unpacked bytes, mirrors, and readers."""

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from .._validate import one_of
from ..errors import DataError, RunError
from ..progress import Progress, silent
from ..store.durable import write_atomically
from . import cifar, fetch, idx
from .dataset import Dataset

_EMBEDDED = Path(__file__).parent


@dataclass(frozen=True)
class Source:
    """Files of one data set, with the SHA-256 of their unpacked content."""

    name: str
    folder: str
    mirror: str
    digests: dict[str, str]
    system: tuple[Path, ...] = ()
    licence: str = ""
    input_shape: tuple[int, int, int] = (1, 28, 28)


MNIST = Source(
    "mnist",
    "mnist",
    "embedded in the package",
    {
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    (_EMBEDDED,),
    "CC BY-SA 3.0, LeCun, Cortes, Burges",
)
FASHION_MNIST = Source(
    "fashion-mnist",
    "fashion-mnist",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    {
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    (Path("/usr/share/datasets"),),
    "MIT, Zalando",  # where Debian's dataset-fashion-mnist puts it
)
CIFAR10 = Source(
    "cifar10",
    "cifar-10-batches-bin",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    {
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    (),
    "Krizhevsky 2009",
    (3, 32, 32),
)
SOURCES = {source.name: source for source in (MNIST, FASHION_MNIST, CIFAR10)}


def private_sketches() -> dict[str, list[str]]:
    """For the name of each registered set, the sketch that identifies its images (see scripts/private_sketches.py)."""
    lines = (_EMBEDDED / "private_sketches.txt").read_text(encoding="ascii").splitlines()
    return {name: sketch for name, *sketch in map(str.split, lines)}


def missing_files(source: Source) -> list[str]:
    """The files of a data set that are not in any search folder."""
    return [name for name, path in locate(source).items() if path is None]


def load_dataset(name: str, *, size: int | None = None, classes: int | None = None, progress: Progress = silent) -> Dataset:
    """A data set by name, downloaded if needed. MNIST is embedded and needs no download."""
    source = SOURCES[one_of("data set", name, SOURCES, error=DataError)]
    if source.name == CIFAR10.name:
        x_train, y_train, x_test, y_test = _read_cifar(source, progress)
    else:
        x_train, y_train, x_test, y_test = _read_idx_family(source, progress)
    return Dataset(x_train, y_train, x_test, y_test, name=name, size=size, classes=classes or 10)


def locate(source: Source) -> dict[str, Path | None]:
    """The path of each file of a data set, or None if it was not found."""
    return {name: fetch.first_existing(_candidates(source, name)) for name in source.digests}


def _candidates(source: Source, name: str) -> list[Path]:
    folders = [base / source.folder for base in fetch.search_folders(source.system)]
    return [folder / variant for folder in folders for variant in (name, f"{name}.gz")]


def _contents(source: Source, fetch_missing: Callable[[Source, list[str]], None]) -> dict[str, bytes]:
    missing = missing_files(source)
    if missing:
        fetch_missing(source, missing)
    contents = {}
    for name, path in locate(source).items():
        if path is None:
            raise _not_found(source, name)
        contents[name] = fetch.check_digest(idx.read_bytes(path), source.digests[name], str(path))
    return contents


def _accept(source: Source, name: str, data: bytes) -> None:
    """Raise unless a download unpacks to the published bytes."""
    fetch.check_digest(idx.unpacked(data, name), source.digests[name], f"{name} from {source.mirror}")


def _not_found(source: Source, name: str, why: str = "") -> DataError:
    target = fetch.cache_folder() / source.folder
    extra = " (or install Debian's package dataset-fashion-mnist)" if source.name == FASHION_MNIST.name else ""
    return DataError(
        f"data set {source.name}: {name} was not found{why}; put it into {target}/ or into $DPCERT_DATA/{source.folder}/{extra}"
    )


def _read_idx_family(source: Source, progress: Progress) -> tuple[np.ndarray, ...]:
    def fetch_missing(source: Source, missing: list[str]) -> None:
        for name in missing:
            target = fetch.cache_folder() / source.folder / f"{name}.gz"
            try:
                fetch.download(f"{source.mirror}/{name}.gz", target, partial(_accept, source, name), progress)
            except DataError as error:
                raise _not_found(source, f"{name}.gz", f", and {error}") from error

    contents = _contents(source, fetch_missing)
    parts = []
    for split in ("train", "t10k"):
        images = idx.parse_idx(contents[f"{split}-images-idx3-ubyte"], 3, f"{source.name} {split} images")
        labels = idx.parse_idx(contents[f"{split}-labels-idx1-ubyte"], 1, f"{source.name} {split} labels")
        parts += [images.copy(), labels.astype(np.int64)]
    return tuple(parts)


def _read_cifar(source: Source, progress: Progress) -> tuple[np.ndarray, ...]:
    contents = _contents(source, lambda source, missing: _fetch_cifar(source, progress))
    batches = [cifar.parse_batch(data, name) for name, data in contents.items()]
    images, labels = zip(*batches, strict=True)
    return (
        np.concatenate(images[:5]),
        np.concatenate(labels[:5]).astype(np.int64),
        images[5].copy(),
        labels[5].astype(np.int64),
    )


def _fetch_cifar(source: Source, progress: Progress) -> None:
    folder = fetch.cache_folder() / source.folder
    archive = folder.with_suffix(".tar.gz")
    try:
        fetch.download(source.mirror, archive, lambda data: None, progress)
    except DataError as error:
        raise _not_found(source, "the files data_batch_1.bin to test_batch.bin", f", and {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with gzip.open(archive) as unpacked:
            for name, data in cifar.archive_members(unpacked, source.folder, source.digests):
                write_atomically(folder / name, fetch.check_digest(data, source.digests[name], name))
    except RunError:
        raise
    except Exception as error:  # tarfile and zlib raise many kinds of errors on damaged archives
        raise DataError(f"{source.mirror} did not send a valid archive ({error}); try again") from error
    finally:
        archive.unlink()
