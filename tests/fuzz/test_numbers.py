"""Every numeric option with huge, tiny, zero, negative and no numbers: an answer, or one line and exit code 2; never a traceback."""

import numpy as np
import pytest

from dpcert.cli import main
from tests.conftest import blobs

NUMBERS = ("0", "-1", "nan", "inf", "-inf", "1e-300", "1e300", "999999999999999999999", "1e-9", "-0.0", "0x10", "")
SMALL = ("model.name=linear", "train.batch_size=10", "train.epochs=0.1", "data.classes=3")
KEYS = (
    "data.size", "data.classes", "data.validation", "method.sigma", "method.copies", "train.epochs", "train.batch_size",
    "train.learning_rate", "train.momentum", "train.seed", "train.physical_batch", "train.threads", "privacy.epsilon",
    "privacy.delta", "privacy.clip_norm", "privacy.noise_seed", "privacy.noise_weights_budget",
    "privacy.noise_weights_clip", "certify.sigma", "certify.n0", "certify.n", "certify.alpha", "certify.examples",
    "certify.seed",
)  # fmt: skip
OPTIONS = {
    "account": ("--epsilon", "--noise-multiplier", "--delta", "--size", "--batch-size", "--epochs", "--steps"),
    "certify": ("--sigma", "--n0", "--n", "--alpha", "--examples", "--seed", "--radius"),
    "predict": ("--sigma", "--n", "--alpha"),
    "audit": (
        "--runs", "--draws", "--noise-multiplier", "--canaries", "--epsilon", "--steps", "--sampling-probability",
        "--confidence", "--delta", "--sigma", "--seed",
    ),
}  # fmt: skip
CASES = [(command, option) for command, options in OPTIONS.items() for option in options]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    np.savez(folder / "blobs.npz", **blobs(0))
    np.save(folder / "image.npy", blobs(0)["x_test"][0])
    sets = [word for pair in SMALL for word in ("--set", pair)]
    assert (
        code_of(["train", "mnist/dpsgd", "--set", f"data.path={folder / 'blobs.npz'}", *sets, "--out", str(folder / "run")])
        == 0
    )
    return folder


def code_of(arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return stop.value.code


def base(command, option, place):
    """A small request, to which one option with an odd number is added."""
    run = str(place / "run")
    if command == "account":
        return ["account", *([] if option in ("--epsilon", "--noise-multiplier") else ["--noise-multiplier", "5"])]
    if command == "certify":
        return ["certify", run, "--n", "50", "--examples", "2"]
    if command == "predict":
        return ["predict", run, str(place / "image.npy"), "--n", "50"]
    kind = {"--runs": [], "--draws": [], "--noise-multiplier": ["--draws", "100"]}
    return ["audit", "dpsgd", *kind.get(option, ["--one-run", "--canaries", "20"])]


def complaint(arguments, capsys):
    capsys.readouterr()
    code = code_of(arguments)
    err = capsys.readouterr().err.strip()
    if code == 0:
        return None
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    one_line = code == 2 and len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) < 600
    return None if one_line else f"{' '.join(arguments)}: exit {code}: {err[-300:]}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("command", "option"), CASES, ids=lambda word: word.strip("-"))
def test_an_odd_number_is_answered_or_refused_in_one_line(command, option, place, capsys):
    found = [complaint([*base(command, option, place), f"{option}={number}"], capsys) for number in NUMBERS]
    assert not [words for words in found if words]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["sample", "all"])
@pytest.mark.parametrize("key", KEYS)
def test_an_odd_number_in_a_config_is_answered_or_refused_in_one_line(key, every, place, capsys, tmp_path):
    """The sample takes other numbers for each key, so that all of them are tried with some."""
    sets = [word for pair in (*SMALL, f"data.path={place / 'blobs.npz'}") for word in ("--set", pair)]
    found = []
    for place_, number in enumerate(NUMBERS[KEYS.index(key) % every :: every]):
        request = ["train", "mnist/dp-gaussian", *sets, "--set", f"{key}={number}", "--out", str(tmp_path / str(place_))]
        found.append(complaint(request, capsys))
    assert not [words for words in found if words]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "words",
    [
        "account --epsilon 3 --epochs 1e9",
        "account --epsilon 3 --noise-multiplier 9999",
        "account --noise-multiplier 9999 --epochs 1e9",
        "account --noise-multiplier 1e-300",
        "account --epsilon 3 --size 1000000000000000000 --batch-size 1 --steps 5",
        "account --epsilon 1e-9 --steps 1",
        "report {run} --html /",
        "report {run} --html {run}",
        "report {run} --html .",
        "report {run} --html ''",
        "report {run} --markdown /",
        "report {run} --figures /dev/null",
        "export {run} /",
        "export {run} {run}",
        "train --out /dev/null",
    ],
)
def test_known_traps(words, place, capsys):
    arguments = [word.strip("'").format(run=place / "run") for word in words.split()]
    assert complaint(arguments, capsys) is None
