"""The command line: what it prints, and one clear line for every wrong request."""

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from dpcert.cli import main
from tests.conftest import blobs

SMALL = [
    "--set",
    "model.name=linear",
    "--set",
    "train.batch_size=10",
    "--set",
    "train.epochs=3",
    "--set",
    "data.classes=3",
    "--set",
    "certify.n=200",
    "--examples",
    "10",
    "--seed",
    "1",
]


def call(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    np.savez(folder / "blobs.npz", **blobs(0))
    out = folder / "run"
    assert call("run", "mnist/dp-gaussian", "--set", f"data.path={folder / 'blobs.npz'}", *SMALL, "--out", str(out)) == 0
    return out


@pytest.fixture
def finished(made, tmp_path_factory):
    """The run as it was made: a test that changes it changes it for itself only."""
    kept = tmp_path_factory.mktemp("kept") / "run"
    shutil.copytree(made, kept)
    yield made
    shutil.rmtree(made)
    shutil.copytree(kept, made)


def same_request(finished, *changes):
    path = finished.parent / "blobs.npz"
    return ["run", "mnist/dp-gaussian", "--set", f"data.path={path}", *SMALL, *changes, "--out", str(finished)]


def test_run_leaves_what_the_contract_names(finished):
    names = {"config.toml", "model.safetensors", "ledger.jsonl", "metrics.json", "certificates-sigma0.50.tsv", "report.html"}
    assert names <= {path.name for path in finished.iterdir()}
    metrics = json.loads((finished / "metrics.json").read_text())
    assert metrics["dataset"] == "blobs" and metrics["method"] == "dp-gaussian" and metrics["sigma_train"] == 0.5
    assert metrics["privacy"]["relation"] == "add-or-remove-one" and metrics["privacy"]["accountant"] == "pld"
    assert 0 < metrics["privacy"]["epsilon"] <= 3.0 and 0 <= metrics["clean_accuracy"] <= 1
    entry = metrics["certification"][0]
    assert entry["examples"] == 10 and entry["n"] == 200 and "0.25" in entry["certified_accuracy"] and "abstained" in entry
    header = (finished / "certificates-sigma0.50.tsv").read_text().splitlines()[0]
    assert header.startswith("idx\tlabel\tpredict\tradius\tcorrect\ttime\t")
    assert (finished / "private").stat().st_mode & 0o777 == 0o700 and not list((finished / "private").iterdir())


def test_the_models_header_names_what_it_is(finished):
    from safetensors import safe_open

    with safe_open(finished / "model.safetensors", framework="pt") as file:
        facts = file.metadata()
    assert facts["method"] == "dp-gaussian" and facts["dataset"] == "blobs" and float(facts["epsilon"]) <= 3.0
    assert facts["delta"] == "1e-05" and len(facts["config_sha256"]) == 64


def test_again_changes_nothing(finished, capsys):
    def snapshot():
        return {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()}

    before = snapshot()
    assert call(*same_request(finished)) == 0
    assert snapshot() == before
    assert "epsilon = " in capsys.readouterr().out


def test_more_examples_extend(finished):
    rows = (finished / "certificates-sigma0.50.tsv").read_text().splitlines()
    assert call("certify", str(finished), "--n", "200", "--examples", "20") == 0
    assert set(rows) <= set((finished / "certificates-sigma0.50.tsv").read_text().splitlines())
    assert json.loads((finished / "metrics.json").read_text())["certification"][0]["examples"] == 20


def test_certification_settings_have_their_own_file_and_leave_the_ledger(finished):
    ledger = (finished / "ledger.jsonl").read_bytes()
    assert call("certify", str(finished), "--n", "100", "--alpha", "0.01", "--examples", "5") == 0
    assert call("certify", str(finished), "--sigma", "0.25", "--n", "100", "--examples", "5") == 0
    assert (finished / "certificates-sigma0.50-n100-alpha0.01.tsv").exists() and (
        finished / "certificates-sigma0.25.tsv"
    ).exists()
    assert (finished / "ledger.jsonl").read_bytes() == ledger
    assert len(json.loads((finished / "metrics.json").read_text())["certification"]) >= 3


def test_robust_at_a_radius(finished, capsys):
    ledger = (finished / "ledger.jsonl").read_bytes()
    assert call("certify", str(finished), "--radius", "0.1", "--n", "5000", "--examples", "10") == 0
    out = capsys.readouterr().out
    assert "% of CERTIFY's 51000" in out and (finished / "robust-sigma0.50-r0.1.tsv").exists()
    assert call("certify", str(finished), "--fresh-noise", "--n", "200", "--examples", "5") == 0
    assert (finished / "certificates-sigma0.50-fresh.tsv").exists()
    assert (finished / "ledger.jsonl").read_bytes() == ledger


def test_report_of_several_runs(finished, tmp_path, capsys):
    page = tmp_path / "page.html"
    table = tmp_path / "table.md"
    out = ["--html", str(page), "--figures", str(tmp_path / "f"), "--markdown", str(table)]
    assert call("report", str(finished), str(finished), *out) == 0
    assert table.read_text().startswith("| run | sigma |") and table.read_text().count("dp-gaussian on blobs") >= 2
    text = page.read_text()
    assert "<svg" in text and not re.findall(r"(?:src|href)=.http", text)
    assert (tmp_path / "f" / "certified_accuracy.png").stat().st_size > 1000
    assert "dp-gaussian on blobs" in capsys.readouterr().out


def test_predict_ones_own_files(finished, tmp_path, capsys):
    image = (blobs(0)["x_test"][0] * 255).clip(0, 255).astype(np.uint8)
    Image.fromarray(image).save(tmp_path / "a.png")
    np.save(tmp_path / "b.npy", blobs(0)["x_test"][:2, None])
    assert call("predict", str(finished), str(tmp_path / "a.png"), str(tmp_path / "b.npy"), "--n", "200") == 0
    out = capsys.readouterr().out
    assert "a.png" in out and "b.npy[1]" in out


def test_lists(capsys):
    for command, word in (
        (["methods"], "dp-smoothadv+consistency"),
        (["methods"], "cost"),
        (["presets"], "fashion-mnist/psac"),
        (["data", "list"], "cifar10"),
        (["data", "verify", "mnist"], "60000 training"),
        (["--version"], "dpcert 0"),
    ):
        assert call(*command) == 0
        assert word in capsys.readouterr().out


def test_account(capsys):
    for arguments, word in (
        (["--epsilon", "3", "--steps", "100"], "noise multiplier"),
        (["--noise-multiplier", "1.07"], "4687 steps: epsilon = 2.99"),
        (["--noise-multiplier", "1.07"], "At 1 % false alarms, no attack detects a training record more than 5.1"),
        (["--noise-multiplier", "2", "--epsilon", "1", "--size", "1000", "--batch-size", "20"], "steps ("),
    ):
        assert call("account", *arguments) == 0
        assert word in capsys.readouterr().out


def test_set_is_the_last_word():
    from dpcert.cli._options import assignments

    options = {"sigma": 0.25, "epsilon": 1.0, "delta": 1e-6, "seed": 3, "device": "cuda", "examples": "10"}
    keys = (
        "method.sigma",
        "privacy.epsilon",
        "privacy.delta",
        "train.seed",
        "certify.seed",
        "train.device",
        "certify.examples",
    )
    given = assignments(None, **options)
    assert [given[key] for key in keys] == [0.25, 1.0, 1e-6, 3, 3, "cuda", 10]
    assert assignments([f"{key}=7" for key in keys], **options) == dict.fromkeys(keys, 7)


def test_audit(capsys):
    assert call("audit", "dpsgd", "--draws", "200", "--seed", "0") == 0
    out = capsys.readouterr().out
    assert "holds" in out and "4.377" in out and "2 x 200 draws" in out


def test_odd_but_allowed_is_one_warning(tmp_path, capsys):
    np.savez(tmp_path / "blobs.npz", **blobs(0))
    own = ["--set", f"data.path={tmp_path / 'blobs.npz'}", *SMALL, "--out", str(tmp_path / "run")]
    assert call("train", "mnist/dp-gaussian+consistency", "--set", "method.copies=1", *own) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1 and "always 0" in warnings[0]


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["run"],
        ["train"],
        ["certify"],
        ["predict"],
        ["attack"],
        ["analyze"],
        ["report"],
        ["account"],
        ["audit"],
        ["methods"],
        ["presets"],
        ["data"],
        ["data", "fetch"],
        ["data", "verify"],
        ["data", "list"],
    ],
)
def test_help_teaches(command, capsys):
    assert call(*command, "--help") == 0
    out = capsys.readouterr().out
    assert "Usage" in out and (command in ([], ["data"]) or "Example" in out)


