"""Counts for Prometheus and one line of log for each request."""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

_BOUNDS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # seconds
_HELP = {
    "dpcert_requests_total": "counter, answered requests",
    "dpcert_request_seconds": "histogram, from the head of a request to the end of its answer",
    "dpcert_predictions_total": "counter, certified answers",
    "dpcert_votes_total": "counter, votes of certified answers",
    "dpcert_requests_in_progress": "gauge, requests that compute or wait for their turn",
    "dpcert_queue_limit": "gauge, the most requests in progress",
    "dpcert_model_info": "gauge, the model that answers",
}
LOG = logging.getLogger("dpcert.serve")


class Watch:
    """Counters of one event loop; nothing in them depends on the content of an image."""

    def __init__(self, model_sha256: str) -> None:
        self._sha256 = model_sha256
        self._requests: Counter[tuple[str, int]] = Counter()
        self._predictions: Counter[bool] = Counter()
        self._buckets: Counter[float] = Counter()
        self._seconds = 0.0
        self._votes = 0

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests[route, status] += 1
        self._seconds += seconds
        self._buckets[next((bound for bound in _BOUNDS if seconds <= bound), float("inf"))] += 1

    def predicted(self, abstained: bool, votes: int) -> None:
        """Count a certified answer."""
        self._predictions[abstained] += 1
        self._votes += votes

    @property
    def requests(self) -> int:
        """The number of answered requests."""
        return self._requests.total()

    def text(self, in_progress: int, limit: int) -> str:
        """The counts in the text format of Prometheus."""
        lines = []
        for name, rows in self._families(in_progress, limit).items():
            kind, text = _HELP[name].split(", ", 1)
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *rows]
        return "\n".join(lines) + "\n"

    def _families(self, in_progress: int, limit: int) -> dict[str, list[str]]:
        predictions = {"false": self._predictions[False], "true": self._predictions[True]}
        return {
            "dpcert_requests_total": [
                f'dpcert_requests_total{{route="{route}",status="{status}"}} {count}'
                for (route, status), count in sorted(self._requests.items())
            ],
            "dpcert_request_seconds": list(self._histogram()),
            "dpcert_predictions_total": [
                f'dpcert_predictions_total{{abstained="{which}"}} {count}' for which, count in predictions.items()
            ],
            "dpcert_votes_total": [f"dpcert_votes_total {self._votes}"],
            "dpcert_requests_in_progress": [f"dpcert_requests_in_progress {in_progress}"],
            "dpcert_queue_limit": [f"dpcert_queue_limit {limit}"],
            "dpcert_model_info": [f'dpcert_model_info{{model_sha256="{self._sha256}"}} 1'],
        }

    def _histogram(self) -> Iterator[str]:
        total = 0
        for bound in (*_BOUNDS, float("inf")):
            total += self._buckets[bound]
            label = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'dpcert_request_seconds_bucket{{le="{label}"}} {total}'
        yield f"dpcert_request_seconds_sum {self._seconds:.6f}"
        yield f"dpcert_request_seconds_count {total}"


class _OneLine(logging.Formatter):
    """A JSON object in one line; what a client sent cannot start a new one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": at, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr() -> None:
    """Log dpcert.serve, and warnings of the server and of asyncio, as lines of JSON on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    for name, level in (("dpcert.serve", logging.INFO), ("uvicorn", logging.WARNING), ("asyncio", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
