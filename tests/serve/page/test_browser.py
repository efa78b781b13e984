"""A person at the page: draw, ask, attack; with a server and without one."""

import base64
import io
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

import dpcert
from dpcert.certification.bounds import certified_radius, lower_confidence_bound
from tests.conftest import blobs
from tests.serve.page.browsing import SEVEN, needs_browser, visiting, web_host
from tests.serve.page.conftest import RUN, VOTES, served

pytestmark = [pytest.mark.slow, needs_browser]


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


def test_walk_until_the_answer_changes(browser, address):
    """Asked at growing distances: the last answer is another class, or the list says that the path ended."""
    with visiting(browser, address) as visit:
        page = visit.open().page
        page.locator(".thumb").nth(4).click()
        page.wait_for_selector("#stop:not([hidden])")
        label, radius, _ = visit.answered()
        visit.attack()
        page.select_option("#count", "1000")
        page.click("#walk")
        page.wait_for_selector("#stop:not([hidden])")
        page.wait_for_selector("#stop", state="hidden")
        rows = [row for row in page.locator("#asked li").all() if row.get_attribute("data-distance")]
        distances = [float(row.get_attribute("data-distance")) for row in rows]
        answers = [int(row.get_attribute("data-class")) for row in rows]
        assert distances == sorted(distances, reverse=True) and page.locator("#path .asked-dot").count() == len(rows)
        inside = {answer for answer, at in zip(answers, distances, strict=True) if at < radius}
        assert inside <= {label, -1} and label in answers
        assert answers[0] not in (label, -1) or "End of the path" in page.inner_text("#asked")


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


def test_a_picture_of_any_size_and_a_file_that_is_none(browser, demo, tmp_path):
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
        Image.new("RGB", (37, 23), "#c2502f").save(tmp_path / "photo.png")
        page.set_input_files("#file", tmp_path / "photo.png")
        page.wait_for_selector("#stop:not([hidden])")
        assert visit.answered()[0] in (-1, 0, 1, 2)


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
        small = np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).convert("L"))
        assert small.shape == (28, 28) and 20 < small.mean() < 80