def test_every_wrong_request_gets_one_line_and_loses_nothing(finished, tmp_path, capsys):
    npz = finished.parent / "blobs.npz"
    own = ["--set", f"data.path={npz}"]
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "bad.toml").write_text("[train\n")
    (tmp_path / "unknown.toml").write_text("[train]\nepoch = 3\n")
    np.savez(tmp_path / "labels.npz", **(blobs(0) | {"y_train": np.full(240, 7)}))
    np.savez(tmp_path / "pixels.npz", **(blobs(0) | {"x_train": np.full((240, 8, 8), 2.0, np.float32)}))
    (tmp_path / "cut.npz").write_bytes(npz.read_bytes()[:500])
    np.save(tmp_path / "ok.npy", np.zeros((8, 8), np.float32))
    np.save(tmp_path / "big.npy", np.zeros((9, 9), np.float32))
    out = ["--out", str(tmp_path / "new")]
    requests = {
        "unknown preset": (["train", "mnist/magic"], "mnist/magic"),
        "unknown key": (["train", "--set", "train.epoch=1", *out], "train.epoch"),
        "unknown key in a file": (["train", str(tmp_path / "unknown.toml"), *out], "train.epoch"),
        "not TOML": (["train", str(tmp_path / "bad.toml"), *out], "bad.toml"),
        "no such file": (["train", str(tmp_path / "absent.toml"), *out], "absent.toml"),
        "ill-typed": (["train", "--set", "train.epochs=many", *out], "many"),
        "epsilon": (["train", "--epsilon", "0", *out], "epsilon"),
        "epsilon not a number": (["train", "--epsilon", "three", *out], "three"),
        "delta": (["train", "--delta", "1.5", *out], "1.5"),
        "budget": (
            ["train", *own, "--set", "model.name=linear", "--epsilon", "1e-9", "--set", "train.batch_size=240", *out],
            "noise multiplier",
        ),
        "wrong option": (["train", "--epsilom", "3"], "--epsilom"),
        "wrong command": (["trian"], "trian"),
        "missing argument": (["certify"], "RUN"),
        "negative seed": (["train", "--seed", "-1", *out], "-1"),
        "shape": (["train", *own, *out], "16 x 16"),
        "labels": (["train", "--set", f"data.path={tmp_path / 'labels.npz'}", "--set", "data.classes=3", *out], "label 7"),
        "pixels": (["train", "--set", f"data.path={tmp_path / 'pixels.npz'}", *out], "[0, 1]"),
        "cut data": (["train", "--set", f"data.path={tmp_path / 'cut.npz'}", *out], "cut.npz"),
        "no data": (["train", "--set", "data.path=/nowhere.npz", *out], "/nowhere.npz"),
        "device": (
            ["train", "--device", "cuda:9", *own, "--set", "model.name=linear", "--set", "train.batch_size=10", *out],
            "cuda:9",
        ),
        "another request": (same_request(finished, "--epsilon", "5"), "3.0 -> 5.0"),
        "another seed": (["certify", str(finished), "--n", "200", "--seed", "99"], "99"),
        "not a run": (["certify", str(tmp_path)], "config.toml"),
        "no run": (["report", str(tmp_path / "absent")], "absent"),
        "too many examples": (["certify", str(finished), "--examples", "100000"], "100000"),
        "no examples": (["certify", str(finished), "--examples", "0"], "'0'"),
        "sigma": (["certify", str(finished), "--sigma", "-1"], "-1"),
        "alpha": (["certify", str(finished), "--alpha", "2"], "2.0"),
        "radius beyond reach": (["certify", str(finished), "--radius", "9"], "9.0"),
        "device of certify": (["certify", str(finished), "--device", "cuda:9"], "cuda:9"),
        "device that is none": (["predict", str(finished), str(tmp_path / "ok.npy"), "--device", "toaster"], "toaster"),
        "huge seed": (["train", "--seed", "100000000000000000000", *out], "100000000000000000000"),
        "endless epochs": (["account", "--epsilon", "3", "--epochs", "inf"], "inf"),
        "examples checked before training": (["train", *own, "--set", "model.name=linear", "--examples", "5000", *out], "5000"),
        "radius": (["certify", str(finished), "--radius", "0"], "radius is 0.0"),
        "no validation split": (["certify", str(finished), "--split", "validation"], "validation"),
        "not an image": (["predict", str(finished), str(tmp_path / "text.png")], "text.png"),
        "image of another size": (["predict", str(finished), str(tmp_path / "big.npy")], "the model takes 8 x 8"),
        "no image": (["predict", str(finished), str(tmp_path / "absent.png")], "absent.png"),
        "nothing to account": (["account"], "--epsilon"),
        "batch larger than data": (["account", "--epsilon", "3", "--size", "10"], "512"),
        "unwritable": (
            ["train", *own, "--set", "model.name=linear", "--set", "train.batch_size=10", "--out", "/proc/nothing/here"],
            "/proc/nothing",
        ),
        "fewer than no copies": (["train", "--set", "method.copies=-1", *out], "method.copies"),
        "no copies": (["train", "--set", "method.copies=0", *out], "at least one noisy copy"),
        "attack without copies": (["train", "mnist/dp-smoothadv", "--set", "method.copies=0", *out], "at least one noisy copy"),
        "no view at all": (
            ["train", "--set", "method.copies=0", "--set", "method.keep_original=false", *out],
            "at least one noisy copy",
        ),
        "regulariser without noisy views": (
            ["train", "mnist/dpsgd", "--set", "method.regulariser=consistency", *out],
            "needs noisy copies",
        ),
        "stability without the original": (
            ["train", "mnist/dp-stability", "--set", "method.keep_original=false", *out],
            "keep",
        ),
        "negative weight": (["train", "mnist/dp-stability", "--set", "method.stability_gamma=-1", *out], "stability_gamma"),
        "radius of the attack": (
            ["train", "mnist/dp-smoothadv", "--set", "method.smoothadv_radius=0", *out],
            "smoothadv_radius",
        ),
        "setting of another part": (["train", "--set", "method.macer_beta=2", *out], "macer_beta"),
        "audit of nothing": (["audit", "regular"], "does not clip"),
        "audit of the unknown": (["audit", "magic"], "magic"),
        "unknown data set": (["data", "fetch", "imagenet"], "imagenet"),
        "out is a file": (
            ["train", *own, "--set", "model.name=linear", "--set", "train.batch_size=10", "--out", str(npz)],
            "blobs.npz",
        ),
    }
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    wrong = []
    for name, (arguments, word) in requests.items():
        code = call(*arguments)
        shown = capsys.readouterr()
        lines = [line for line in shown.err.splitlines() if line.startswith("error: ")]
        if code != 2 or len(lines) != 1 or word not in lines[0] or "Traceback" in shown.err or len(shown.err.splitlines()) != 1:
            wrong.append((name, code, shown.err))
    assert not wrong
    assert before == {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert not (tmp_path / "new" / "ledger.jsonl").exists()


def test_an_edited_ledger_is_refused_everywhere(finished, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    ledger = copy / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"noise_multiplier":', '"noise_multiplier":1', 1))
    for arguments in (["certify", str(copy)], ["predict", str(copy), str(tmp_path)], same_request(copy)):
        arguments = [str(finished.parent / "blobs.npz") if a == str(copy.parent / "blobs.npz") else a for a in arguments]
        assert call(*arguments) == 2
        assert capsys.readouterr().err.startswith("error: ")
    # a whole new chain is no way out: the model names the head of the ledger it was made with
    shutil.copy(finished / "ledger.jsonl", ledger)
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:-1]))
    assert call("certify", str(copy), "--n", "200") == 2
    assert "not finished" in capsys.readouterr().err


