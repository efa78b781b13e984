"""CIFAR-10 in the grid: all cells of Table 1, another backbone than the paper's on every page, and never an agreement."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from dpcert.cli._reproduce import _places
from dpcert.paper import reproduction
from dpcert.paper.claims import CLAIMS, judge
from dpcert.paper.comparison import figures_of
from dpcert.paper.estimate import Estimator, units
from dpcert.paper.grid import FINE_TUNED, TARGETS, Cell, Need, in_order, needs_of, targets_of
from dpcert.paper.pieces import Piece, missing_of
from dpcert.paper.published import COMPARED, NEEDS_CROSSVIT, SIGMAS, TABLE_1, VARIANTS
from dpcert.paper.reproduction import TargetRequest
from dpcert.paper.result_index import ResultIndex
from dpcert.paper.sample_claims import SAMPLE_CLAIMS
from dpcert.paper.verdicts import OTHER_BACKBONE, acr_verdict, beside
from dpcert.report.tables import read_run
from dpcert.store.durable import write_checked_json
from tests.grid_fakes import PUBLIC, entry, fake_run, radius_of, whole_grid

ALL = (*CLAIMS, *SAMPLE_CLAIMS)
NEEDS = needs_of(list(TARGETS.values()), FINE_TUNED)
CELL = Cell("cifar10", "dp-gaussian", 0.25)
NEED = Need(CELL, (0.25,))


def sections(results, names, *, with_figures=False):
    index = ResultIndex(_places(NEEDS, results))
    return [
        reproduction.section(
            index, TargetRequest(name, TARGETS[name].paper, FINE_TUNED, TARGETS[name].sigmas, TARGETS[name].cifar10),
            with_figures=with_figures,
        )
        for name in names
    ]  # fmt: skip


def states(results) -> dict[tuple[str, str], set[str]]:
    index = ResultIndex(_places(NEEDS, results))
    found: dict[tuple[str, str], set[str]] = {}
    for target in TARGETS:
        for one in judge(ALL, index, target, FINE_TUNED, TARGETS[target].sigmas):
            if one.dataset == "cifar10":
                found.setdefault((target, one.claim.sentence), set()).add(one.state)
    return found


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar10")
    whole_grid(folder, datasets=FINE_TUNED)
    return folder


def test_the_grid_is_seven_methods_at_three_sigmas_with_the_presets_settings():
    needs = TARGETS["table1"].needs(FINE_TUNED)
    assert {(need.cell.method, sigma) for need in needs for sigma in need.sigmas} == {(m, s) for m in COMPARED for s in SIGMAS}
    assert len(needs) == 3 + 4 * 3 and all(need.cell.seed == 0 and need.cell.change == () for need in needs)
    assert CELL.name == "cifar10-dp-gaussian-sigma0.25" and CELL.preset == "cifar10/dp-gaussian"
    assert CELL.config().model.name == "resnet-48" and CELL.skips_misclassified
    assert not Cell("mnist", "dp-gaussian").skips_misclassified


def test_what_runs_first():
    order = list(dict.fromkeys(need.cell.method for need in in_order(targets_of(["all"]), FINE_TUNED)))
    assert order[:5] == ["dp-gaussian", "dpsgd", "dp-stability", "dp-macer", "dp-smoothadv"]
    everything = [need.cell.is_fine_tuned for need in in_order([TARGETS["table1"]], ["mnist", "cifar10"])]
    assert everything == sorted(everything)  # the paper's own models first


def test_metrics_of_a_baseline_need_the_certificates_that_analyze_joins_them_with():
    needs = {need.cell.method: need for need in TARGETS["figure-metric-histograms"].needs(FINE_TUNED)}
    assert needs["dpsgd"].sigmas == (0.25, 0.5) and needs["dp-gaussian"].sigmas == (0.25,)
    assert needs["dpsgd"].cell.config().certification_sigma == 0.5


@pytest.mark.parametrize(
    ("method", "images"), [("dpsgd", 200), ("psac", 200), ("dp-stability", 500), ("dp-gaussian", 1000), ("dp-smoothadv", 1000)]
)
def test_images_by_default_and_if_asked(tmp_path, method, images):
    need = Need(Cell("cifar10", method, 0.25), (0.25,), samples=True, attacks=("fgsm",))
    pieces = {piece.kind: piece.examples for piece in missing_of(need, tmp_path)}
    assert (pieces["certify"], pieces["analyze"], pieces["attack"]) == (images, 200, 1000)
    assert {piece.examples for piece in missing_of(need, tmp_path, 64)} == {64}
    assert {piece.examples for piece in missing_of(Need(Cell("mnist", method), (0.5,), True, ("fgsm",)), tmp_path)} == {1000}


def test_rows_without_the_votes_of_misclassified_images_are_found(tmp_path):
    radius = radius_of(0.5, 0.25, 1000, 0.4)
    folder = fake_run(tmp_path, CELL, {0.25: radius})
    assert (folder / "certificates-sigma0.25-skipped.tsv").exists()
    assert missing_of(NEED, tmp_path) == []
    index = ResultIndex(_places([NEED], tmp_path))
    assert index.certified("cifar10", "dp-gaussian", 0.25).acr == pytest.approx(radius.mean(), abs=1e-5)
    piece = Piece("certify", CELL, 1000, 0.25)
    assert piece.has_begun(tmp_path) and "--seed" not in piece.command(tmp_path)
    (folder / "certificates-sigma0.25-skipped.json").unlink()
    assert piece.command(tmp_path)[-2:] == ["--seed", "0"]


@pytest.mark.parametrize("change", [{"n": 1000}, {"alpha_is": "simultaneous"}, {"fresh_noise": True}, {"split": "validation"}])
def test_skipping_excuses_nothing_else(tmp_path, change):
    folder = fake_run(tmp_path, CELL, {0.25: radius_of(0.5, 0.25, 1000)})
    metrics = json.loads((folder / "metrics.json").read_text())
    metrics.pop("check")
    metrics["certification"] = [entry(0.25, radius_of(0.5, 0.25, 1000), skipped=True) | change]
    write_checked_json(folder / "metrics.json", metrics)
    assert [piece.kind for piece in missing_of(NEED, tmp_path)] == ["certify"]


def test_every_cell_is_shown_and_none_agrees(grid):
    (part,) = sections(grid, ["table1"])
    (table,) = part.tables
    assert table.title == "CIFAR-10" and len(table.rows) == 21
    verdicts = {row[place] for row in table.rows for place in (4, 6, 8)}
    assert verdicts == {f"{OTHER_BACKBONE}above the paper", f"{OTHER_BACKBONE}below the paper"}
    line = reproduction.summary([part])
    assert re.match(r"other backbone: \d+ above the paper, \d+ below the paper; claims: ", line)


def test_a_figure_equal_to_the_papers_does_not_agree_either(tmp_path):
    """The twin: the rule of the other data sets calls the same figures an agreement."""
    clean, acr, _ = TABLE_1["cifar10", "dp-gaussian", 0.25]
    fake_run(tmp_path, CELL, {0.25: np.full(1000, acr)}, clean=clean / 100)
    (part,) = sections(tmp_path, ["table1"])
    row = next(row for row in part.tables[0].rows if row[:2] == ("0.25", "DP-Gaussian"))
    words = " ".join(row) + reproduction.summary([part])
    assert "agrees" not in words and row[4].startswith(OTHER_BACKBONE) and row[6].startswith(OTHER_BACKBONE)
    seeds = ResultIndex(_places(NEEDS, tmp_path)).seeds("cifar10", "dp-gaussian", 0.25)
    from dpcert.paper.verdicts import acr_of

    assert acr_verdict(acr_of(seeds), acr) == "agrees"
    assert beside(1.0, 1.0) == f"{OTHER_BACKBONE}equal to the paper"


def test_the_rules_of_agreement_are_not_on_a_page_without_it(grid):
    (part,) = sections(grid, ["table1"])
    assert not any("agrees" in note for note in part.notes)
    assert "DPSGD's ACR is not always below that of non-private training" not in {one.claim.sentence for one in part.judged}


def test_cells_that_were_not_run_say_so(tmp_path):
    (part,) = sections(tmp_path, ["table1"])
    assert {row[place] for row in part.tables[0].rows for place in (4, 6, 8)} == {"not run"}


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.cifar10 and name != "prior"])
def test_every_page_names_the_other_backbone(grid, name):
    (part,) = sections(grid, [name])
    notes = " ".join(part.notes)
    assert "CrossViT-Tiny" in notes
    if name in ("ablation-learning-rate", "ablation-clip-norm"):
        assert {row[3] for row in part.tables[0].rows} == {NEEDS_CROSSVIT} == {"needs the CrossViT checkpoint"}
        assert {one.state for one in part.judged} == {"undecided"}
        return
    assert "the backbone differs from the paper's CrossViT-Tiny, so these are other models" in notes
    assert PUBLIC["sha256"] in notes and PUBLIC["data"] in notes


def test_our_run_is_not_a_line_of_the_papers_sweep(grid):
    """cifar10/dp-gaussian at sigma 0.25 exists, but it is no CrossViT with learning rate 0.001."""
    (part,) = sections(grid, ["ablation-learning-rate"])
    assert all(row[2].startswith("- / ") for row in part.tables[0].rows)


def test_every_sentence_holds_in_the_papers_world(grid):
    found = states(grid)
    quoted = "TransDenoiser is less than 40 % better than SecureSGD"
    sweeps = ("ablation-learning-rate", "ablation-clip-norm")
    for (target, sentence), state in found.items():
        expected = "does not hold" if sentence == quoted else "undecided" if target in sweeps else "holds"
        assert state == {expected}, (target, sentence)
    assert len(found) > 25


AGAINST = {
    "weak variants": (
        {name: {"mean": 0.3, "lost": 0.6} for name in VARIANTS},
        ["surpass TransDenoiser", "over 250 %", "up to 2.5 times", "significantly outperform", "larger ACR", "at 0.25 than"],
    ),
    "inaccurate stability": ({"dp-stability": {"clean": 0.5}}, ["highest clean accuracy of all variants"]),
    "uncertified stability": ({"dp-stability": {"lost": 0.3}}, ["is competitive", "perform alike"]),
    "adversarial views help": ({"dp-gaussian": {"lost": 0.3}}, ["as good as adversarial ones"]),
    "steep stability": ({"dp-stability": {"metrics": (1e4, 4.0, 0.95)}}, ["much lower Lipschitz"]),
    "baselines withstand": ({"regular": {"fgsm": (0.99, 0.95, 0.9, 0.5, 0.2)}}, ["best under FGSM", "above the baselines"]),
}


@pytest.mark.parametrize("case", AGAINST)
def test_each_sentence_can_fall(tmp_path, case):
    worlds, sentences = AGAINST[case]
    whole_grid(tmp_path, worlds=worlds, datasets=FINE_TUNED)
    found = states(tmp_path)
    for words in sentences:
        matching = [state for (_, sentence), state in found.items() if words in sentence]
        assert matching and all("does not hold" in state for state in matching), words


def test_models_that_certify_nothing_are_undecided_not_a_crash(tmp_path):
    for need in TARGETS["table1"].needs(FINE_TUNED):
        fake_run(tmp_path, need.cell, {sigma: np.zeros(100) for sigma in need.sigmas})
    found = states(tmp_path)
    assert found["figure-cifar10-comparison", "all DP-CERT variants surpass TransDenoiser"] == {"does not hold"}
    assert {state for (_, sentence), state in found.items() if "is competitive" in sentence for state in state} == {"undecided"}


@pytest.mark.parametrize(
    "name", ["figure-certified-accuracy", "figure-fgsm", "figure-metric-histograms", "figure-metrics-by-radius"]
)
def test_figures_are_files_of_their_own_that_name_the_backbone(grid, name):
    (part,) = sections(grid, [name], with_figures=True)
    assert list(part.figures) == [f"{name}-cifar10"]
    (figure,) = part.figures.values()
    assert "ours: resnet-48, not the paper's CrossViT-Tiny" in figure.get_suptitle()
    assert len(figure.legends[0].get_texts()) == 7 and not any("not run" in axes.get_title() for axes in figure.axes)


def test_the_comparison_has_quoted_points_and_our_lines(grid, tmp_path):
    (part,) = sections(grid, ["figure-cifar10-comparison"], with_figures=True)
    figure = part.figures["figure-cifar10-comparison"]
    assert len(figure.axes) == 6 and len(figure.legends[0].get_texts()) == 3 + 4
    index = ResultIndex(_places(NEEDS, grid))
    run = index.seeds("cifar10", "dp-macer", 0.25)
    (line,) = (line for line in figure.axes[1].lines if line.get_label() == "DP-MACER")
    assert figure.axes[0].get_ylim()[1] > max(max(line.get_ydata()) for line in figure.axes[0].lines)
    assert line.get_ydata()[-1] == pytest.approx(100 * (100 * run.share(0.7) / 2.74 - 1))
    (part,) = sections(tmp_path, ["figure-cifar10-comparison"], with_figures=True)
    (empty,) = part.figures.values()
    assert "DP-CERT: not run" in empty.axes[0].get_title() and len(empty.axes) == 2


def test_the_page_of_a_run_says_that_it_is_another_model(tmp_path):
    facts = read_run(fake_run(tmp_path, CELL, {0.25: radius_of(0.5, 0.25)}))
    printed = figures_of(facts, facts.main)
    assert (printed.acr, printed.certified_accuracy) == (0.246, 41.8)
    assert "the backbone differs, so these are other models" in printed.sentence and "interval" not in printed.sentence


def test_the_papers_own_model_is_compared_only_if_all_its_layers_are_trained(tmp_path):
    facts = read_run(fake_run(tmp_path, CELL, {0.25: radius_of(0.5, 0.25)}))
    text = facts.config.replace('name = "resnet-48"', 'name = "crossvit-tiny"').replace("copies = 2", "copies = 1")
    head = replace(facts, config=text)
    whole = replace(facts, config=text.replace('train = "head"\n', ""))
    assert "crossvit" in head.config and 'train = "head"' in head.config and "train = " not in whole.config
    assert figures_of(head, facts.main) is None
    printed = figures_of(whole, facts.main)
    assert printed.model is None and "our 95 % interval" in printed.sentence and "other models" not in printed.sentence


def test_skipped_rows_count_only_for_presets_that_skip(tmp_path):
    cell = Cell("mnist", "dp-gaussian")
    facts = read_run(fake_run(tmp_path, cell, {0.5: radius_of(0.5, 0.5)}))
    index = ResultIndex(_places([Need(cell, (0.5,))], tmp_path))
    for skipped in (False, True):
        index._facts[facts.path] = replace(
            facts, certified=[replace(c, figures={**c.figures, "skip_misclassified": skipped}) for c in facts.certified]
        )
        index._measured.clear()
        assert (index.certified("mnist", "dp-gaussian", 0.5) is None) is skipped


def test_cost_counts_features_once_then_head_steps_then_the_main_phase():
    config, both = CELL.config(), Cell("cifar10", "dp-gaussian", 0.25, change=(("model.train", "last:2,norms"),))
    assert (config.head.copies, config.train.epochs) == (4, 10)
    head = 5 * (50_000 + 0.001 * 100 * 50_000)
    steps = int(10 * 50_000 / 8192)
    assert CELL.cost() == pytest.approx(head)
    assert both.cost() == pytest.approx(head + steps * 8192 * 2.6 * 3)
    assert Cell("cifar10", "dpsgd").cost() < CELL.cost() < Cell("cifar10", "dp-smoothadv", 0.25).cost()


def test_times_of_small_networks_say_nothing_about_the_backbone(tmp_path):
    fake_run(tmp_path, Cell("mnist", "dpsgd"), {0.5: radius_of(0.3, 0.5)}, seconds=1e6)
    small, tuned = Piece("train", Cell("mnist", "dpsgd"), 100), Piece("train", CELL, 100)
    estimator = Estimator(tmp_path, [small.cell, CELL])
    assert estimator.seconds(small) == pytest.approx(1e6)
    assert 60 < estimator.seconds(tuned) < 4 * 3600
    estimator.note(tuned, 50.0)
    assert estimator.seconds(tuned) == pytest.approx(50.0) and estimator.seconds(small) == pytest.approx(1e6)
    assert units(Piece("certify", CELL, 500, 0.25)) == 500 * 10_100
