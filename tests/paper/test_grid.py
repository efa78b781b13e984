"""The grid: names say what a run is, targets are rows, wrong words get one clear line."""

import re

import pytest

from dpcert.errors import ConfigError
from dpcert.paper.grid import DATASETS, REPLACED, TARGETS, Cell, Need, datasets_of, in_order, needs_of, targets_of
from dpcert.paper.published import COMPARED, SIGMAS
from dpcert.runs.resolve import resolve

CELLS = [need.cell for need in needs_of(list(TARGETS.values()), DATASETS)]


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        (Cell("mnist", "dp-gaussian"), "mnist-dp-gaussian"),
        (Cell("mnist", "dp-gaussian", 0.25), "mnist-dp-gaussian-sigma0.25"),
        (Cell("fashion-mnist", "dp-gaussian", 1.0, 2), "fashion-mnist-dp-gaussian-sigma1.00-seed2"),
        (Cell("mnist", "dpsgd", 0.25, 1), "mnist-dpsgd-seed1"),
        (Cell("mnist", "dp-gaussian", change=(("method.copies", 4),)), "mnist-dp-gaussian-copies4"),
        (Cell("mnist", "dp-gaussian", change=REPLACED), "mnist-dp-gaussian-copies1-replaced"),
        (
            Cell("mnist", "dp-gaussian", 0.25, change=(("privacy.clip_norm", 0.01),)),
            "mnist-dp-gaussian-sigma0.25-clip_norm0.01",
        ),
        (
            Cell("mnist", "dp-gaussian", 0.25, change=(("train.learning_rate", 1.0),)),
            "mnist-dp-gaussian-sigma0.25-learning_rate1",
        ),
    ],
)
def test_names(cell, name):
    assert cell.name == name


def _cell_of(config):
    """A cell found again from its resolved config: the oracle of the round trip."""
    preset = resolve(f"{config.data.name}/{config.method.name}", {"method.sigma": config.method.sigma})
    change = ()
    for key in ("method.copies", "method.keep_original", "train.learning_rate", "privacy.clip_norm"):
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value != getattr(getattr(preset, section), name):
            change += ((key, value),)
    return Cell(config.data.name, config.method.name, config.method.sigma, config.train.seed, change)


def test_names_and_configs_go_round():
    assert len({cell.name for cell in CELLS}) == len(set(CELLS)) == len(CELLS)
    assert [_cell_of(cell.config()).name for cell in CELLS] == [cell.name for cell in CELLS]


def test_options_of_train_give_the_same_config():
    from dpcert.cli._options import assignments

    for cell in CELLS:
        words = cell.options()
        sets = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
        sigma, seed = float(words[words.index("--sigma") + 1]), int(words[words.index("--seed") + 1])
        chosen = assignments(sets, sigma=sigma, epsilon=None, delta=None, seed=seed, device=None)
        found, asked = resolve(words[0], chosen).model_dump(), cell.config().model_dump()
        assert found | {"certify": None} == asked | {"certify": None}


def test_table_1_is_the_papers():
    needs = TARGETS["table1"].needs(DATASETS)
    assert len(needs) == 2 * (3 * 3 + 4 * 3 + 2)
    for need in needs:
        assert need.sigmas == (SIGMAS if need.cell.method in ("regular", "dpsgd", "psac") else (need.cell.sigma,))
    seeds = {(n.cell.dataset, n.cell.method) for n in needs if n.cell.seed == 2}
    assert seeds == {(d, m) for d in DATASETS for m in ("regular", "dpsgd", "psac", "dp-gaussian")}


def test_ablations_are_the_papers():
    from dpcert.paper.published import CLIP_NORM, LEARNING_RATE

    for target, table, key in (
        ("ablation-learning-rate", LEARNING_RATE, "train"),
        ("ablation-clip-norm", CLIP_NORM, "privacy"),
    ):
        name = {"train": "learning_rate", "privacy": "clip_norm"}[key]
        found = {(n.cell.dataset, getattr(getattr(n.cell.config(), key), name)) for n in TARGETS[target].needs()}
        assert found == {place for place in table if place[0] in DATASETS}
    copies = {n.cell.config().build_method().views.count for n in TARGETS["ablation-augmentations"].needs(["mnist"])}
    assert copies == {1, 3, 5, 7, 9}


def test_needs_of_several_targets_are_joined():
    needs = needs_of(targets_of(["figure-radii", "figure-fgsm", "table1"]), ["mnist"])
    assert len({need.cell for need in needs}) == len(needs)
    dpsgd = next(need for need in needs if need.cell == Cell("mnist", "dpsgd"))
    assert dpsgd == Need(Cell("mnist", "dpsgd"), SIGMAS, False, ("fgsm",))


