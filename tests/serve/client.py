"""The real service in a process of its own, and a client that can also misbehave."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from dpcert.certification.bounds import certified_radius, lower_confidence_bound

ROOT = Path(__file__).parents[2]
STORED = ROOT / "results" / "mnist-dp-gaussian"
SHA256 = "9709c4682508577088bfe2c10ba124406456f56efd5b85a3a59cbfefb1f599c2"
JSON = "application/json"
KEYS = {"class", "radius", "abstained", "votes", "n0", "n", "alpha", "sigma", "dtype", "model_sha256"}


@dataclass
class Answer:
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self):
        return json.loads(self.body)


def call(port, method, path, body=None, kind=JSON, timeout=120, **headers) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    with contextlib.closing(connection):
        typed = {"Content-Type": kind} if body is not None and kind is not None else {}
        connection.request(method, path, body, {**typed, **{name.replace("_", "-"): value for name, value in headers.items()}})
        answer = connection.getresponse()
        return Answer(answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()})


def raw(port, *parts: bytes, timeout=60) -> bytes:
    """Send bytes as they are and return all that comes back until the service closes the connection or has answered."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        received = b""
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
            while part := connection.recv(65536):
                received += part
                if _is_whole(received):
                    break
        return received


def _is_whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return length is not None and len(body) >= int(length[1])


def status_of(answer: bytes) -> int | None:
    """The status of a raw answer; None if the connection was closed without one."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else None


def require_right(answer: dict, *, n=None, alpha=0.001, sigma=0.5, sha256=SHA256, classes=10) -> None:
    """A certificate follows from its own votes, settings and model; anything else is a wrong answer."""
    assert set(answer) == KEYS
    votes, n = answer["votes"], answer["n"] if n is None else n
    assert (answer["n"], answer["alpha"], answer["sigma"], answer["dtype"]) == (n, alpha, sigma, "float32")
    assert answer["model_sha256"] == sha256 and len(votes) == classes and 0 <= sum(votes) <= n and min(votes) >= 0
    if answer["abstained"]:
        assert answer["class"] == -1 and answer["radius"] == 0.0
        return
    radius = certified_radius(lower_confidence_bound(votes[answer["class"]], n, alpha), sigma)
    assert answer["radius"] == radius > 0.0


class Served:
    """``dpcert serve`` in a process; stopped at the end."""

    def __init__(self, *options: str, run: Path = STORED, environment: dict[str, str] | None = None) -> None:
        self._logs = tempfile.NamedTemporaryFile("w+", prefix="dpcert-serve-", suffix=".log")  # noqa: SIM115
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), **(environment or {})}
        words = [sys.executable, "-m", "dpcert", "serve", str(run), "--port", "0", *options]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=self._logs, env=variables, text=True)
        self.said = self.process.stdout.readline()
        assert "serving" in self.said, self.said + self.log()
        self.port = int(re.search(r":(\d+),", self.said)[1])

    def log(self) -> str:
        return Path(self._logs.name).read_text()

    def call(self, method, path, body=None, kind=JSON, **headers) -> Answer:
        return call(self.port, method, path, body, kind, **headers)

    def metric(self, name: str) -> float:
        text = self.call("GET", "/metrics").body.decode()
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.M)[1])

    def resident_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024

    def wait_until_idle(self, seconds=60) -> None:
        end = time.monotonic() + seconds
        while self.metric("dpcert_requests_in_progress") > 0:
            assert time.monotonic() < end, "requests are still in progress"
            time.sleep(0.05)

    def stop(self, number=signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(60)
        finally:
            self.process.stdout.close()

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *error) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._logs.close()
