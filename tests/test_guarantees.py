"""The page of guarantees tells what was shown, and says so of what was not."""

from tests.guarantees import AUDITS, PROMISES, page, rows, told_once


def entry(identity, figure="0 of 5", test="a", trials=5, twin=""):
    return {"id": identity, "figure": figure, "trials": trials, "twin": twin, "seconds": 1.0, "test": test}


def row(identity, evidence):
    return next(line for line in rows(evidence) if line[0] == identity)


def test_a_promise_without_evidence_stands_there_as_not_shown():
    assert page([]).count("not shown by the last run") == len(PROMISES)
    assert page([entry("D8")]).count("not shown by the last run") == len(PROMISES) - 1


def test_a_test_that_ran_twice_counts_once_and_its_last_run_speaks():
    found = row("D8", [entry("D8", "9 of 5 below"), entry("D8", "0 of 6 below", trials=6)])
    assert found[2:4] == ["0 of 6 below", "6"]
    assert row("R3", [entry("R3", "0 of 5 flips"), entry("R3", "0 of 7 cuts", trials=7)])[3] == "12"  # two figures of one test


def test_figures_alike_are_told_once_and_others_are_kept():
    assert told_once(["png: 1 read, 0 other", "idx: 22 read, 0 other", "1 of 2 differ"]) == [
        "png: 1 read, 0 other (and 1 more alike)",
        "1 of 2 differ",
    ]


def test_audits_that_were_not_run_are_counted():
    some = [entry("D10", "below", test=str(k)) for k in range(AUDITS)]
    assert f"of {AUDITS}" not in row("D10", some)[2]
    assert f"{AUDITS - 1} of {AUDITS} audits were run" in row("D10", some[1:])[2]


def test_a_promise_without_new_evidence_keeps_its_row():
    first = {"id": "D1", "figure": "0 changed", "trials": 5, "twin": "caught", "seconds": 1.0, "test": "a"}
    before = page([first])
    after = page([{**first, "id": "D2", "figure": "never above C"}], before)
    row = next(line for line in before.splitlines() if line.startswith("| D1 |"))
    assert row in after.splitlines() and "never above C" in after
    assert "not shown" in next(line for line in after.splitlines() if line.startswith("| D3 |"))


def test_a_page_built_again_without_evidence_is_the_same():
    """Rows with empty cells too: those of promises that were never shown."""
    before = page([entry("D1")])
    assert page([], before) == before
