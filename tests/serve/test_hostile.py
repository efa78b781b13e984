"""Hostile requests: documented status codes, one-line JSON errors, no restart, bounded memory, and no wrong answer (S7)."""

import json

import pytest

from tests.serve.client import raw, require_right, status_of
from tests.serve.hostile import KINDS, hostile

MANY = 20 * len(KINDS)  # in `make test-serve`: 10,000
GROWTH_MB = 80


def require_documented(number: int, received: bytes) -> str:
    """Return the kind of the request, if the answer to it is one of the documented ones."""
    asked, status = hostile(number), status_of(received)
    assert status in asked.expected, (number, asked.name, asked.parts[0][:200], received[:600])
    head, _, body = received.partition(b"\r\n\r\n")
    if status is None or asked.parts[0].startswith(b"HEAD"):
        return asked.name
    if status == 200:
        _require_right_answer(asked.parts[0], body)
        return f"{asked.name}, answered"
    length = int(next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")).split(b":")[1])
    content = json.loads(body[:length])
    assert set(content) == {"error"} and "\n" not in content["error"] and len(content["error"]) < 600, content
    assert b"application/json" in head.lower() and (status != 503 or b"retry-after" in head.lower())
    return asked.name


def _require_right_answer(sent: bytes, body: bytes) -> None:
    if sent.startswith(b"POST /predict"):
        require_right(json.loads(body), n=16)
    elif sent.startswith(b"POST /votes"):
        assert b'"votes"' in body


def test_hostile_requests(service, evidence):
    for number in range(len(KINDS)):
        require_documented(number, raw(service.port, *hostile(number).parts))
    before, seen = service.resident_mb(), set()
    for number in range(len(KINDS), MANY):
        seen.add(require_documented(number, raw(service.port, *hostile(number).parts)))
    assert service.resident_mb() - before < GROWTH_MB
    assert service.process.poll() is None and service.call("GET", "/health").status == 200
    assert "failed" not in {json.loads(line)["event"] for line in service.log().splitlines()}  # no internal error
    assert len({name.split(",")[0] for name in seen}) == len(KINDS)
    evidence("S7", figure=f"{MANY} hostile requests: documented answers only, 0 restarts", trials=MANY)


@pytest.mark.parametrize("status", [200, 500, 413])
def test_twin_a_wrong_answer_is_noticed(status):
    """The check of the answers refuses a status that is not documented, and a certificate that its votes do not prove."""
    number = next(n for n in range(100) if hostile(n).name == "picture cut")
    with pytest.raises(AssertionError):
        require_documented(number, b"HTTP/1.1 %d X\r\nContent-Length: 2\r\n\r\n{}" % status)
    right = {"class": 1, "radius": 9.9, "abstained": False, "votes": [0] * 10, "n0": 100, "n": 16, "alpha": 0.001, "sigma": 0.5}
    with pytest.raises(AssertionError):
        require_right({**right, "dtype": "float32", "model_sha256": "0" * 64}, n=16)
