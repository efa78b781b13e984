"""``dpcert reproduce``: what it prints, what it refuses, and that it only looks when told so."""

from pathlib import Path

import pytest

from dpcert.cli import main
from dpcert.paper.grid import TARGETS, Cell
from tests.grid_fakes import fake_run, radius_of

RESULTS = Path(__file__).parents[2] / "results"


def call(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", *arguments])
    return stop.value.code


def test_without_a_target_it_lists_them(tmp_path, capsys):
    fake_run(tmp_path, Cell("mnist", "dpsgd"), {s: radius_of(0.3, s) for s in (0.25, 0.5, 1.0)})
    assert call("--results", str(tmp_path), "--examples", "100") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*TARGETS, "all"))
    table = next(line for line in shown.splitlines() if "table1" in line)
    assert [cell.strip() for cell in table.split("│")][3:5] == ["61", "1"]  # 46, and 15 of CIFAR-10


def test_show_touches_nothing(tmp_path, capsys):
    fake_run(tmp_path, Cell("mnist", "dpsgd"), {0.5: radius_of(0.3, 0.5)})
    before = sorted(path for path in tmp_path.rglob("*"))
    assert call("table1", "--show", "--dataset", "mnist", "--results", str(tmp_path)) == 0
    printed = capsys.readouterr()
    assert "DPSGD" in printed.out and "not run" in printed.out and printed.err == ""
    assert before == sorted(path for path in tmp_path.rglob("*"))


def test_dry_run_says_what_is_missing_and_how_long(tmp_path, capsys):
    fake_run(tmp_path, Cell("mnist", "dpsgd"), {0.5: radius_of(0.3, 0.5)})
    assert call("figure-radii", "--dry-run", "--results", str(tmp_path), "--examples", "100") == 0
    told = capsys.readouterr().err
    assert "missing: mnist-regular: train, certify at 0.5" in told and "mnist-dpsgd" not in told
    assert "3 of 4 runs are incomplete; about" in told and not (tmp_path / "logs").exists()


def test_when_all_is_there_it_only_shows(tmp_path, capsys):
    for method in ("regular", "dpsgd", "psac", "dp-gaussian"):
        fake_run(tmp_path, Cell("mnist", method), {0.5: radius_of(1.2, 0.5)})
    assert call("figure-radii", "--results", str(tmp_path), "--examples", "100", "--figures", str(tmp_path / "f")) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and "does not hold" in printed.out and (tmp_path / "f" / "figure-radii.png").exists()


def test_the_page_names_the_request_that_was_given(tmp_path, capsys):
    page = tmp_path / "page.md"
    (tmp_path / "results").mkdir()
    results = ["--results", str(tmp_path / "results")]
    assert call("figure-radii", "table1", "--dataset", "mnist", "--show", *results, "--markdown", str(page)) == 0
    command = f"dpcert reproduce figure-radii table1 --dataset mnist --show {' '.join(results)} --markdown {page}"
    assert f"by `{command}`." in page.read_text()


def test_our_own_results_can_be_shown(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # xdist sets it, and a narrow table is another one
    assert call("table1", "--show", "--dataset", "mnist", "--results", str(RESULTS)) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "│ 0.5" in line and "DP-Gaussian" in line]
    assert rows and "agrees" in rows[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tabel1"], "target 'tabel1' is unknown; did you mean table1?"),
        (["table1", "--dataset", "svhn"], "data set 'svhn' is unknown"),
        (["figure-radii", "--dataset", "cifar10"], "figure-radii is about mnist, --dataset is cifar10"),
        (["table1", "--examples", "10001"], "--examples is 10001, must be a whole number in [1, 10000]"),
        (["table1", "--examples", "0"], "--examples is 0"),
        (["table1", "--jobs", "0"], "--jobs is 0"),
        (["table1", "--on", "threads"], "--on is 'threads', must be processes, ray or ray://HOST:PORT"),
        (["table1", "--on", "ray://head"], "--on is 'ray://head', its address must be HOST:PORT"),
        (["table1", "--cpus-per-task", "0"], "--cpus-per-task is 0"),
        (["--gpus-per-task", "-1"], "--gpus-per-task is -1"),
        (["figure-radii", "--dataset", "fashion-mnist"], "figure-radii is about mnist"),
    ],
)
def test_wrong_requests_get_one_line(tmp_path, capsys, arguments, words):
    assert call(*arguments, "--results", str(tmp_path / "results")) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and words in told and told.count("\n") == 1
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("arguments", [[], ["table1", "--show"], ["table1", "--dry-run"], ["table1"]])
def test_a_folder_that_is_not_there_is_no_empty_one(tmp_path, capsys, arguments):
    assert call(*arguments, "--results", str(tmp_path / "reslts")) == 2
    told = capsys.readouterr()
    assert "reslts does not exist" in told.err and told.out == "" and not (tmp_path / "reslts").exists()


