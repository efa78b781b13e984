"""MkDocs hooks: generated pages, and links from the docs to other files of the repository."""

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COMMANDS = "reference/commands.md"
PYTHON = "reference/python.md"
FROM_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "results/README.md", "results/methods-mnist.md")
DECISIONS = "Decisions"
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)")


def on_config(config: Any) -> Any:
    """List the decision records, so that a new one needs no edit of mkdocs.yml."""
    records = sorted(f"adr/{path.name}" for path in (DOCS / "adr").glob("*.md"))
    for entry in config.nav:
        if DECISIONS in entry:
            entry[DECISIONS] = [*entry[DECISIONS], *(name for name in records if name not in entry[DECISIONS])]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the command reference, and the files outside docs/ that a page links to."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from command_reference import command_reference
    from mkdocs.structure.files import File

    files.append(File.generated(config, COMMANDS, content=command_reference()))
    waiting = [*FROM_ROOT, *(name for file in files.documentation_pages() for name in _linked_outside(DOCS / file.src_uri))]
    for name in waiting:
        if files.get_file_from_path(name) is None:
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
            waiting.extend(_linked_outside(ROOT / name))  # a page that is added may link to others
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links to files outside docs/ so that they point to their place in the site."""
    source = Path(page.file.abs_src_path).parent if page.file.abs_src_path else DOCS / Path(page.file.src_uri).parent
    here = posixpath.dirname(page.file.src_uri) or "."
    if page.file.src_uri == PYTHON:
        markdown = with_all_names(markdown)

    def to_site(match: re.Match[str]) -> str:
        target = _in_repository(source, match[1])
        if target is None or not target.is_file():
            return match[1]
        return posixpath.relpath(_place(target), here)

    return _LINK.sub(to_site, markdown)


def with_all_names(markdown: str) -> str:
    """Add the public names that the Python reference does not mention, so that none is missing."""
    import dpcert

    missing = [f"::: dpcert.{name}" for name in dpcert.__all__ if f"::: dpcert.{name}\n" not in markdown]
    return markdown.replace("<!-- other names -->", "\n\n".join(missing))


def _linked_outside(page: Path) -> Iterator[str]:
    """The files of the repository, outside docs/, that a Markdown page links to."""
    if page.suffix != ".md" or not page.is_file():
        return
    for link in _LINK.findall(page.read_text()):
        target = _in_repository(page.parent, link)
        if target is not None and target.is_file() and not target.is_relative_to(DOCS):
            yield _place(target)


def _in_repository(folder: Path, link: str) -> Path | None:
    """The file that a relative link points to, or None for a URL."""
    return None if "://" in link or link.startswith(("/", "mailto:")) else (folder / link).resolve()


def _place(target: Path) -> str:
    """The path of a file in the site: docs/ is the root, and other files keep their path in the repository."""
    return target.relative_to(DOCS if target.is_relative_to(DOCS) else ROOT).as_posix()