def test_a_flipped_bit_of_the_model_or_config_is_seen(finished, tmp_path, capsys):
    for name, place in (
        ("model.safetensors", -5),
        ("model.safetensors", 60),
        ("config.toml", None),
        ("certificates-sigma0.50.json", None),
    ):
        copy = tmp_path / f"{name}{place}"
        shutil.copytree(finished, copy)
        data = bytearray((copy / name).read_bytes())
        if place is None:
            data = data.replace(b"0.5", b"0.6", 1)
        else:
            data[place] ^= 1
        (copy / name).write_bytes(bytes(data))
        assert call("certify", str(copy), "--sigma", "0.5", "--n", "200", "--examples", "10") == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_certificates_belong_to_their_images(finished, tmp_path, capsys):
    folder = tmp_path / "moved"
    shutil.copytree(finished.parent, folder)
    out = folder / "run"
    original = (finished.parent / "blobs.npz").read_bytes()
    try:
        for changed in ("x_test", "y_test"):
            arrays = blobs(0)
            np.savez(finished.parent / "blobs.npz", **{**arrays, changed: arrays[changed][::-1].copy()})
            assert call("certify", str(out), "--n", "200", "--examples", "15") == 2
            assert "the test images are not those of" in capsys.readouterr().err
    finally:
        (finished.parent / "blobs.npz").write_bytes(original)


