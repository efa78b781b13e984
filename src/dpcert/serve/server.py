"""Start the service: bind the port, open the run, answer until SIGTERM or Ctrl-C."""

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import Callable

import h11
import torch
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..certification.sweep import SmoothedClassifier
from ..errors import ConfigError
from ..runs.open import OpenRun
from .app import build_app
from .bodies import Bodies
from .gallery import gallery_of
from .guard import ApiKey, Guard
from .health import ModelFile
from .model import served
from .pages import page_files
from .service import Service
from .settings import Asked, Limits
from .turns import Desk
from .watch import Watch, log_to_stderr

_SPARE_DESCRIPTORS = 64
_LONGEST_HEAD = 16 << 10
_IDLE_SECONDS = 5  # of a connection between two requests


class Connection(H11Protocol):
    """A connection that knows since when it waits for its client, or works for it."""

    since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock; more connections than allowed are closed at once."""
        self.since = time.monotonic()
        super().connection_made(transport)
        limit = self.config.limit_concurrency
        self.limit_concurrency = None  # refused here, before a byte is read
        if limit is not None and len(self.connections) > limit:
            transport.abort()

    @property
    def is_answering(self) -> bool:
        """Whether a request has arrived (its head) and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def handle_events(self) -> None:
        """Restart the clock when the head of a request arrives."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self.since = time.monotonic()

    def on_response_complete(self) -> None:
        """Restart the clock for the next request."""
        self.since = time.monotonic()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP with one line of JSON, unless an answer is on its way."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or self.is_answering:
            self.transport.abort()
            return
        body = b'{"error":"this is not a valid HTTP/1.1 request; send one"}'
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Server(uvicorn.Server):
    """Cuts connections whose client is too slow, and says when it is ready."""

    def __init__(self, config: uvicorn.Config, limits: Limits, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._limits, self._ready = limits, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        """Cut slow clients once a second."""
        if counter % 10 == 0:
            self._cut(time.monotonic())
        return await super().on_tick(counter)

    def _cut(self, now: float) -> None:
        reading = self._limits.reading_seconds
        answering = reading + self._limits.seconds + reading  # the body, the answer, and its way to the client
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Connection)
            if now - connection.since > (answering if connection.is_answering else reading):
                connection.transport.abort()


def bound(host: str, port: int) -> socket.socket:
    """A socket at the address. It does not listen yet: no client waits while the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host is {host!r}, not an address of this machine ({error.strerror}); use 127.0.0.1") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{host}:{port} cannot be used ({error.strerror}); choose another --port, or --port 0") from error
    return listener


def address_of(listener: socket.socket) -> str:
    """The address for a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can connect."""
    host = str(listener.getsockname()[0])
    return host.startswith("127.") or host in ("::1", "::ffff:127.0.0.1")


def prepared(
    run: OpenRun,
    *,
    sigma: float | None,
    n0: int,
    asked: Asked,
    limits: Limits,
    key: ApiKey | None,
    gallery: bool | None,
    ready: Callable[[int], None],
    hosts: frozenset[str] | None = None,
) -> Server:
    """A server with the model of a run, ready to vote. `ready` is called when it answers, with its number of workers.

    It keeps nothing of the run's training records.
    """
    pictures = gallery_of(run, gallery)
    model = served(run, sigma, n0, asked, gallery=not isinstance(pictures, str))
    tools = SmoothedClassifier(run.model, model.sigma, fresh_noise=True).ready(torch.full((1, *model.shape), 0.5))
    desk, bodies, watch = Desk(tools, limits.queue, limits.seconds), Bodies(model.shape, limits), Watch(model.sha256)
    file = ModelFile(run.directory.model, run.model_sha256)
    service = Service(model, desk, bodies, file, pictures, page_files(), watch)
    return Server(_config(Guard(build_app(service), key, watch, hosts), limits), limits, lambda: ready(len(tools)))


def _config(app: Guard, limits: Limits) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=limits.connections,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=int(limits.grace_seconds),
        h11_max_incomplete_event_size=_LONGEST_HEAD,
    )


def answer_until_a_signal(server: Server, listener: socket.socket) -> None:
    """Answer until SIGTERM or Ctrl-C, then finish the requests in progress. Ends with `KeyboardInterrupt`."""
    _allow_descriptors(server.config.limit_concurrency or 0)
    log_to_stderr()
    server.run([listener])


def _allow_descriptors(connections: int) -> None:
    """Raise the limit of open files where the system allows it: every connection is one."""
    needed = connections + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
