"""Attempts to break the promises of runs with noise inside: edited weights, configs and laws, other orders and processes."""

import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dpcert
from dpcert.errors import DpcertError, RunError
from dpcert.release.files import read_public_files
from dpcert.release.verify import FAILED, verify
from dpcert.store.durable import sha256_hex
from dpcert.store.records import InnerNoiseRow, read_rows
from dpcert.training.state import model_bytes, parse_model
from tests.conftest import blobs

ROOT = Path(__file__).parents[2]
DATA = dpcert.Dataset(**blobs(0, train=48, test=12, size=16), classes=3, size=48, name="blobs")
KEYS = {"epochs": 1, "batch_size": 12, "learning_rate": 0.1}
METHOD = dpcert.method("securesgd", sigma=0.25, copies=1)


def build(**keys):
    return dpcert.build_model("cnn", input_shape=(1, 16, 16), classes=3, seed=0, system="securesgd", **keys)


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    dpcert.train(build(noise=0.25, noise_weights="charged"), DATA, METHOD, out=out, **KEYS)
    opened = dpcert.open_run(out, data=DATA)
    opened.certify(6, n=200, seed=1)
    return out


@pytest.fixture
def copied(certified, tmp_path):
    return shutil.copytree(certified, tmp_path / "copy")


def failures(run):
    return [check.name for check in verify(read_public_files(run)) if check.outcome == FAILED]


def rewrite_model(run, change):
    """Change the tensors of the model file, with a right content digest."""
    file = run / "model.safetensors"
    tensors, facts = parse_model(file.read_bytes(), "model")
    change(tensors)
    holder = torch.nn.Module()
    holder.state_dict = lambda: tensors
    facts.pop("content_sha256", None)
    file.write_bytes(model_bytes(holder, facts))


def other_weights(tensors):
    tensors["scales"] = tensors["scales"].flip(0)


def louder_noise(tensors):
    tensors["scales"] = 2.0 * tensors["scales"]


def test_the_run_is_as_it_should_be(copied):
    assert failures(copied) == []


@pytest.mark.parametrize("change", [other_weights, louder_noise])
def test_noise_weights_that_were_edited_do_not_pass(copied, change):
    rewrite_model(copied, change)
    before = {file.name: file.read_bytes() for file in copied.glob("certificates-*.tsv")}
    assert any("belongs to the model" in name for name in failures(copied))
    with suppress(DpcertError):  # certifies the edited model under its own law, or refuses
        dpcert.open_run(copied, data=DATA).certify(12, n=200, seed=1)
    assert all((copied / name).read_bytes() == rows for name, rows in before.items()) and failures(copied)


@pytest.mark.parametrize(
    ("old", "new"),
    [('system = "securesgd"', 'system = "stobatch"'), ('"charged"', '"initialization"'), ("noise = 0.25", "noise = 0.5")],
)
def test_a_config_with_another_noise_site_is_not_that_of_the_run(copied, old, new):
    config = copied / "config.toml"
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new))
    assert failures(copied)
    with pytest.raises(RunError, match=r"config\.toml"):
        dpcert.open_run(copied, data=DATA)


def test_a_config_that_hides_the_release_contradicts_the_ledger(copied):
    """Even with the digest of the edited config in the header of the model."""
    config = copied / "config.toml"
    config.write_text(config.read_text().replace('"charged"', '"initialization"'))
    rewrite_model_facts(copied, config.read_bytes())
    assert "ledger against config" in failures(copied)


def rewrite_model_facts(run, config):
    file = run / "model.safetensors"
    tensors, facts = parse_model(file.read_bytes(), "model")
    facts.pop("content_sha256", None)
    holder = torch.nn.Module()
    holder.state_dict = lambda: tensors
    file.write_bytes(model_bytes(holder, {**facts, "config_sha256": sha256_hex(config)}))


def timeless(file):
    return [replace(row, time=0.0) for row in read_rows(InnerNoiseRow, file)]


CERTIFY = """
import sys, dpcert
from tests.runs.test_prior_attacks import DATA
dpcert.open_run(sys.argv[1], data=DATA).certify(12, n=200, seed=1)
"""


def test_certification_resumes_in_another_process_to_the_rows_of_one(copied, certified, tmp_path):
    whole = shutil.copytree(certified, tmp_path / "whole")
    for file in whole.glob("certificates-*"):
        file.unlink()
    done = subprocess.run([sys.executable, "-c", CERTIFY, str(copied)], check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    dpcert.open_run(whole, data=DATA).certify(12, n=200, seed=1)
    (resumed,), (once,) = copied.glob("certificates-*.tsv"), whole.glob("certificates-*.tsv")
    assert timeless(resumed) == timeless(once) and failures(copied) == failures(whole) == []


def test_certification_does_not_resume_under_another_law(copied):
    """Noise on the image instead of the noise inside is another file, with a law of its own."""
    before = {file.name: file.read_bytes() for file in copied.glob("certificates-*.tsv")}
    try:
        dpcert.open_run(copied, data=DATA).certify(6, sigma=0.25, n=200, seed=1)
    except DpcertError as error:
        assert "\n" not in str(error)
    assert before.items() <= {file.name: file.read_bytes() for file in copied.glob("certificates-*.tsv")}.items()
    assert failures(copied) == []


def test_a_list_of_public_weights_is_stored_with_the_run(tmp_path):
    r = [0.5 / 16] * 8 + [1.5 / 16] * 8
    run = dpcert.train(build(noise=0.25, noise_weights=r), DATA, METHOD, out=tmp_path / "run", **KEYS)
    opened = dpcert.open_run(tmp_path / "run", data=DATA)
    assert torch.equal(opened.model.scales, run.model.scales)
    assert failures(tmp_path / "run") == []


def test_the_config_states_the_noise_that_the_model_has(tmp_path):
    """The default of a model is 0.5 whatever the sigma of the views."""
    dpcert.train(build(), DATA, METHOD, out=tmp_path / "run", **KEYS)
    opened = dpcert.open_run(tmp_path / "run", data=DATA)
    stated = opened.config.model_spec().noise
    assert float(opened.model.scales.square().mean().sqrt()) == pytest.approx(stated, rel=1e-5)


def test_a_charged_model_trained_further_is_charged_for_both_trainings(certified):
    opened = dpcert.open_run(certified, data=DATA)
    with pytest.warns(dpcert.errors.DpcertWarning, match="already been trained"):
        again = dpcert.train(opened.model, DATA, METHOD, **KEYS)
    assert [release.sampling_probability for release in again.statement.releases][:2] == [1.0, 0.25]
    assert again.epsilon > 3.0
