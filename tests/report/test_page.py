"""The page: its numbers are those of the rows, it needs nothing but itself, and it says what it does not know."""

import json
import math
import re
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpcert.certification.metrics import largest_radius
from dpcert.methods import METHODS
from dpcert.paper.comparison import figures_of
from dpcert.report import words
from dpcert.report.html import _drawings, render
from dpcert.report.tables import read_run
from dpcert.store.durable import sha256_hex, write_checked_json
from dpcert.store.records import CertificateRow, CurveRow, header, read_rows, text_of
from tests.report.conftest import CERTIFICATES, RUNS, complete_run, curve_rows, write_rows
from tests.report.reading import Page, table, wrong_numbers

# ------------------------------------------------------------------ numbers


def test_the_numbers_of_the_page_are_those_of_the_rows(page, complete):
    assert wrong_numbers(Page(page), complete, CERTIFICATES) == []


def test_twin_a_page_of_other_rows_is_caught(page, tmp_path):
    """One right answer made wrong in the rows: the page of before no longer fits."""
    run = complete_run(tmp_path / "run")
    rows = read_rows(CertificateRow, run / CERTIFICATES)
    write_rows(run / CERTIFICATES, CertificateRow, [replace(rows[0], correct=0), *rows[1:]])
    wrong = wrong_numbers(Page(page), run, CERTIFICATES)
    assert any(text.startswith("acr") for text in wrong) and any(text.startswith("class_certified_at") for text in wrong)


def test_correlations_and_medians_are_those_of_the_rows(page, complete):
    """Spearman's rho by hand: Pearson's of the ranks (no ties among the metrics; equal radii share their mean rank)."""
    samples = table(complete / "samples.tsv")

    def ranks(values):
        values = np.array(values)
        return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])

    radius = ranks([float(row["radius"]) * int(row["correct"]) for row in samples])
    for metric in ("gradient_norm", "hessian_norm", "lipschitz"):
        rho = np.corrcoef(radius, ranks([float(row[metric]) for row in samples]))[0, 1]
        shown = {
            e.attributes["data-key"]: e
            for e in Page(page).elements
            if e.around.get("data-metric") == metric and "data-key" in e.attributes
        }
        assert float(shown["rho"].attributes["data-value"]) == pytest.approx(rho, abs=1e-9) and rho < -0.3
        assert shown["rho"].text == f"{rho:+.3f}"
        assert float(shown["median"].attributes["data-value"]) == pytest.approx(
            np.median([float(row[metric]) for row in samples])
        )


def test_promise_and_settings_are_the_runs_own(page, complete):
    metrics = json.loads((complete / "metrics.json").read_text())
    parsed = Page(page)
    assert parsed.value("epsilon") == metrics["privacy"]["epsilon"] and "epsilon = 3.0000 at delta = 1e-05" in page
    assert all(condition in page for condition in metrics["privacy"]["conditions"])
    settings = next(e.text for e in parsed.elements if e.tag == "pre")
    assert settings == (complete / "config.toml").read_text()
    digests = {e.attributes["data-file"]: e.attributes["data-value"] for e in parsed.with_key("sha256")}
    assert digests == {f.name: sha256_hex(f.read_bytes()) for f in complete.iterdir() if f.name != "report.html"}


def test_examples_are_the_extreme_ones_with_their_images(page, complete):
    rows = {row["idx"]: row for row in table(complete / CERTIFICATES)}
    groups: dict[str, list[str]] = {}
    for element in Page(page).elements:
        if "data-group" in element.attributes:
            groups.setdefault(element.attributes["data-group"], []).append(element.attributes["data-idx"])
            assert element.text.split() and f"class {rows[element.attributes['data-idx']]['label']}" in element.text
    right = sorted(float(row["radius"]) for row in rows.values() if row["correct"] == "1")
    wrong = sorted(float(row["radius"]) for row in rows.values() if row["correct"] == "0" and row["predict"] != "-1")
    shown = {group: sorted(float(rows[idx]["radius"]) for idx in chosen) for group, chosen in groups.items()}
    assert shown["most-robust"] == right[-6:] and shown["least-robust"] == right[:6]
    assert shown["confidently-wrong"] == wrong[-6:]
    assert len(groups["abstained"]) == 6 and all(rows[idx]["predict"] == "-1" for idx in groups["abstained"])
    assert len({rows[idx]["label"] for idx in groups["most-robust"]}) == 6  # equal radii: one of each class first
    images = [e for e in Page(page).elements if e.tag == "img"]
    assert len(images) == 2 * 24 and all(
        e.attributes["alt"] and e.attributes["src"].startswith("data:image/png") for e in images
    )