def test_wrong_folders_get_one_line(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    assert call("table1", "--results", str(file)) == 2
    assert "is a file, must be a folder of run directories" in capsys.readouterr().err
    folder = fake_run(tmp_path, Cell("mnist", "dpsgd"), {0.5: radius_of(0.3, 0.5)})
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("clip_norm = 0.1", "clip_norm = 0.2"))
    for how in ("--dry-run", "--show"):
        assert call("table1", how, "--results", str(tmp_path)) == 2
        assert "(privacy.clip_norm: 0.2 -> 0.1)" in capsys.readouterr().err


def test_failed_pieces_make_the_command_fail_at_the_end(tmp_path, capsys, monkeypatch):
    from dpcert.cli import _reproduce
    from dpcert.paper.pieces import Piece
    from dpcert.paper.runner import Failure

    failure = Failure(Piece("train", Cell("mnist", "dpsgd"), 100), "the disk is on fire")
    monkeypatch.setattr(_reproduce, "do_missing", lambda asked, dry_run: [failure])
    assert call("figure-radii", "--results", str(tmp_path)) == 2
    printed = capsys.readouterr()
    assert "figure-radii" in printed.out
    assert "1 tasks failed; the first: train mnist-dpsgd: the disk is on fire; logs are in" in printed.err


def test_without_ray_it_says_how_to_get_it_and_creates_nothing(tmp_path, capsys, monkeypatch):
    from dpcert.scale import ray

    monkeypatch.setattr(ray.importlib.util, "find_spec", lambda name: None)
    assert call("figure-radii", "--results", str(tmp_path), "--on", "ray") == 2
    told = capsys.readouterr().err
    assert "4 of 4 runs are incomplete; about" in told and "of work for one task at a time" in told
    assert told.splitlines()[-1] == "error: --on ray needs the package ray; install it with: pip install 'dpcert[ray]'"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["--dry-run", "--show"])
def test_looking_needs_no_cluster(tmp_path, capsys, how):
    assert call("figure-radii", "--results", str(tmp_path), "--on", "ray://127.0.0.1:1", how) == 0


def _cifar10_is_here(monkeypatch, here):
    from dpcert.cli import _reproduce

    monkeypatch.setattr(_reproduce, "missing_files", lambda source: [] if here else list(source.digests))


@pytest.mark.parametrize("here", [True, False])
def test_without_its_files_cifar10_is_left_out_in_one_line(tmp_path, capsys, monkeypatch, here):
    _cifar10_is_here(monkeypatch, here)
    assert call("table1", "--dry-run", "--results", str(tmp_path)) == 0
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if "cifar10" in line]
    if here:
        assert len(lines) == 15 and all(line.startswith("missing: cifar10-") for line in lines)
        assert "61 of 61 runs are incomplete" in printed.err
    else:
        assert lines == ["cifar10: 15 runs are left out, its files are not here; get them with: dpcert data fetch cifar10"]
        assert "missing: mnist-dpsgd" in printed.err and "CIFAR-10" in printed.out  # the others go on, its cells are shown


def test_the_list_for_cifar10_says_what_only_crossvit_can_fill(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert call("--dataset", "cifar10", "--results", str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, words in (("ablation-clip-norm", "needs the CrossViT checkpoint"), ("figure-radii", "not about cifar10")):
        assert words in next(line for line in lines if name in line)


def test_stored_rows_of_cifar10_need_no_files(tmp_path, capsys, monkeypatch):
    _cifar10_is_here(monkeypatch, False)
    for method in ("dp-gaussian", "dp-smoothadv", "dp-stability", "dp-macer"):
        for sigma in (0.25, 0.5, 1.0):
            fake_run(tmp_path, Cell("cifar10", method, sigma), {sigma: radius_of(1.5 * sigma, sigma)})
    assert call("figure-cifar10-comparison", "--results", str(tmp_path), "--examples", "100") == 0
    printed = capsys.readouterr()
    assert printed.err == "" and "holds" in printed.out and "so these are other models" in printed.out


def test_cifar10_that_is_named_is_not_left_out(tmp_path, capsys, monkeypatch):
    """Training downloads it, as for the other data sets."""
    _cifar10_is_here(monkeypatch, False)
    assert call("table1", "--dataset", "cifar10", "--dry-run", "--results", str(tmp_path)) == 0
    printed = capsys.readouterr()
    assert "missing: cifar10-dp-gaussian-sigma0.25: train, certify at 0.25" in printed.err and "left out" not in printed.err
    assert printed.out.count("not run") >= 63


def test_the_list_says_what_is_left_out(tmp_path, capsys, monkeypatch):
    for here in (True, False):
        _cifar10_is_here(monkeypatch, here)
        assert call("--results", str(tmp_path)) == 0
        assert ("dpcert data fetch cifar10" in capsys.readouterr().out) is not here
