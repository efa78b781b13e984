"""A stand-in for the health check of a cluster: a port of 1000 or more answers."""

import contextlib
from enum import Enum


class StatusCode(Enum):
    UNAVAILABLE = 14
    UNIMPLEMENTED = 12


class RpcError(Exception):
    def code(self):
        return self.args[0]


class _Channel:
    def __init__(self, address):
        self._port = int(address.rpartition(":")[2])

    def unary_unary(self, name):
        def check(request, *, timeout, wait_for_ready):
            if self._port < 1000:
                raise RpcError(StatusCode.UNAVAILABLE)

        return check


@contextlib.contextmanager
def insecure_channel(address, options):
    yield _Channel(address)
