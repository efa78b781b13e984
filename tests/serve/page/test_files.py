"""The files of the page, read without a browser: one origin, no inline code, every name is there."""

import re
from pathlib import Path

import pytest

from dpcert.serve.export import POLICY, demo_page
from dpcert.serve.pages import FOLDER, INDEX, THEME, page_files
from tests.report.reading import Page

FILES = {name: file.content.decode() for name, file in page_files().items()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
EXPORTED = {"ort.js", "ort.wasm"}  # only in a demo, from npm


def elements(text=FILES[INDEX]):
    return Page(text).elements


def test_the_html_is_balanced_and_every_id_is_unique():
    page = Page(FILES[INDEX])
    ids = [element.attributes["id"] for element in page.elements if "id" in element.attributes]
    assert page.unbalanced == [] and len(ids) == len(set(ids))


def outside(text):
    """Addresses of other hosts. A name space is an address too, but nobody asks for it."""
    return re.findall(
        r"(?:https?:)?//[a-z0-9][\w.-]*\.\w+", re.sub(r"http://www\.w3\.org/2000/svg|^\s*//.*$", "", text, flags=re.MULTILINE)
    )


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_file_names_another_host(name):
    assert outside(FILES[name]) == []


def inline(text):
    """Code or style inside the HTML, which the policy of the server forbids."""
    found = [e.tag for e in elements(text) if {"style", *(n for n in e.attributes if n.startswith("on"))} & set(e.attributes)]
    return found + [e.tag for e in elements(text) if e.tag == "style" or (e.tag == "script" and "src" not in e.attributes)]


def test_nothing_is_inline():
    assert inline(FILES[INDEX]) == []


@pytest.mark.parametrize(
    "bad", ['<b style="color: red">x</b>', '<b onclick="x()">x</b>', "<script>x()</script>", "<style>b {}</style>"]
)
def test_twin_what_is_inline_is_seen(bad):
    assert inline(bad) and outside('<img src="https://cdn.example.org/x.png">')


def test_every_file_that_is_named_exists():
    linked = {e.attributes[key] for e in elements() for key in ("src", "href") if e.attributes.get(key, "#")[0] != "#"}
    assert {name.removeprefix("page/") for name in linked} <= set(FILES) and all(name.startswith("page/") for name in linked)
    for text in SCRIPTS.values():
        named = set(re.findall(r'"\./([\w.]+)"', text))
        assert named <= set(FILES) | EXPORTED, named


def test_every_element_that_a_script_asks_for_exists():
    ids = {element.attributes.get("id") for element in elements()}
    asked = {name for text in SCRIPTS.values() for name in re.findall(r'\$\("([\w-]+)"\)', text)}
    assert len(asked) > 30 and asked <= ids


def test_controls_have_names():
    labels = {e.attributes["for"] for e in elements() if e.tag == "label"}
    for element in elements():
        named = element.text.strip() or "aria-label" in element.attributes or element.attributes.get("id") in labels
        assert element.tag not in ("button", "input", "select", "canvas") or named or element.attributes["id"] == "middle"


def test_files_stay_small_enough_to_read():
    assert all(text.count("\n") < 400 for text in FILES.values())


def test_the_colors_are_the_reports():
    assert FILES["theme.css"] == THEME.read_text() and not (FOLDER / "theme.css").exists()
    assert "#2166ac" in FILES["theme.css"]  # the style of the page names colors by variable
    assert set(re.findall(r"#[0-9a-f]{6}", FILES["style.css"])) <= set(re.findall(r"#[0-9a-f]{6}", FILES["theme.css"]))
    assert '{% include "theme.css" %}' in (Path(THEME).parent / "page.html").read_text()


def test_a_demo_says_where_it_computes_and_has_its_own_policy():
    files = demo_page()
    index = files[INDEX].decode()
    assert 'content="browser"' in index and 'content="server"' not in index and POLICY in index
    assert "unsafe-inline" not in POLICY and "'unsafe-eval'" not in POLICY and "page/server.js" not in files
    assert inline(index) == [] and index.index("Content-Security-Policy") < index.index("<script")
