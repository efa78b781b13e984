"""The comparison with the quoted systems: which runs it needs, how they are certified, and what the page shows."""

from pathlib import Path

import pytest

from dpcert.errors import ConfigError
from dpcert.methods import PRIOR
from dpcert.paper import prior, reproduction
from dpcert.paper.grid import TARGETS, Cell, in_order, targets_of
from dpcert.paper.pieces import Piece
from dpcert.paper.published import QUOTED_ON, VARIANTS
from dpcert.paper.result_index import Place, ResultIndex
from dpcert.store.metrics import is_worth

RESULTS = Path(__file__).parents[2] / "results"
ENTRY = {"n0": 100, "n": 10_000, "alpha": 0.001, "split": "test"}


def index(*methods):
    return ResultIndex({Place("mnist", method, 0.5): RESULTS / f"mnist-{method}" for method in methods})


def test_every_system_has_a_title_and_a_row():
    assert list(prior.SYSTEM_TITLES) == list(PRIOR)
    needs = TARGETS["prior"].needs(["mnist", "cifar10"])
    assert {need.cell.method for need in needs} == {*VARIANTS, *PRIOR}
    assert {(need.cell.dataset, need.sigmas) for need in needs} == {("mnist", (0.5,)), ("cifar10", (0.25,))}
    assert len(in_order(targets_of(["prior"]), ["mnist", "cifar10"])) == len(needs) == 20


def test_a_model_with_noise_inside_is_certified_under_its_own_law(tmp_path):
    inside, outside = (Piece("certify", Cell("mnist", name), 500, 0.5).command(tmp_path) for name in ("pixeldp", "dp-denoiser"))
    assert "--sigma" not in inside and outside[outside.index("--sigma") + 1] == "0.5"
    assert all("500" in command and "10000" in command for command in (inside, outside))


def test_noise_inside_counts_by_what_it_is_worth():
    inner = {**ENTRY, "sigma": 0.49999998, "smoothing": {"site": "hidden"}}
    assert is_worth(inner, 0.5) and not is_worth(inner, 0.25) and not is_worth({**inner, "n": 1000}, 0.5)
    assert is_worth({**ENTRY, "sigma": 0.5}, 0.5) and not is_worth({**ENTRY, "sigma": 0.49999998}, 0.5)


def test_ours_and_quoted_figures_have_columns_of_their_own():
    headings, rows = prior.by_radius(index("dp-gaussian"), "mnist", 0.5)
    assert headings[-3:] == ("TransDenoiser (quoted)", "SecureSGD (quoted)", "StoBatch (quoted)")
    by_name = {row[0]: dict(zip(headings, row, strict=True)) for row in rows}
    assert set(by_name) == {f"{radius:g}" for radius in (*prior.RADII, *QUOTED_ON["mnist"][0])}
    assert by_name["0.1"]["SecureSGD (quoted)"] == "95.9" and by_name["0.3"]["SecureSGD (quoted)"] == ""
    assert float(by_name["0.2"]["DP-Gaussian"]) > 90 and by_name["0.2"]["SecureSGD"] == "not run"
    facts = [dict(zip(prior.OVERVIEW, row, strict=True)) for row in prior.overview(index("dp-gaussian"), "mnist", 0.5)]
    assert facts[0]["epsilon"].startswith("3.0") and float(facts[0]["ACR"].split()[0]) > 1 and int(facts[0]["a vote, µs"]) > 0
    assert facts[-1]["epsilon"] == "not run" and prior.figure(index("dp-gaussian"), ("mnist",), (0.5,)) is not None
    assert prior.figure(index(), ("mnist",), (0.5,)) is None


PAGE = "# A page\n\nText before.\n\n<!-- begin: prior -->\nold\n<!-- end: prior -->\n\nText after: 100 %.\n"
REQUEST = reproduction.TargetRequest("prior", "the systems that the paper quotes", ("mnist",), (0.5,), (0.25,))


def made_up(*methods):
    """Rows of our runs under the names of the systems."""
    known = sorted(path for path in RESULTS.glob("mnist-dp-*") if (path / "certificates-sigma0.50.tsv").exists())
    return ResultIndex({Place("mnist", method, 0.5): path for method, path in zip(methods, known, strict=False)})


def write(page, figures, *methods):
    part = reproduction.section(made_up(*methods), REQUEST, with_figures=True)
    reproduction.save_figures([part], figures)
    reproduction.write_markdown([part], page, figures, "dpcert reproduce prior --show")
    return page.read_text()


def test_one_command_writes_tables_and_figure_between_the_markers_of_a_page(tmp_path):
    page, figures = tmp_path / "docs" / "prior.md", tmp_path / "figures"
    page.parent.mkdir()
    page.write_text(PAGE)
    text = write(page, figures, *PRIOR)
    before, after = PAGE.split("old\n")
    assert text.startswith(before) and text.endswith(after) and "\nold\n" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(any(title in row for row in rows) for title in prior.SYSTEM_TITLES.values())
    assert "![prior-mnist](../figures/prior-mnist.png)" in text and (figures / "prior-mnist.png").stat().st_size > 10_000
    assert write(page, figures, *PRIOR) == text  # written again, it is the same page


def test_only_missing_rows_are_not_run(tmp_path):
    page = tmp_path / "prior.md"
    page.write_text(PAGE)
    text = write(page, tmp_path, *PRIOR, *VARIANTS[:-1])
    missing = [line for line in text.splitlines() if line.startswith(f"| {prior.title_of(VARIANTS[-1])} |")]
    assert len(missing) == 1 and "not run" in missing[0]
    overview = [line for line in text.splitlines() if line.startswith("| ") and "±" in line]
    assert len(overview) == len(prior.METHODS) - 1 and not any("not run" in line for line in overview)


@pytest.mark.parametrize(
    "broken",
    [
        "<!-- begin: prior -->\nno end\n",
        "<!-- end: prior -->\n<!-- begin: prior -->\n",
        "<!-- begin: prior -->\n<!-- end: prior -->\n<!-- begin: prior -->\n<!-- end: prior -->\n",
    ],
)
def test_a_page_with_broken_markers_stays_as_it_is(tmp_path, broken):
    page = tmp_path / "prior.md"
    page.write_text(broken)
    with pytest.raises(ConfigError, match="correct the page"):
        write(page, tmp_path, "pixeldp")
    assert page.read_text() == broken


def test_the_page_of_the_comparison_has_the_markers():
    text = (RESULTS.parent / "docs" / "prior.md").read_text()
    assert text.count("<!-- begin: prior -->\n") == text.count("<!-- end: prior -->\n") == 1