def test_the_picture_is_the_test_image_and_the_noise_is_sigma(complete):
    import base64
    import io

    from PIL import Image

    from dpcert.data.registry import load_dataset
    from dpcert.report.pictures import as_data_url, noisy

    image = load_dataset("mnist").x_test[20].numpy()
    shown = np.array(Image.open(io.BytesIO(base64.b64decode(as_data_url(image).partition(",")[2]))))
    assert (shown == np.rint(255 * image[0])).all()
    noise = (noisy(image, 0.5, 20) - image) / 0.5
    assert abs(noise.mean()) < 4 / 28 and abs(noise.std() - 1) < 4 / math.sqrt(2 * 784)
    assert (noisy(image, 0.5, 20) == noisy(image, 0.5, 20)).all() and (noisy(image, 0.5, 20) != noisy(image, 0.5, 21)).any()
    assert np.allclose(noisy(image, 1.0, 20) - image, 2 * (noisy(image, 0.5, 20) - image))  # the same noise at each sigma


# ------------------------------------------------------------------ nothing but itself


def outside(page: str) -> list[str]:
    """Everything in a page that would make a browser ask somebody else, and everything that runs."""
    parsed = Page(page)
    found = re.findall(r"https?:[^\s\"'<]*|@import[^;]*|url\((?!#)[^)]*\)", page)
    for element in parsed.elements:
        links = [
            value
            for name, value in element.attributes.items()
            if name in ("src", "href", "xlink:href", "action", "data", "srcset")
        ]
        found += [link for link in links if not link.startswith(("#", "data:image/png;base64,"))]
        found += [element.tag] if element.tag in ("script", "iframe", "object", "embed", "link", "base", "form") else []
        found += [name for name in element.attributes if name.startswith("on")]
    return found


def test_nothing_is_fetched_and_nothing_runs(page, comparison):
    assert outside(page) == [] and outside(comparison) == []


@pytest.mark.parametrize(
    "fault",
    [
        "<img src=//a.b/c.png>",
        "<script>1</script>",
        "<p style='background: url(x.png)'>",
        "<a href='http://a.b'>",
        "<b onclick='x'>",
    ],
)
def test_twin_an_outside_link_is_caught(page, fault):
    assert outside(page.replace("</body>", f"{fault}</body>"))


def test_names_from_outside_stay_text():
    hostile = "<script>alert(1)</script>&\"'"
    facts = read_run(RUNS / "mnist-dp-gaussian")
    metrics = {
        **facts.metrics,
        "dataset": hostile,
        "method": f"x{hostile}",
        "privacy": {**facts.metrics["privacy"], "conditions": [hostile]},
    }
    text = render([replace(facts, metrics=metrics, path=Path(hostile), config=f'[data]\nname = "<b>{hostile[:8]}"\n')])
    assert "<script" not in text and "<b>&lt;" not in text and outside(text) == []
    assert not Page(text).unbalanced
    two = render([replace(facts, metrics=metrics, path=Path(hostile)), replace(facts, path=Path("other"))])
    assert "<script" not in two and outside(two) == []


def test_the_same_facts_give_the_same_bytes(complete, page, tmp_path):
    from dpcert.runs.page import with_images

    shutil.copytree(complete, tmp_path / "elsewhere")
    moved = render(with_images([read_run(tmp_path / "elsewhere")]), figures_of)
    assert moved.replace(str(tmp_path / "elsewhere"), str(complete)) == page