def test_small_requests_work(finished, tmp_path, capsys):
    assert call("certify", str(finished), "--sigma", "0.3", "--n", "50", "--examples", "1") == 0
    assert call("report", str(finished), "--figures", str(tmp_path / "new" / "figures")) == 0
    assert (tmp_path / "new" / "figures" / "certified_accuracy.png").exists()
    assert not (tmp_path / "new" / "figures" / "report.html").exists()
    assert call("account", "--noise-multiplier", "1", "--steps", "0") == 0


def test_validation_split_leaves_the_test_set_alone(finished, tmp_path, capsys):
    npz = finished.parent / "blobs.npz"
    out = tmp_path / "tuning"
    assert (
        call(
            "train",
            "--set",
            f"data.path={npz}",
            "--set",
            "data.validation=40",
            "--set",
            "model.name=linear",
            "--set",
            "train.batch_size=10",
            "--set",
            "train.epochs=2",
            "--out",
            str(out),
        )
        == 0
    )
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["clean_accuracy"] is None and 0 <= metrics["validation_accuracy"] <= 1
    assert "40 held-out validation records are not covered" in capsys.readouterr().out
    assert json.loads((out / "ledger.jsonl").read_text().splitlines()[0])["data"]["dataset_size"] == 200
    assert call("certify", str(out), "--split", "validation", "--n", "100", "--examples", "5") == 0
    assert (out / "certificates-validation-sigma0.50.tsv").exists()
    assert json.loads((out / "metrics.json").read_text())["clean_accuracy"] is None
