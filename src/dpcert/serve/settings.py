"""The settings and limits of the service."""

from dataclasses import dataclass

from .._validate import finite_in, integer_in
from ..certification.request import Request

_SMALLEST_BODY_LIMIT = 1 << 20
_BODY_BYTES_PER_VALUE = 64  # a number in JSON has about 20 characters
BODIES_IN_MEMORY = 64  # of the largest size


@dataclass(frozen=True)
class Limits:
    """What a request may cost. `queue` requests are answered or wait at a time, each for at most `seconds`."""

    queue: int = 64
    seconds: float = 60.0
    reading_seconds: float = 10.0  # for the head of a request, and again for its body
    grace_seconds: float = 10.0  # for requests in progress when the service stops
    connections: int = 2048

    def __post_init__(self) -> None:
        integer_in("--queue", self.queue, 1, 512, remedy="64 is typical")
        finite_in("--timeout", self.seconds, 0.0, 86_400.0, open_low=True, remedy="seconds; 60 is typical")

    def most_body_bytes(self, values: int) -> int:
        """The size limit of a body for a model whose images have this number of values."""
        return max(_SMALLEST_BODY_LIMIT, _BODY_BYTES_PER_VALUE * values)


@dataclass(frozen=True)
class Asked:
    """The votes and alpha of one answer."""

    n: int
    alpha: float

    def request(self, sigma: float, n0: int) -> Request:
        """The request of the library, which checks the values."""
        return Request(sigma, n0, self.n, self.alpha, fresh_noise=True)
