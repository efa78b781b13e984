"""The documentation site: complete, generated where it can be, and built without a warning or a request to the network."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import dpcert

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import command_reference  # noqa: E402
import site_hooks  # noqa: E402


def pages_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    return set(re.findall(r"[\w/.-]+\.md", menu))


def test_the_menu_names_every_page():
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    listed_by_the_hook = {name for name in written if name.startswith("adr/")}
    without_page = {"results_reading.md"}  # a part of results.md
    generated = {site_hooks.COMMANDS, *site_hooks.FROM_ROOT}
    assert pages_in_the_menu() == written - listed_by_the_hook - without_page | generated
    assert not generated & written and all((ROOT / name).is_file() for name in site_hooks.FROM_ROOT)


def test_the_hook_lists_every_decision_record():
    class Config:
        nav = ({"Home": "index.md"}, {site_hooks.DECISIONS: []})

    records = sorted(f"adr/{path.name}" for path in (ROOT / "docs" / "adr").glob("*.md"))
    assert site_hooks.on_config(Config).nav[1][site_hooks.DECISIONS] == records and records


def test_the_command_reference_covers_every_command_and_option():
    page = command_reference.command_reference()
    commands = dict(command_reference.all_commands())
    assert {"dpcert run", "dpcert verify", "dpcert data fetch"} <= set(commands)
    sections = dict(zip(commands, re.split(r"(?m)^## ", page)[1:], strict=True))
    for name, command in commands.items():
        assert sections[name].startswith(f"{name}\n") and "```text\n" in sections[name]
        assert all(option in sections[name] for parameter in command.params for option in parameter.opts if option[0] == "-")
        assert "\n$ dpcert " in sections[name], f"{name} has no example in its help"


def test_the_python_reference_covers_every_public_name():
    page = site_hooks.with_all_names((ROOT / "docs" / site_hooks.PYTHON).read_text())
    assert all(f"::: dpcert.{name}\n" in page for name in dpcert.__all__)


class Requests(HTMLParser):
    """What a browser loads by itself from another host: scripts, styles, images; not what a reader may click."""

    def __init__(self):
        super().__init__()
        self.outside = []

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        address = named.get("href" if tag == "link" else "src") or ""
        if tag in ("script", "link", "img", "iframe") and address.startswith(("http:", "https:", "//")):
            self.outside.append(address)


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_outside(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    requests = Requests()
    for page in pages:
        requests.feed(page.read_text())
    assert len(pages) > 30 and requests.outside == []
    assert "https://unpkg.com" not in "".join(page.read_text() for page in pages)
    assert (tmp_path / "site" / "search" / "search_index.js").exists()  # search works on file://
    assert (tmp_path / "site" / "results" / "figures" / "figure-fgsm.png").exists()  # linked from outside docs/
