"""``dpcert audit`` of whole trainings: what it prints, and its exit code when a promise is broken."""

import pytest

from dpcert.cli import main
from dpcert.privacy import mechanism, noise


def call(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code


def test_one_run_prints_bound_promise_ceiling_and_verdict(capsys):
    assert call("audit", "dp-gaussian", "--one-run", "--canaries", "500", "--epsilon", "2", "--seed", "0") == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("epsilon at least", "promised", "ceiling", "holds", "one training, 500 canaries"))
    assert "2.000" in out and "confidence 0.99;" in out


def test_many_runs_print_the_same(capsys):
    assert call("audit", "dpsgd", "--runs", "10", "--epsilon", "1", "--confidence", "0.9", "--seed", "0") == 0
    out = capsys.readouterr().out
    assert "2 x 10 trainings of 4 steps" in out and "confidence 0.9;" in out and "holds" in out


def test_an_audit_that_could_not_refute_says_so(capsys):
    assert call("audit", "dpsgd", "--one-run", "--canaries", "20", "--epsilon", "8", "--seed", "0") == 0
    assert "not refutable by this audit" in capsys.readouterr().out


def test_a_broken_training_ends_with_two(capsys, monkeypatch):
    quiet = type("Noise", (), {"add": staticmethod(lambda bounded, rho, key, step: noise.add(bounded, 0.0, key, step))})
    monkeypatch.setattr(mechanism, "noise", quiet)
    assert call("audit", "dpsgd", "--one-run", "--seed", "0") == 2
    captured = capsys.readouterr()
    assert "BROKEN" in captured.out and "the training of dpsgd leaks more than it is charged for" in captured.err


def test_two_audits_at_once_are_refused(capsys):
    assert call("audit", "dpsgd", "--one-run", "--runs", "10") == 2
    assert "give one of them" in capsys.readouterr().err


def test_a_method_that_promises_nothing_is_refused(capsys):
    assert call("audit", "regular", "--one-run") == 2
    assert "does not clip" in capsys.readouterr().err


def test_the_step_of_a_custom_model_is_audited(capsys):
    tiny = "tests.runs.own_models:tiny"
    assert call("audit", "dpsgd", "--model", tiny, "--draws", "200", "--seed", "0") == 0
    assert "holds" in capsys.readouterr().out
    assert call("audit", "dpsgd", "--model", tiny, "--one-run") == 2
    assert "leave out --runs and --one-run" in capsys.readouterr().err
    assert call("audit", "dpsgd", "--model", "tests.runs.own_models:mixing", "--draws", "200") == 2
    assert "mix" in capsys.readouterr().err
