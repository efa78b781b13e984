"""A person at the page: draw, ask, attack; with a mouse, a keyboard, a phone, in the dark; with a server and without one."""

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import dpcert
from dpcert.certification.bounds import certified_radius, lower_confidence_bound
from dpcert.errors import ConfigError
from dpcert.serve.export import write_demo
from tests.conftest import blobs
from tests.serve.browsing import SEVEN, launched, needs_browser, visiting, web_host

pytestmark = [pytest.mark.slow, needs_browser]
RUN = Path(__file__).parents[1] / "stored_runs" / "mnist-dp-gaussian"
VOTES = 2000


@contextmanager
def served(run, *options, **environment):
    """The address of ``dpcert serve RUN``."""
    command = [sys.executable, "-m", "dpcert", "serve", str(run), "--port", "0", *map(str, options)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | environment
    )
    try:
        found = re.search(r"http://\S+:\d+", process.stdout.readline())
        assert found, "dpcert serve did not start"
        yield found[0] + "/"
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


@pytest.fixture(scope="module")
def browser():
    with launched() as opened:
        yield opened


@pytest.fixture(scope="module")
def service():
    with served(RUN, "--n", VOTES) as address:
        yield address


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("web") / "deep" / "folder"
    try:
        return write_demo(dpcert.open_run(RUN), folder, None, 100, VOTES, 0.001)
    except ConfigError as error:
        pytest.skip(f"no ONNX Runtime for browsers: {error}")


@pytest.fixture(scope="module")
def demo(demo_folder):
    """The static demo on a web host, below a path that it cannot know."""
    with web_host(demo_folder.parents[1]) as address:
        yield f"{address}deep/folder/"


@pytest.fixture(params=["service", "demo"])
def address(request):
    return request.getfixturevalue(request.param)


def test_draw_ask_attack(browser, address):
    with visiting(browser, address) as visit:
        page = visit.open().page
        visit.draw(SEVEN)
        label, radius, votes = visit.ask()
        assert label == 7 and radius > 0.3 and sum(votes) <= VOTES
        expected = certified_radius(lower_confidence_bound(votes[7], VOTES, 0.001), 0.5)
        assert abs(radius - expected) < 1e-9
        assert page.inner_text("#answer") == "7" and f"{votes[7]:,} of {VOTES:,} votes" in page.inner_text("#answer-words")
        assert float(page.inner_text("#radius")) <= radius < float(page.inner_text("#radius")) + 0.001  # rounded down
        assert page.locator("#copies li").count() == 8 and "7" in page.inner_text("#said")
        visit.attack()
        for value in (0, 100, 250, 700, 1000):
            page.locator("#strength").fill(str(value))
            inside, words = visit.state()
            distance = float(page.inner_text("#distance"))
            assert inside == (distance < radius) or abs(distance - radius) < 0.002
            assert words.startswith("Inside the certificate" if inside else "Beyond the certificate")
        assert not inside and distance > 2 * radius
        page.locator("#strength").fill("200")
        page.click("#recheck")
        page.wait_for_selector("#asked li")
        assert page.get_attribute("#asked li", "data-class") in ("7", "-1")  # another class: with probability 2 alpha at most


def test_the_numbers_are_those_of_the_api(browser, service):
    with visiting(browser, service) as visit:
        said = []

        def listen(route):
            answer = route.fetch()
            said.append(json.loads(answer.text().splitlines()[-1]))
            route.fulfill(response=answer)

        visit.page.route("**/votes?*", listen)
        visit.open()
        for number in (0, 1, 8):
            visit.page.locator(".thumb").nth(number).click()
            visit.page.wait_for_selector("#stop:not([hidden])")
            label, radius, votes = visit.answered()
            assert (label, radius, votes) == (said[-1]["class"], said[-1]["radius"], said[-1]["votes"])
        assert len(said) == 3
        facts = json.loads(visit.page.request.get(f"{service}model").text())
        assert facts["model_sha256"] in visit.page.text_content("#statement")


