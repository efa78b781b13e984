"""Find data files: in a given folder, the cache, the system folders, and finally the official mirror."""

import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from ..errors import DataError
from ..progress import Progress, silent
from ..store.durable import sha256_hex

_LARGEST_DOWNLOAD = 1 << 30
_TIMEOUT_SECONDS = 20


def cache_folder() -> Path:
    """The folder for downloads: ``$XDG_CACHE_HOME/dpcert`` or ``~/.cache/dpcert``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dpcert"


def search_folders(system: tuple[Path, ...] = ()) -> list[Path]:
    """The folders to search, in order: ``$DPCERT_DATA``, the cache, then the `system` folders."""
    given = os.environ.get("DPCERT_DATA")
    return [*([Path(given)] if given else []), cache_folder(), *system]


def check_digest(data: bytes, expected: str, name: str) -> bytes:
    """Return `data` if its SHA-256 is the expected one."""
    actual = sha256_hex(data)
    if actual != expected:
        raise DataError(
            f"{name} has the SHA-256 {actual[:16]}..., expected {expected[:16]}...; delete it and download it again"
        )
    return data


def first_existing(candidates: list[Path]) -> Path | None:
    """The first candidate that is a file."""
    return next((path for path in candidates if path.is_file()), None)


def download(url: str, target: Path, accept: Callable[[bytes], object], progress: Progress = silent) -> None:
    """Download `url` to `target`; `accept` raises if the bytes are invalid. A failure leaves no files behind."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as reply:
            total = int(reply.headers.get("Content-Length") or 0)
            data = bytearray()
            while chunk := reply.read(1 << 18):
                data += chunk
                if len(data) > _LARGEST_DOWNLOAD:
                    raise DataError(f"{url} sends more than {_LARGEST_DOWNLOAD} bytes; the download was stopped")
                progress(len(data), max(total, len(data)))
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise DataError(f"{url} cannot be downloaded ({reason})") from error
    if total and len(data) != total:
        raise DataError(f"{url} sent {len(data)} bytes of {total}; try again")
    accept(bytes(data))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
        file.write(data)
    Path(file.name).replace(target)
