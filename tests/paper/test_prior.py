"""The comparison with the quoted systems: which runs it needs, how they are certified, and what the page shows."""

from pathlib import Path

from dpcert.methods import PRIOR
from dpcert.paper import prior
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
