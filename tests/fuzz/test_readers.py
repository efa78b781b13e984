"""Every reader on damaged input: a value or the documented error, in bounded memory and time; never anything else."""

import base64
import resource
import time
import warnings
from pathlib import Path
from random import Random

import pytest

from dpcert.errors import DpcertError
from dpcert.privacy import accounting
from tests.fuzz.readers import READERS, Reader

EXTRA_ADDRESS_SPACE = 768 << 20
MOST_CPU_SECONDS = 1.0
ROUND = 2900  # inputs a share; the shares add up to more than 100,000


@pytest.fixture
def limited(monkeypatch):
    """No more address space than now plus 768 MiB, and no privacy loss distributions (seconds each, and not a reader)."""
    monkeypatch.setattr(accounting, "compose", lambda releases, delta: float(sum(r.steps for r in releases)))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere only the peak memory of the slow test is looked at
        now = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + EXTRA_ADDRESS_SPACE, hard))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def chain_of(error: BaseException | None) -> list[BaseException]:
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def ran_out(error: BaseException) -> bool:
    """Whether a documented error only hides that memory ran out."""
    return any(isinstance(e, MemoryError) or "can't allocate memory" in str(e) for e in chain_of(error))


def fuzz(reader: Reader, folder, inputs: int, seed: int) -> dict[str, float]:
    """Read `inputs` damaged files; returns how many were read, how many refused, and the slowest; raises on anything else."""
    random, seeds = Random(seed), reader.seeds(folder)
    for data in seeds:
        reader.read(data, folder)  # the seeds themselves are valid
    found = {"read": 0, "refused": 0, "slowest": 0.0}
    for number in range(inputs):
        data = reader.damage(random, seeds)
        began = time.process_time()
        try:
            reader.read(data, folder)
            found["read"] += 1
        except DpcertError as error:
            assert not ran_out(error), _told(number, seed, data)
            found["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {str(error)[:200]} on {_told(number, seed, data)}") from error
        found["slowest"] = max(found["slowest"], time.process_time() - began)
        assert found["slowest"] < MOST_CPU_SECONDS, _told(number, seed, data)
    return found


def _told(number: int, seed: int, data: bytes) -> str:
    return f"input {number} of seed {seed}: {base64.b64encode(data[:3000]).decode()}"


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_give_a_value_or_the_documented_error(name, tmp_path, limited):
    found = fuzz(READERS[name], tmp_path, 100, seed=1)
    assert found["read"] + found["refused"] == 100 and found["refused"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_hundred_thousand_damaged_files(name, tmp_path, limited, evidence):
    """More than 100,000 inputs over all readers; about five minutes on one core; the inputs are fixed: no false alarms."""
    inputs = ROUND * READERS[name].share
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = fuzz(READERS[name], tmp_path, inputs, seed=2)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    assert grown < 400
    figure = (
        f"{name}: {found['read']} read, {found['refused']} refused, 0 other; slowest {found['slowest']:.2f} s, {grown} MiB more"
    )
    evidence("fuzz", figure=figure, trials=inputs, twin="a reader that raises KeyError, eats memory or dawdles: caught")


def test_the_whole_is_a_hundred_thousand():
    assert ROUND * sum(reader.share for reader in READERS.values()) >= 100_000


def careless(data, folder):
    if b"\x00" in data:
        raise KeyError("x")


def greedy(data, folder):
    try:
        return bytes(2 << 30) if data != b"valid" else None
    except MemoryError as error:
        raise DpcertError("too large") from error


def slow(data, folder):
    began = time.process_time()
    while data != b"valid" and time.process_time() - began < MOST_CPU_SECONDS + 0.1:
        pass


@pytest.mark.parametrize("twin", [careless, greedy, slow], ids=lambda twin: twin.__name__)
def test_twins_are_caught(twin, tmp_path, limited):
    with pytest.raises(AssertionError):
        fuzz(Reader(lambda folder: [b"valid"], twin), tmp_path, 200, seed=0)
