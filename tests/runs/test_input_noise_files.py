"""Noise on the image alone: files have the names, columns and keys of the time before other smoothing laws existed.

The references are results of this repository that were written before. Only what no processor changes is compared.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from dpcert.store.metrics import read_metrics
from tests.conftest import blobs
from tests.release.conftest import call, settings

BEFORE = Path(__file__).parents[2] / "results" / "mnist-dp-gaussian"
FILE = "certificates-sigma0.50"
OTHERWISE = {"size", "stride"}  # how images are chosen, which changed before and for another reason
SMALL = ["train.batch_size=20", "train.epochs=2", "data.classes=3", "certify.n=200", "model.name=linear"]


def trained(folder, name):
    np.savez(folder / "blobs.npz", **blobs(0))
    options = settings(f"data.path={folder / 'blobs.npz'}", *SMALL)
    assert call("run", "mnist/dp-gaussian", *options, "--examples", 8, "--seed", 1, "--out", folder / name) == 0
    return folder / name


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("input"), "run")


def header(folder):
    return (folder / f"{FILE}.tsv").read_bytes().splitlines()[0]


def test_files_have_the_names_and_columns_of_before(run):
    assert [path.name for path in sorted(run.glob("certificates*"))] == [f"{FILE}.json", f"{FILE}.tsv"]
    assert header(run) == header(BEFORE) and b"votes" not in header(run) and b"pixeldp" not in header(run)


def keys(facts):
    return [key for key in facts if key not in OTHERWISE]


def test_no_key_says_where_the_noise_is(run):
    sidecar, (entry,) = json.loads((run / f"{FILE}.json").read_text()), read_metrics(run / "metrics.json")["certification"]
    (before,) = (one for one in read_metrics(BEFORE / "metrics.json")["certification"] if one["sigma"] == 0.5)
    assert not {"smoothing", "pixeldp"} & {*entry, *sidecar}
    assert keys(entry) == keys(before)
    assert keys(sidecar) == keys(json.loads((BEFORE / f"{FILE}.json").read_text()))
