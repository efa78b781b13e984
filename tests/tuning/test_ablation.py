"""The ablation of a best preset: each variant lacks one ingredient, and the table comes from rows."""

import json
from pathlib import Path

import pytest
from scripts import ablation

from dpcert.runs.config import differences
from dpcert.runs.presets import WITH_BEST
from dpcert.runs.resolve import resolve
from dpcert.store.durable import write_checked_json

STORED = Path(__file__).parents[1] / "stored_runs" / "mnist-dp-gaussian"


@pytest.mark.parametrize("dataset", WITH_BEST)
def test_each_variant_lacks_one_ingredient_and_can_be_built(dataset, tmp_path):
    found = ablation.variants(dataset)
    best = found.pop(ablation.WHOLE)
    assert best == resolve(f"{dataset}/best", {}) and len(found) >= 2
    for name, config in found.items():
        sections = {change.split(".")[0] for change in differences(best, config)}
        assert len(sections) == 1 and config.build_method() and config.model_spec(), name
    lines = ablation.commands(dataset, tmp_path, seeds=(0, 1))
    assert len(lines) == 2 * (len(found) + 1) and all(line.startswith("dpcert run ") for line in lines)
    assert all(resolve(str(file), {}) in (best, *found.values()) for file in tmp_path.glob("*.toml"))


def test_the_table_comes_from_rows(tmp_path):
    for name, acr in (("best-seed0", 1.2), ("best-seed1", 1.3), ("without-model-seed0", 1.0)):
        folder = tmp_path / f"mnist-{name}"
        folder.mkdir()
        metrics = json.loads((STORED / "metrics.json").read_text())
        entry = next(entry for entry in metrics["certification"] if entry["sigma"] == 0.5)
        entry["acr"] = acr
        write_checked_json(folder / "metrics.json", metrics)
    lines = ablation.table("mnist", tmp_path)
    assert lines[2].startswith("| best | 1.250 | 1.200 to 1.300 |") and "| 2 |" in lines[2]
    assert "| without-model | 1.000 | 1.000 to 1.000 | -20.0 % |" in lines[3]
    assert "| without-smoothadv | not run |" in "\n".join(lines)


def test_a_shorter_ablation_trains_everything_for_the_same_time(tmp_path):
    whole, short = ablation.variants("mnist"), ablation.variants("mnist", epochs=10)
    assert set(whole) - set(short) == {"without-epochs"} and {config.train.epochs for config in short.values()} == {10}
    ablation.commands("mnist", tmp_path, epochs=10)
    assert resolve(str(tmp_path / "mnist-best.toml"), {}) == short[ablation.WHOLE]
