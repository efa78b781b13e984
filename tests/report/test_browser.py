"""The page in a real browser: it renders, nothing complains, nothing sticks out of a phone, and its numbers are the rows'."""

import json
import re
import shutil
import subprocess

import pytest

from tests.report.conftest import CERTIFICATES
from tests.report.reading import Page, wrong_numbers

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian: apt-get install chromium)")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--enable-logging=stderr", "--v=0",
)  # fmt: skip
# Put into a copy of the page, without its ban on scripts: what a reader's eye would measure.
PROBE = """<script>addEventListener("load", () => {
  document.querySelectorAll("details").forEach(d => d.open = true);
  const boxes = [...document.querySelectorAll(".plot svg")].map(s => s.getBoundingClientRect());
  const letters = [...document.querySelectorAll(".plot text")].map(t => t.getBoundingClientRect().height);
  const images = [...document.querySelectorAll("img")];
  parent.postMessage(JSON.stringify({
    width: innerWidth, overflow: document.documentElement.scrollWidth - innerWidth,
    plots: boxes.length, smallest: Math.min(...boxes.map(b => Math.min(b.width, b.height))),
    letters: Math.min(...letters.filter(h => h > 0)),
    images: images.length, broken: images.filter(i => !i.complete || !i.naturalWidth).length,
    radius: Math.max(0, ...[...document.querySelectorAll("#runs td[data-key=card_acr]")].map(c => c.getBoundingClientRect().right)),
    ink: getComputedStyle(document.body).color, paper: getComputedStyle(document.body).backgroundColor,
    figure: getComputedStyle(document.querySelector(".plot text")).fill,
  }), "*");
});</script></body>"""
# A window is never narrower than 500 pixels; a frame is.
FRAME = """<!doctype html><title>frame</title><body><script>addEventListener("message", m => document.body.setAttribute("data-probe", m.data))</script>
<iframe src="probed.html" style="width: {width}px; height: 900px; border: 0"></iframe></html>"""


def browse(file, folder, *flags):
    """The page's DOM after loading, and what the browser's console said."""
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "</html>" in done.stdout, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def probed(text, folder, width, *flags):
    (folder / "probed.html").write_text(re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</body>", PROBE))
    (folder / "frame.html").write_text(FRAME.format(width=width))
    dom, complaints = browse(folder / "frame.html", folder, "--window-size=1300,1000", "--virtual-time-budget=5000", *flags)
    assert not complaints
    measured = next(e.attributes["data-probe"] for e in Page(dom).elements if "data-probe" in e.attributes)
    return json.loads(measured)


def test_it_renders_without_a_word_and_its_numbers_are_the_rows(page, complete, tmp_path):
    (tmp_path / "page.html").write_text(page)
    dom, complaints = browse(tmp_path / "page.html", tmp_path, "--window-size=1200,900")
    assert complaints == []
    assert wrong_numbers(Page(dom), complete, CERTIFICATES) == []


def test_twin_a_complaint_is_heard(page, tmp_path):
    (tmp_path / "page.html").write_text(page.replace("</body>", "<script>alert(1)</script></body>"))  # the page forbids scripts
    assert browse(tmp_path / "page.html", tmp_path)[1]


@pytest.mark.parametrize("which", ["page", "comparison"])
def test_it_fits_a_phone(which, request, tmp_path):
    seen = probed(request.getfixturevalue(which), tmp_path, 390)
    assert seen["width"] == 390 and seen["overflow"] <= 0
    assert seen["plots"] == 15 and seen["smallest"] > 150 and seen["letters"] > 8 and seen["broken"] == 0
    assert seen["images"] == (48 if which == "page" else 0)


def test_the_radius_is_the_first_figure_of_a_comparison_on_a_phone(comparison, tmp_path):
    """Twin: names that do not wrap push it out of sight."""
    long = comparison.replace("</svg>dpsgd</th>", "</svg>dp-smoothadv+consistency</th>")
    assert long != comparison
    assert 0 < probed(long, tmp_path, 375)["radius"] <= 375 - 16
    assert probed(re.sub("max-width: 12rem; white-space: normal", "", long), tmp_path, 375)["radius"] > 375 - 16


def test_twin_what_sticks_out_is_seen(page, tmp_path):
    wide = page.replace("<footer>", '<div style="width: 50rem">wide</div><footer>')
    assert probed(wide, tmp_path, 390)["overflow"] > 300


def test_dark_figures_have_light_letters(page, tmp_path):
    light = probed(page, tmp_path, 1200, "--blink-settings=preferredColorScheme=1")
    dark = probed(page, tmp_path, 1200, "--blink-settings=preferredColorScheme=0")
    assert light["figure"] == light["ink"] and dark["figure"] == dark["ink"] and light["paper"] != dark["paper"]
    assert light["overflow"] <= 0 and dark["overflow"] <= 0