def test_no_radius_before_the_last_vote(browser, address):
    """Watched at every change of the page: while votes arrive, there are counts and no class, no radius, no ball."""
    with visiting(browser, address) as visit:
        page = visit.open().page
        page.evaluate(
            """() => { window.seen = []; new MutationObserver(() => window.seen.push([
                 document.getElementById("tally").textContent, document.getElementById("radius").dataset.radius,
                 document.getElementById("answer").dataset.class, document.querySelectorAll("#ball .disc").length,
               ])).observe(document.getElementById("votes"), { subtree: true, childList: true, attributes: true }); }"""
        )
        visit.draw(SEVEN)
        visit.ask()
        arriving = [row for row in page.evaluate("window.seen") if "votes cast." in row[0] and not row[0].startswith("All")]
        before = [row for row in arriving if row[2] == ""]
        assert before and all(radius == "" and discs == 0 for _, radius, _, discs in before)


def test_logits_in_the_browser_are_pytorchs(browser, demo):
    rows = torch.randn((64, 1, 28, 28), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = dpcert.open_run(RUN).model.eval()(rows).numpy()
    with visiting(browser, demo) as visit:
        script = """async ([url, rows]) => Array.from(await (await import(url)).logits(Float32Array.from(rows), 64))"""
        ours = visit.open().page.evaluate(script, [f"{demo}page/browser.js", rows.flatten().tolist()])
    assert np.abs(np.array(ours).reshape(64, 10) - expected).max() < 1e-4


def test_answers_agree_with_the_library(browser, address):
    """The same test images, by the page and by Python: the same class, radii that differ by the noise of the votes only."""
    run = dpcert.open_run(RUN)
    certs = run.smoothed().certify(run.data.x_test[:6], n=VOTES)
    with visiting(browser, address) as visit:
        visit.open()
        for number in range(6):
            visit.page.locator(".thumb").nth(number).click()
            visit.page.wait_for_selector("#stop:not([hidden])")
            label, radius, _ = visit.answered()
            if certs.predict[number] >= 0 and label >= 0 and certs.radius[number] > 0.2:
                assert label == certs.predict[number] and abs(radius - certs.radius[number]) < 0.25


def test_keyboard_only(browser, address):
    with visiting(browser, address) as visit:
        page = visit.open().page
        page.keyboard.press("Tab")  # the skip link
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "pad"
        page.keyboard.press("ArrowUp")
        for _ in range(8):
            page.keyboard.press("ArrowUp")
        page.keyboard.press("Space")
        assert page.inner_text("#said") == "pen down"
        for _ in range(17):
            page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        label, radius, _ = visit.answered()
        assert label == 1 and radius > 0
        for _ in range(80):
            if page.evaluate("document.activeElement.id") == "find":
                break
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector("#attack-stage:not([hidden])")
        assert page.evaluate("document.activeElement.id") == "strength"
        before = float(page.inner_text("#distance"))
        page.keyboard.press("End")
        assert float(page.inner_text("#distance")) > before and visit.state()[0] is False
        page.keyboard.press("Home")
        assert visit.state()[0] is True
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector("#asked li")


UNNAMED = """() => [...document.querySelectorAll("button, input, select, canvas, [role=img], img")]
  .filter((e) => e.offsetParent && !(e.textContent.trim() || e.ariaLabel || e.labels?.length || e.getAttribute("alt") !== null && e.tagName === "IMG"
    || e.parentElement.ariaLabel))
  .map((e) => e.outerHTML.slice(0, 80))"""
SMALL = """() => [...document.querySelectorAll("button, .button, select, input[type=range]")]
  .filter((e) => e.offsetParent).map((e) => [e.id || e.className, e.getBoundingClientRect()])
  .filter(([name, box]) => Math.min(box.height, box.width) < 40).map(([name]) => name)"""
CONTRAST = """() => {
  const parts = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (color) => parts(color).map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)|transparent/.test(c)) return c; } return "rgb(255,255,255)"; };
  return Math.min(...[...document.querySelectorAll("p, dt, dd, button:not(:disabled), h1, h2, h3, span, li, figcaption, label")]
    .filter((e) => e.offsetParent && e.textContent.trim() && !e.closest(".unseen")).map((e) => {
      const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
      return (a + 0.05) / (b + 0.05);
    }));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_light_and_dark(browser, demo, scheme):
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
    with visiting(browser, demo, color_scheme=scheme, **phone) as visit:
        page = visit.open().page
        visit.draw(SEVEN)
        visit.ask()
        visit.attack()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.evaluate(SMALL) == []
        assert page.evaluate(UNNAMED) == []
        assert page.evaluate(CONTRAST) >= 4.5
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


def test_a_finger_draws(browser, demo):
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with visiting(browser, demo, **phone) as visit:
        page = visit.open().page
        page.locator("#pad").scroll_into_view_if_needed()
        box = page.locator("#pad").bounding_box()
        hand = page.context.new_cdp_session(page)
        for number, (x, y) in enumerate([*SEVEN, SEVEN[-1]]):
            kind = "touchStart" if number == 0 else "touchEnd" if number == len(SEVEN) else "touchMove"
            points = [] if kind == "touchEnd" else [{"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]}]
            hand.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        assert page.is_enabled("#ask") and visit.ask()[0] == 7


def test_nothing_moves_for_those_who_asked_for_it(browser, demo):
    for wish, expected in (("reduce", 0), ("no-preference", 1)):
        with visiting(browser, demo, reduced_motion=wish) as visit:
            page = visit.open().page
            page.evaluate(
                """() => { window.moved = 0; for (const kind of ["animationstart", "transitionstart"])
                     document.addEventListener(kind, () => (window.moved += 1)); }"""
            )
            visit.draw(SEVEN)
            visit.ask()
            page.wait_for_timeout(300)  # animations begin with a frame
            assert min(1, page.evaluate("window.moved")) == expected


def test_a_picture_of_any_size_and_a_file_that_is_none(browser, demo, tmp_path):
    from PIL import Image, ImageDraw

    photo = Image.new("RGB", (300, 200), "#f4f1e8")
    ImageDraw.Draw(photo).line([(120, 50), (180, 50), (150, 150)], fill="#222", width=12)
    photo.save(tmp_path / "seven.jpg")
    (tmp_path / "no.png").write_text("not a picture")
    with visiting(browser, demo) as visit:
        page = visit.open().page
        page.set_input_files("#file", tmp_path / "seven.jpg")
        assert visit.answered()[0] == 7
        page.set_input_files("#file", tmp_path / "no.png")
        page.wait_for_selector("#problem:not([hidden])")
        assert "not a picture" in page.inner_text("#problem")
        page.locator(".thumb").nth(1).click()
        page.wait_for_selector("#problem", state="hidden")
        assert visit.answered()[0] == 2


def test_stop_certifies_nothing(browser, demo_folder, tmp_path):
    """With many votes asked for, there is time to stop them; the page then has no answer, and the next question works."""
    shutil.copytree(demo_folder, tmp_path / "demo")
    facts = json.loads((tmp_path / "demo" / "model.json").read_text())
    (tmp_path / "demo" / "model.json").write_text(json.dumps(facts | {"n": 100_000_000}))
    with web_host(tmp_path) as address, visiting(browser, f"{address}demo/") as visit:
        page = visit.open().page
        visit.draw(SEVEN)
        page.click("#ask")
        page.wait_for_selector("#tally:has-text('votes cast')")
        page.click("#stop")
        page.wait_for_selector("#stop", state="hidden")
        assert page.get_attribute("#radius", "data-radius") == "" and "certify nothing" in page.inner_text("#answer-words")
        assert visit.ask(1000)[0] == 7


def test_a_color_run_with_custom_data(browser, tmp_path):
    """Any shape and any number of classes: the gallery instead of the drawing area."""
    gray = blobs(0, size=10)
    colors = {name: np.stack([part] * 3, axis=1) if name.startswith("x") else part for name, part in gray.items()}
    np.savez(tmp_path / "data.npz", **colors)
    settings = ["data.path=" + str(tmp_path / "data.npz"), "model.name=linear", "train.batch_size=60", "train.epochs=2"]
    options = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "dpcert", "train", "mnist/dp-gaussian", "--out", str(tmp_path / "run"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with served(tmp_path / "run", "--gallery", "--n", 500) as address, visiting(browser, address) as visit:
        page = visit.open().page
        assert page.is_hidden("#drawing") and page.locator(".thumb").count() == 24 and page.locator(".bar-row").count() == 3
        label, _, votes = visit.ask()
        assert label in (-1, 0, 1, 2) and sum(votes) <= 500
        assert page.locator("#copies img").count() == 8


def test_an_api_key_is_asked_for(browser):
    key = "0123456789abcdef0123456789abcdef"
    with (
        served(RUN, "--n", 500, DPCERT_API_KEY=key) as address,
        visiting(browser, address, complaints=("401", "Unauthorized")) as visit,
    ):
        page = visit.page
        page.goto(address)
        page.wait_for_selector("#key-form:not([hidden])")
        page.fill("#key", key)
        page.keyboard.press("Enter")
        page.wait_for_selector("#main:not([hidden])")
        visit.draw(SEVEN)
        assert visit.ask()[0] == 7


def test_a_server_that_went_away_is_named(browser):
    with served(RUN, "--n", 500) as address, visiting(browser, address, complaints=("ERR_CONNECTION",)) as visit:
        page = visit.open().page
        page.context.set_offline(True)
        visit.draw(SEVEN)
        page.click("#ask")
        page.wait_for_selector("#problem:not([hidden])")
        assert "does not answer" in page.inner_text("#problem")
        visit.complaints = [said for said in visit.complaints if "ERR_INTERNET_DISCONNECTED" not in said]


def test_a_demo_without_its_model_says_so(browser, demo_folder, tmp_path):
    shutil.copytree(demo_folder, tmp_path / "demo")
    (tmp_path / "demo" / "model.onnx").unlink()
    with web_host(tmp_path) as address, visiting(browser, f"{address}demo/", complaints=("404",)) as visit:
        visit.page.goto(visit.address)
        visit.page.wait_for_selector("#problem:not([hidden])")
        assert "model.onnx is missing" in visit.page.inner_text("#problem")


@pytest.mark.parametrize(("mode", "words"), [("service", "on the server"), ("demo", "in this browser")])
def test_it_says_where_votes_are_computed(browser, request, mode, words):
    with visiting(browser, request.getfixturevalue(mode)) as visit:
        assert words in visit.open().page.inner_text("#place")


def test_twin_what_must_not_happen_is_seen(browser, demo_folder, tmp_path):
    """A page with an inline script, a missing file and a foreign picture fails all three checks."""
    shutil.copytree(demo_folder, tmp_path / "demo")
    index = tmp_path / "demo" / "index.html"
    index.write_text(
        re.sub("<meta http-equiv[^>]*>", "", index.read_text()).replace(
            "</body>", '<img src="http://localhost:9/x.png"><img src="no.png"><script>throw Error("inline")</script></body>'
        )
    )
    with web_host(tmp_path) as address, pytest.raises(AssertionError), visiting(browser, f"{address}demo/") as visit:
        visit.open()
    assert all(word in str(visit.complaints) for word in ("inline", "404")) and "localhost:9" in str(visit.left)


def png_of(page, selector):
    """A screenshot as an array."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(page.locator(selector).screenshot())).convert("L"))[
        20:-20, 20:-20
    ]  # without the rounded corners


def test_the_drawing_is_what_the_ball_shows(browser, demo):
    """Ink where it was drawn; the small picture is the image that was asked."""
    with visiting(browser, demo) as visit:
        page = visit.open().page
        assert png_of(page, "#pad").max() < 100
        visit.draw(SEVEN)
        assert png_of(page, "#pad").max() > 200
        visit.ask()
        source = page.get_attribute("#ball image", "href")
        from PIL import Image

        small = np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).convert("L"))
        assert small.shape == (28, 28) and 20 < small.mean() < 80