def _said(need):
    """A part of work as one would say it."""
    parts = [*(["certify"] if need.sigmas else []), *(["analyze"] if need.samples else []), *need.attacks]
    return f"{need.cell.name}: {', '.join(parts) or 'train'}"


def test_all_is_worked_through_in_the_order_of_the_issue():
    parts = [_said(need) for need in in_order(targets_of(["all"]), DATASETS)]
    both, three = ("mnist", "fashion-mnist"), ("-sigma0.25", "", "-sigma1.00")
    first = [f"{d}-{run}" for d in both for run in ("dpsgd", *(f"dp-gaussian{s}" for s in three))]
    then = [f"{d}-{run}" for d in both for run in ("regular", "psac")]
    seeds = [f"{d}-{m}-seed{k}" for d in both for m in ("regular", "dpsgd", "psac", "dp-gaussian") for k in (1, 2)]
    rest = [f"{d}-{m}{s}" for d in both for m in ("dp-smoothadv", "dp-stability", "dp-macer") for s in three]
    copies = [f"dp-gaussian-copies{k}" for k in ("1-replaced", "4", "6", "8")]
    psac = [f"{base}+{part}" for base in ("dp-gaussian", "dp-smoothadv") for part in ("psac", "consistency")]
    table = [f"{name}: certify" for name in (*first, *then, *seeds, *rest)]
    ablations = [f"fashion-mnist-{name}: certify" for name in (*copies, *psac)]
    assert parts[: len(table)] == table
    parts = parts[len(table) :]
    assert parts[: len(ablations)] == ablations
    parts = parts[len(ablations) :]
    assert set(parts[:7]) == {f"mnist-{name}: analyze" for name in COMPARED}
    cells = 2 * (3 + 4 * 3)
    assert all(part.endswith(": fgsm") and "seed" not in part for part in parts[7 : 7 + cells])
    left = parts[7 + cells :]
    assert {f"mnist-{name}: certify" for name in (*copies, *psac)} < set(left)
    assert all("learning_rate" in part or "clip_norm" in part for part in left if not part.endswith(": certify"))


def test_parts_of_work_are_what_is_needed_each_thing_once():
    targets = targets_of(["all"])
    parts, joined = in_order(targets, DATASETS), {}
    for part in parts:
        old = joined.get(part.cell, Need(part.cell))
        assert (
            not set(old.sigmas) & set(part.sigmas)
            and not (old.samples and part.samples)
            and not set(old.attacks) & set(part.attacks)
        )
        joined[part.cell] = Need(
            part.cell, tuple(sorted((*old.sigmas, *part.sigmas))), old.samples or part.samples, old.attacks + part.attacks
        )
    assert joined == {need.cell: need for need in needs_of(targets, DATASETS)}


def test_all_leaves_the_larger_grids_and_other_data_sets_out():
    names = [target.name for target in targets_of(["all"])]
    assert "table1" in names and not any(name.endswith("-full") for name in names)
    fashion = [target.name for target in targets_of(["all"], ["fashion-mnist"])]
    assert "figure-radii" not in fashion and "figure-fgsm" in fashion


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: targets_of(["tabel1"]), "target 'tabel1' is unknown; did you mean table1?.*figure-fgsm, .*all"),
        (lambda: targets_of(["zzz"]), "target 'zzz' is unknown; choose one of: table1"),
        (
            lambda: targets_of(["figure-radii"], ["fashion-mnist"]),
            "figure-radii is about mnist, --dataset is fashion-mnist; leave",
        ),
        (lambda: targets_of(["figure-cifar10-comparison"], ["mnist"]), "is about cifar10, --dataset is mnist; leave"),
        (lambda: datasets_of(["cifar-10"]), "data set 'cifar-10' is unknown; did you mean cifar10?"),
        (lambda: datasets_of(["svhn"]), "data set 'svhn' is unknown; choose one of: mnist, fashion-mnist, cifar10"),
    ],
)
def test_wrong_words(call, words):
    with pytest.raises(ConfigError) as error:
        call()
    assert re.search(words, str(error.value)) and "\n" not in str(error.value)


def test_cost_grows_with_views():
    one, three, nine = (Cell("mnist", "dp-gaussian", change=change) for change in (REPLACED, (), (("method.copies", 8),)))
    assert one.cost() * 9 == pytest.approx(three.cost() * 3) == pytest.approx(nine.cost())
    assert Cell("mnist", "dpsgd").cost() < three.cost()
