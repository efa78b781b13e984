"""Whether the model file on disk is still the one that was loaded."""

from pathlib import Path

from ..errors import RunError
from ..store.durable import read_file, sha256_hex

SAME, CHANGED, MISSING = "same", "changed", "missing"


class ModelFile:
    """The file of the loaded model. The service keeps answering with the loaded one, whatever happens to the file."""

    def __init__(self, path: Path, sha256: str) -> None:
        self._path, self._sha256 = path, sha256
        self._seen: tuple[tuple[int, ...], str] | None = None

    def state(self) -> str:
        """SAME, CHANGED or MISSING; reads the file only if its status on disk is not the one seen last."""
        try:
            status = self._path.stat(follow_symlinks=False)
            now = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if self._seen is None or self._seen[0] != now:
                self._seen = now, SAME if sha256_hex(read_file(self._path)) == self._sha256 else CHANGED
            return self._seen[1]
        except RunError:  # a link
            return CHANGED
        except OSError:
            return MISSING
