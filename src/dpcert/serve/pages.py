"""The files of the page, read once: nothing outside their folder can be asked for."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "page"
THEME = Path(__file__).parents[1] / "report" / "theme.css"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".wasm": "application/wasm",
    ".onnx": "application/octet-stream",
    ".woff2": "font/woff2",
}


@dataclass(frozen=True)
class PageFile:
    """A file with its content type and a tag that changes with its content."""

    content: bytes
    media_type: str

    @property
    def etag(self) -> str:
        """The tag, in quotes as HTTP wants it."""
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'


def page_files(folder: Path = FOLDER) -> dict[str, PageFile]:
    """The files of the page by their path in the folder, and the theme that it shares with the report."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix in _TYPES)
    found = {file.relative_to(folder).as_posix(): file for file in files} | {THEME.name: THEME}
    return {name: PageFile(file.read_bytes(), _TYPES[file.suffix]) for name, file in found.items()}
