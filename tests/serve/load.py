"""Hostile requests, then load, on the real service on loopback: what came back, and how much memory it took (S7).

    python -m tests.serve.load [--hostile 10000] [--minutes 10] [--clients 8]

Fails on a restart, an undocumented answer, a wrong certificate, or memory that grows. `make test-serve` runs it.
"""

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import torch

from dpcert.certification.sweep import SmoothedClassifier
from dpcert.data.registry import load_dataset
from dpcert.runs.open import open_run
from tests.serve.client import STORED, Served, call, raw, require_right
from tests.serve.hostile import hostile
from tests.serve.test_hostile import require_documented

FLAT_MB = 48  # the most that the second half may add to the peak of the first


class Samples:
    """What came back, and the memory of the service over time."""

    def __init__(self, service: Served) -> None:
        self._service, self._lock = service, threading.Lock()
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.memory: list[float] = []

    def note(self, name: str, check: Callable[[], str]) -> None:
        try:
            name = check()
        except Exception as error:
            with self._lock:
                self.wrong.append(f"{name}: {type(error).__name__}: {str(error)[:500]}")
        with self._lock:
            self.answers[name] += 1
            if sum(self.answers.values()) % 50 == 0:
                self.memory.append(self._service.resident_mb())


def clear_digits(count: int = 60) -> list[tuple[str, int]]:
    """Bodies of test images whose class is beyond doubt, with that class, from the library."""
    images = load_dataset("mnist").x_test[:count]
    found = SmoothedClassifier(open_run(STORED).model, 0.5).certify(images, n=1000, alpha=1e-6)
    return [
        (json.dumps({"image": image.tolist()}), int(predicted))
        for image, predicted, bound in zip(images, found.predict, found.p_lower, strict=True)
        if bound > 0.8
    ]


def threads(count: int, work: Callable[[int], None]) -> None:
    started = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def send_hostile(samples: Samples, port: int, count: int, clients: int) -> None:
    def client(first: int) -> None:
        for number in range(first, count, clients):
            samples.note(
                hostile(number).name, lambda number=number: require_documented(number, raw(port, *hostile(number).parts))
            )

    threads(clients, client)


def send_load(samples: Samples, port: int, seconds: float, clients: int) -> None:
    digits, end = clear_digits(), time.monotonic() + seconds

    def one(draw: random.Random) -> str:
        body, expected = draw.choice(digits)
        path = draw.choice(
            ["/predict?n=100", "/predict?n=1000", "/predict", "/votes?n=1000", "/noisy", "/attack?strength=0.2", "hostile"]
        )
        if path == "hostile":
            number = draw.randrange(10**6)
            return require_documented(number, raw(port, *hostile(number).parts))
        answer = call(port, "POST", path, body)
        if answer.status == 503:
            return "503"
        assert answer.status == 200, answer
        if "predict" in path or "votes" in path:
            found = json.loads(answer.body.splitlines()[-1])
            require_right(found)
            assert found["class"] in (expected, -1), (found, expected)
        return path

    def client(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < end and samples._service.process.poll() is None:
            samples.note("load", lambda: one(draw))

    threads(clients, client)


def is_flat(memory: list[float]) -> bool:
    """Whether the second half stays at the peak of the first; the first tenth warms up."""
    half = len(memory) // 2
    return half == 0 or max(memory[half:]) <= max(memory[:half]) + FLAT_MB


def run(hostile_requests: int, minutes: float, clients: int) -> dict:
    """Send everything, and return what was seen."""
    torch.set_num_threads(1)
    with Served() as service:
        samples, began = Samples(service), time.monotonic()
        send_hostile(samples, service.port, hostile_requests, clients)
        refused, first = sum(samples.answers.values()), len(samples.memory)
        send_load(samples, service.port, 60 * minutes, clients)
        alive = service.process.poll() is None and service.call("GET", "/health").status == 200
        failures = sum(json.loads(line)["event"] == "failed" for line in service.log().splitlines())
        memory = samples.memory
        return {
            "hostile_requests": refused,
            "load_requests": sum(samples.answers.values()) - refused,
            "seconds": round(time.monotonic() - began, 1),
            "restarts": 0 if alive else 1,
            "internal_errors": failures,
            "wrong": samples.wrong[:20],
            "answers": dict(samples.answers.most_common()),
            "memory_mb": [round(value) for value in memory[:: max(1, len(memory) // 20)]],
            "memory_is_flat": is_flat(memory[:first]) and is_flat(memory[first:]),
            "exit_code": service.stop(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hostile", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    seen = run(options.hostile, options.minutes, options.clients)
    print(json.dumps(seen, indent=1))
    good = (
        not seen["wrong"]
        and seen["restarts"] == seen["internal_errors"] == 0
        and seen["memory_is_flat"]
        and seen["exit_code"] == 130
    )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
