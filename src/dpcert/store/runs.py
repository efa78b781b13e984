"""Run directories: file names, a lock for one process at a time, a separate folder for secrets."""

import contextlib
import errno
import math
import os
import shlex
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePath

from ..errors import BusyError, RunError
from .durable import cannot_write, destroy, make_private, read_file, refuse_link, remove, write_atomically

# The files of a run directory. CERTIFICATES and ROBUST are prefixes of the names of row files.
CONFIG, LEDGER, METRICS, MODEL = "config.toml", "ledger.jsonl", "metrics.json", "model.safetensors"
REPORT, CURVE, SAMPLES, ATTACKS = "report.html", "training.tsv", "samples.tsv", "attacks.tsv"
FIGURES, PRIVATE = "figures", "private"
CERTIFICATES, ROBUST = "certificates", "robust"
SKIPPED = "-skipped"  # in names of row files without the votes of misclassified images
_VALIDATION = "-validation"

IN_USE = "is in use by another process"
_KEY_BYTES = 32


def is_of_validation(name: str) -> bool:
    """Whether a file contains rows about held-out training records, which epsilon does not cover."""
    return _VALIDATION in name


def rows_stem(kind: str, sigma: float, *, of_validation: bool = False, tag: str = "") -> str:
    """The start of the name of a row file: its kind, the split unless it is the test set, the law's `tag`, and sigma.

    What another law is worth is computed, and written with six digits.
    """
    sigma = float(f"{sigma:g}") if tag else sigma
    digits = f"{sigma:.2f}" if math.isclose(round(sigma, 2), sigma) else f"{sigma:g}"
    return f"{kind}{_VALIDATION if of_validation else ''}-{tag}sigma{digits}"


def sidecar_of(rows: str) -> str:
    """The name of the sidecar of a row file, which records its settings."""
    return PurePath(rows).with_suffix(".json").name


def _entries(folder: Path) -> "list[os.DirEntry[str]]":
    """The entries of a folder; empty if it does not exist or cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _not_a_folder(path: Path) -> str:
    if not zipfile.is_zipfile(path):
        return f"{path} is a file, must be a run directory; pass the folder that dpcert train or dpcert run created"
    check = shlex.join(["dpcert", "verify", str(path)])
    return (
        f"{path} is a bundle (dpcert export), must be a run directory; pass the run it was exported from. "
        f"The bundle contains a {REPORT}; to check the bundle: {check}"
    )


class RunDirectory:
    """The paths of one run. Nothing is created until `create` is called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG
        self.model = path / MODEL
        self.ledger = path / LEDGER
        self.metrics = path / METRICS
        self.curve = path / CURVE
        self.samples = path / SAMPLES
        self.attacks = path / ATTACKS
        self.report = path / REPORT
        self.figures = path / FIGURES
        self.private = path / PRIVATE
        self.key = self.private / "key"
        self.state = self.private / "state.json"

    def create(self) -> None:
        """Create the folder and its private subfolder (0700)."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.refuse_links()
            make_private(self.private)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def refuse_links(self) -> None:
        """Raise unless the directory, its private folder and its figures contain only plain files and folders.

        The directory itself may be a link that the user typed. This is an early check with a clear message; each read,
        write and removal checks for links again, in case one is created later.
        """
        for folder in (self.path, self.private, self.figures):
            for entry in _entries(folder):
                refuse_link(Path(entry.path))
                if not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
                    raise RunError(
                        f"{entry.path} is neither a file nor a folder, which a run directory must not contain; remove it"
                    )

    def require(self, *files: Path) -> None:
        """Raise unless this is a run directory that contains `files`."""
        self.refuse_links()
        main_files = (self.config, self.model, self.ledger, self.metrics)
        if self.path.is_file():
            raise RunError(_not_a_folder(self.path))
        if not any(file.is_file() for file in main_files):
            raise RunError(f"{self.path} is not a run directory (no {CONFIG}); create one with: dpcert train --out {self.path}")
        for file in files:
            if not file.is_file():
                raise RunError(f"{self.path} has no {file.name}; finish its training with: {self.command_to_resume}")

    @property
    def command_to_resume(self) -> str:
        """The command that resumes the training. It uses the stored config, whatever options the run was started with."""
        source = [str(self.config)] if self.config.is_file() else []
        return shlex.join(["dpcert", "train", *source, *self._custom_model(), "--out", str(self.path)])

    def _custom_model(self) -> list[str]:
        """The option that names a custom model. Only names typed by the user are imported, so it must be typed again."""
        try:
            name = tomllib.loads(read_file(self.config).decode())["model"]["name"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError, RunError):
            return []
        return ["--model", name] if isinstance(name, str) and ":" in name else []

    def store_key(self, key: bytes) -> None:
        """Store the run key, readable by its owner only."""
        write_atomically(self.key, key, mode=0o600, real_folder=True)

    def load_key(self) -> bytes | None:
        """The run key, or None if it was destroyed or never created."""
        try:
            key = read_file(self.key)
        except FileNotFoundError:
            return None
        if len(key) != _KEY_BYTES:
            raise RunError(
                f"{self.key} has {len(key)} bytes, must have {_KEY_BYTES}; this run cannot be resumed, train with another --out"
            )
        return key

    def forget_secrets(self) -> None:
        """Destroy the key and everything needed only to resume, including partial files left by a crash."""
        refuse_link(self.private)
        destroy(self.key)
        for file in self.private.iterdir():
            remove(file)

    @property
    def is_busy(self) -> bool:
        """Whether another process uses the directory at the moment."""
        if not self.path.is_dir():
            return False
        try:
            with self.locked():
                return False
        except RunError:
            return True

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory for this process; the lock is released when the process ends."""
        self.refuse_links()
        try:
            import fcntl
        except ImportError:  # no advisory locks on this system
            yield
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise BusyError(f"{self.path} {IN_USE}; wait for it to finish or choose another --out") from error
            raise
        try:
            yield
        finally:
            os.close(descriptor)