def test_the_page_is_whole_small_and_can_be_heard(page, comparison):
    for text in (page, comparison):
        parsed = Page(text)
        assert not parsed.unbalanced and len(text) < 1_500_000
        ids = [e.attributes["id"] for e in parsed.elements if "id" in e.attributes]
        assert len(ids) == len(set(ids))
        used = set(re.findall(r'(?:url\(|href=")#([\w-]+)', text))
        assert used <= set(ids)
        assert all(e.attributes.get("scope") in ("row", "col") for e in parsed.elements if e.tag == "th")
        plots = [e for e in parsed.elements if e.attributes.get("class") == "plot"]
        assert len(plots) >= 14 and all(len(e.attributes["aria-label"]) > 40 and e.attributes["role"] == "img" for e in plots)
        headings = [e.text for e in parsed.elements if e.tag == "h2"]
        assert len(headings) == len(set(headings)) >= 10


def test_figures_follow_the_colours_of_the_page(page):
    """No colour is fixed inside a figure, so that none is invisible on a dark page."""
    figures = re.findall(r'<div class="plot".*?</svg>', page, flags=re.DOTALL)
    fixed = {colour for figure in figures for colour in re.findall(r"(?:fill|stroke): ?(#\w+|black|white)", figure)}
    assert len(figures) == 15 and not fixed
    variables = set(re.findall(r"var\((--[\w-]+)\)", page))
    light, dark = re.findall(r":root \{(.*?)\n *\}", page, flags=re.DOTALL)
    assert variables - {"--share"} <= set(re.findall(r"(--[\w-]+):", light)) & set(re.findall(r"(--[\w-]+):", dark))


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_in_light_and_dark(page):
    for scheme in re.findall(r":root \{(.*?)\n *\}", page, flags=re.DOTALL):
        colours = dict(re.findall(r"--([\w-]+): (#\w{6});", scheme))
        for ground in ("paper", "card"):
            for text in ("ink", "soft", "accent", "warn"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        assert all(contrast(colours[name], colours["paper"]) >= 3 for name in colours if name.startswith("series"))
        assert contrast(colours["ink"], colours["bar"]) >= 4.5


# ------------------------------------------------------------------ what a newcomer reads


def test_the_header_says_what_was_trained_promised_how_robust_and_where_it_fails(page):
    said = " ".join(e.text for e in Page(page).elements if e.tag == "dd")
    for words_of_it in ("60,000 training images of MNIST", "2 noisy copies", "ε = 3.00", "δ = 1e-05", "97.67 %", "92.6 %", "1.247",
                        "class 9 is the weakest", "15 got a wrong answer and 10 got none", "plus δ", "of 1.246 (within our 95 % interval)",
                        "94.7 % certified at 0.25 (within our 95 % interval)", "counting 0 if the answer is wrong or missing"):  # fmt: skip
        assert words_of_it in said


def test_the_weakest_class_is_counted_from_its_rows():
    own = [row for row in table(RUNS / "mnist-dp-gaussian" / CERTIFICATES) if row["label"] == "9"]
    right = [float(row["radius"]) for row in own if row["correct"] == "1"]
    certified = sum(radius >= 0.25 for radius in right)
    silent = sum(row["predict"] == "-1" for row in own)
    assert 0 < certified < len(right) < len(own)
    facts = read_run(RUNS / "mnist-dp-gaussian")
    said = words.failing(facts)
    assert f"{certified} of {len(own)} are certified, {len(right) - certified} are correct with a smaller radius" in said
    assert f"{len(own) - len(right) - silent} wrong" in said and f"{silent} without an answer" in said
    wrong = [row for row in facts.certified[0].rows if row.label == 9 and not row.correct and row.predict != -1]
    for mistakes, told in (([4, 4, 7], "3 wrong, mostly taken for 4,"), ([4], "1 wrong, ")):  # once is not mostly
        changed = [replace(row, predict=predict) for row, predict in zip(wrong, mistakes, strict=False)]
        rows = [*(row for row in facts.certified[0].rows if row not in wrong), *changed]
        said = words.failing(replace(facts, certified=[replace(facts.certified[0], rows=rows)]))
        assert told in said and ("mostly" in said) == ("mostly" in told)


def test_the_table_ends_with_the_last_radius_at_which_something_is_certified(page, complete):
    stored = json.loads((complete / "metrics.json").read_text())["certification"][0]["certified_accuracy"]
    headings = [e.text for e in Page(page).elements if e.tag == "th"]
    last = max((r for r in stored if stored[r] > 0), key=float)
    assert last in headings and not any(r in headings for r in stored if float(r) > float(last))
    assert any(share == 0 for share in stored.values())  # else the run shows nothing of this


def test_every_method_has_words():
    assert set(words.METHOD_WORDS) == set(METHODS)
    for name, row in METHODS.items():
        text = words.METHOD_WORDS[name]
        assert ("noisy" in text) == (row.views != "none") and ("protect privacy" in text) == (row.clip != "none")
        assert ("PSAC" in text) == (row.clip == "psac") and ("attacked" in text) == (row.views == "smoothadv")


def test_a_run_that_is_not_private_never_shows_a_finite_epsilon(without_figures):
    text = render([read_run(RUNS / "mnist-regular")])
    claims = text.partition("<h2>Settings</h2>")[0]
    assert "ε = ∞" in claims and "Nothing is promised" in claims and not re.search(r"(epsilon|ε) = \d", claims)


def test_classes_have_names_where_the_data_set_is_public():
    facts = read_run(RUNS / "fashion-mnist-dp-gaussian")
    assert words.class_name(facts, 6) == "6 (shirt)" and words.class_name(facts, 11) == "11"
    own = replace(facts, config=facts.config.replace("[data]", '[data]\npath = "fashion-mnist.npz"'))
    assert words.class_name(own, 6) == "6"


def test_what_alpha_means_is_said_of_the_certificates_that_are_shown():
    c = read_run(RUNS / "mnist-dp-gaussian").certified[0]
    together = replace(c, figures={**c.figures, "alpha_is": "simultaneous", "together": 500, "alpha_each": 0.001 / 500})
    alone, joint = words.how_they_hold([c]), words.how_they_hold([together])
    assert "individual certificate" in alone and "99.9 %" in alone and "together" not in alone
    assert "hold together with probability at least 99.9 %" in joint and "individual" not in joint
    both = words.how_they_hold([c, together])
    assert alone in both and joint in both
    f = c.figures
    most = largest_radius(f["n"], f["alpha"], f["sigma"])
    assert float(c.radius.max()) == pytest.approx(most, abs=1e-6)  # some image has all votes
    assert largest_radius(f["n"], f["alpha"] / 500, f["sigma"]) < most
    assert f"cannot certify more than {math.ceil(1000 * c.radius.max()) / 1000:.3f}" in words.where_it_ends(c)
    assert "more than 1.600" in words.where_it_ends(c) and "more than 1.50" in words.where_it_ends(together)


# ------------------------------------------------------------------ several runs


def test_runs_side_by_side(comparison):
    parsed = Page(comparison)
    for place, name in enumerate(("mnist-dp-gaussian", "mnist-dpsgd", "mnist-regular")):
        rows = table(RUNS / name / CERTIFICATES)
        acr = sum(float(row["radius"]) * int(row["correct"]) for row in rows) / len(rows)
        shown = [e for e in parsed.with_key("acr") + parsed.with_key("card_acr") if e.around.get("data-run") == str(place)]
        assert len(shown) == 2 and all(float(e.attributes["data-value"]) == pytest.approx(acr, abs=1e-9) for e in shown)
    assert "all on mnist" in comparison and 'data-mark="datasets"' not in comparison
    assert parsed.missing() == {"attacks", "samples", "training", "images"}  # of the two that lack them
    differing = next(e for e in parsed.elements if e.attributes.get("id") == "settings").text
    assert "method.name" in differing


def test_the_gain_over_the_first_run_is_that_of_the_rows(comparison):
    earned = [
        {row["idx"]: float(row["radius"]) * int(row["correct"]) for row in table(RUNS / name / CERTIFICATES)}
        for name in ("mnist-dp-gaussian", "mnist-dpsgd", "mnist-regular")
    ]
    shown = Page(comparison).with_key("gain")
    assert [element.around["data-run"] for element in shown] == ["1", "2"]
    for element, own in zip(shown, earned[1:], strict=True):
        common = sorted(own.keys() & earned[0].keys())
        gains = [own[idx] - earned[0][idx] for idx in common]
        expected, half = statistics.mean(gains), 1.96 * statistics.stdev(gains) / len(gains) ** 0.5
        assert float(element.attributes["data-value"]) == pytest.approx(expected, abs=1e-9)
        text = f"{expected:+.3f} {expected - half:+.3f} to {expected + half:+.3f}"
        assert element.text == text.replace("-", "−")
    assert "“Gain over dp-gaussian”" in comparison


def test_no_gain_where_it_would_not_be_one_of_the_models(complete, without_figures):
    """Another number of votes, or another alpha, gives other radii for the same model; other data are other images."""
    one = read_run(complete)
    (certified,) = one.certified
    fewer = replace(one, certified=[replace(certified, figures={**certified.figures, "n": 1000})])
    bolder = replace(one, certified=[replace(certified, figures={**certified.figures, "alpha": 0.01})])
    together = replace(one, certified=[replace(certified, figures={**certified.figures, "alpha_each": 1e-6})])
    other_data = replace(one, metrics={**one.metrics, "dataset": "mine"})
    assert 'data-key="gain"' in render([one, one])
    for other in (fewer, bolder, together, other_data, replace(one, certified=[])):
        for pair in ([one, other], [other, one]):
            page = render(pair)
            assert 'data-key="gain"' not in page and "Gain over" not in page


def test_runs_of_different_data_sets_are_marked(without_figures):
    text = render([read_run(RUNS / "mnist-dp-gaussian"), read_run(RUNS / "fashion-mnist-dp-gaussian")])
    assert 'data-mark="datasets"' in text and "fashion-mnist, mnist" in text


def test_names_tell_runs_apart():
    one, other = read_run(RUNS / "mnist-dp-gaussian"), read_run(RUNS / "mnist-dpsgd")
    assert words.run_names([one]) == ["dp-gaussian on mnist"] and words.run_names([one, other]) == ["dp-gaussian", "dpsgd"]
    seeds = [replace(one, path=Path("results/a")), replace(one, path=Path("results/a-seed1")), other]
    assert words.run_names(seeds) == ["a", "a-seed1", "dpsgd"]
    assert words.run_names([one, one]) == ["mnist-dp-gaussian", "mnist-dp-gaussian (2)"]


# ------------------------------------------------------------------ missing parts


def test_each_missing_part_is_one_line_that_names_its_command(complete, without_figures):
    whole = read_run(complete)
    assert Page(render([whole])).missing() == {"images"}
    lacking = {
        "samples": (replace(whole, samples=[]), f"dpcert analyze {complete}"),
        "attacks": (replace(whole, attacks=[]), f"dpcert attack {complete}"),
        "training": (replace(whole, curve=[]), "not recorded"),
    }
    for part, (facts, remedy) in lacking.items():
        text = render([facts])
        assert Page(text).missing() == {part, "images"} and remedy in text, part
    text = render([replace(whole, certified=[], samples=[], attacks=[], curve=[])])
    assert f"dpcert certify {complete}" in text
    assert Page(text).missing() == {"certificates", "distribution", "classes", "examples", "samples", "attacks", "training"}


def test_a_training_that_is_not_private_has_no_epsilon_curve(copied, without_figures):
    write_rows(copied / "training.tsv", CurveRow, curve_rows(private=False))
    text = render([read_run(copied)])
    assert "figure-training_accuracy" in text and "figure-training_epsilon" not in text and "no finite ε" in text


def test_a_training_without_noise_shows_no_norm_of_a_gradient(copied, without_figures):
    """Whether the column is empty or, in rows of an older version, is not."""
    none = {"private": False, "reason": "gradients are not clipped", "epsilon": None, "noise_multiplier": 0.0}
    for rows in (curve_rows(private=False), [replace(row, gradient_norm=None) for row in curve_rows(private=False)]):
        write_rows(copied / "training.tsv", CurveRow, rows)
        facts = read_run(copied)
        text = render([replace(facts, metrics={**facts.metrics, "privacy": {**facts.metrics["privacy"], **none}})])
        assert "figure-training_accuracy" in text and "figure-training_gradient_norm" not in text
        assert "noised gradient" not in text and "no norm of a gradient without noise" in text


def test_certified_and_attacked_curves_are_of_one_sigma(complete, without_figures):
    """A smoothed attack at another sigma, or one on the base model only, has no certified curve beside it."""
    facts = read_run(complete)
    labels = {s.label for s in _drawings([("run", facts)])["attacks_l2"].legend}
    assert "certified, σ = 0.5, 500 images" in labels and "certified curve and the attacked" in render([facts])
    other = [replace(row, sigma=0.25) if row.target == "smoothed" else row for row in facts.attacks]
    base = [row for row in facts.attacks if row.target == "base"]
    for rows in (other, base):
        drawing = _drawings([("run", replace(facts, attacks=rows))])["attacks_l2"]
        assert not any("certified" in s.label for s in drawing.legend) and "certified" not in drawing.shows
    assert "certified curve and the attacked" not in render([replace(facts, attacks=base)])


def test_the_promise_leaves_out_records_that_were_held_out():
    facts = read_run(RUNS / "mnist-dp-gaussian")
    assert "held out" not in words.promised(facts)
    for value, said in (("5000", "but the 5,000 records held out for validation"), ('"many"', "of the training data: ")):
        config = facts.config.replace("validation = 0", "").replace("[data]", f"[data]\nvalidation = {value}")
        assert said in words.promised(replace(facts, config=config))


def test_files_with_a_header_only_count_as_missing(copied, without_figures):
    (copied / "training.tsv").write_text(header(CurveRow) + "\n")
    assert "training" in Page(render([read_run(copied)])).missing()


def test_odd_certificates_have_a_page(copied):
    """All abstained; then all right with every vote: nothing divides by zero."""
    rows = read_rows(CertificateRow, copied / CERTIFICATES)
    for change in (
        {"predict": -1, "radius": 0.0, "correct": 0, "p_lower": 0.4},
        {"predict": 1, "radius": 1.6, "correct": 1, "p_lower": 0.9993},
    ):
        facts = read_run(copied)
        spoilt = replace(facts.certified[0], rows=[replace(row, **change) for row in rows])
        assert not Page(render([replace(facts, certified=[spoilt])])).unbalanced
    one = replace(read_run(copied).certified[0], rows=rows[:1])
    assert not Page(render([replace(read_run(copied), certified=[one])])).unbalanced


# ------------------------------------------------------------------ refusals


def refused(run: Path) -> str:
    from dpcert.errors import RunError

    with pytest.raises(RunError) as caught:
        read_run(run)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_not_a_finished_run_is_refused(copied, tmp_path):
    assert "is not a run directory" in refused(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "is not a run directory" in refused(tmp_path / "empty")
    (copied / "metrics.json").unlink()
    assert "has no metrics.json; finish its training with: dpcert train" in refused(copied)


def test_a_run_from_a_newer_version_is_refused(copied):
    data = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(data.replace(b'"format":"dpcert-1"', b'"format":"dpcert-2"'))
    assert "has the format 'dpcert-2', this version reads 'dpcert-1'; it is from a newer version" in refused(copied)
    (copied / "model.safetensors").write_bytes(data)
    metrics = json.loads((copied / "metrics.json").read_text())
    write_checked_json(copied / "metrics.json", {**metrics, "format": "dpcert-2", "certification": {"by": "sigma"}})
    assert "it is from a newer version" in refused(copied)


@pytest.mark.parametrize(
    ("name", "command"), [("samples.tsv", "dpcert analyze"), ("attacks.tsv", "dpcert attack"), ("training.tsv", "dpcert train")]
)
def test_damaged_rows_are_refused_with_the_command_that_makes_them(complete, tmp_path, name, command):
    run = tmp_path / "run"
    shutil.copytree(complete, run)
    whole = (run / name).read_text()
    grows = name != "training.tsv"  # a kill leaves half a row there, which is no damage
    for damaged in (
        whole.replace("1", "2", 1 + whole.count("1") // 2),
        whole[:-9] + ("\n" if grows else ""),
        whole.replace("check", "chock", 1),
        whole + text_of_last(whole),
    ):
        (run / name).write_text(damaged)
        message = refused(run)
        assert name in message and f"rerun {command}" in message


def text_of_last(whole: str) -> str:
    return whole.splitlines()[-1] + "\n"


def test_rows_of_another_kind_are_refused(complete, tmp_path):
    shutil.copytree(complete, tmp_path / "run")
    shutil.copy(complete / "attacks.tsv", tmp_path / "run" / "samples.tsv")
    assert "does not start with the columns idx, label" in refused(tmp_path / "run")
    assert text_of(curve_rows()[0]) in (complete / "training.tsv").read_text()
