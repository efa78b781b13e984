"""What every request passes first: host and origin, the API key, security headers, the log and the counts."""

import asyncio
import hashlib
import hmac
import time
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .._validate import shown
from ..errors import ConfigError
from .refusals import problem
from .watch import LOG, Watch

KEY_VARIABLE = "DPCERT_API_KEY"
OPEN_PATHS = ("/", "/health")  # and the files of the page: they need no key
PAGE_FILES = "/page/"
LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "[::1]"))
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_SHORTEST_KEY = 16
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class ApiKey:
    """A key, of which only the digest is kept; the time of a comparison does not depend on the key."""

    def __init__(self, key: str) -> None:
        self._digest = _digest(key)

    def accepts(self, headers: Headers) -> bool:
        """Whether a request has the key, as ``Authorization: Bearer KEY``."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return hmac.compare_digest(_digest(given.strip()), self._digest) and scheme.lower() == "bearer"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_api_key(file: Path | None, variable: str | None) -> ApiKey | None:
    """The key from a file, or else from the environment variable; None if there is neither."""
    if file is None and variable is None:
        return None
    source = KEY_VARIABLE if file is None else str(file)
    try:
        key = (variable or "") if file is None else file.read_text(encoding="ascii")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the API key in {source} is not ASCII; make one with: openssl rand -hex 32") from error
    key = key.strip()
    if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"the API key in {source} has {len(key)} characters, must have at least {_SHORTEST_KEY} printable ASCII characters "
            "without spaces; make one with: openssl rand -hex 32"
        )
    return ApiKey(key)


class Guard:
    """An ASGI application around the service.

    `hosts` are the names under which it may be asked (None: any). A service on loopback answers to local names only: a web
    site whose name leads to 127.0.0.1 would be of the same origin for a browser on this machine.
    """

    def __init__(self, app: ASGIApp, key: ApiKey | None, watch: Watch, hosts: frozenset[str] | None = None) -> None:
        self._app, self._key, self._watch, self._hosts = app, key, watch, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, sent = time.perf_counter(), 0, 0

        async def watched(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                _secure(MutableHeaders(scope=message))
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._answer(scope, receive, watched)
        except asyncio.CancelledError:  # the service stops, and this request took longer than its grace
            if not status:
                await problem(503, "the service stops; try again later", retry=10)(scope, receive, watched)
        except Exception:
            LOG.exception("failed", extra={"facts": {"route": _route(scope)}})
            if status:  # the answer has begun: cut it, so that it cannot be taken for a whole one
                raise
            await problem(500, "internal error; the log of the service has the details")(scope, receive, watched)
        finally:
            seconds = time.perf_counter() - began
            self._watch.answered(_route(scope), status, seconds)
            facts = {"method": _method(scope), "route": _route(scope), "status": status, "ms": round(1000 * seconds, 1)}
            LOG.info("request", extra={"facts": {**facts, "sent": sent, "client": (scope.get("client") or ["?"])[0]}})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        if self._hosts is not None and _name(headers.get("host", "localhost")) not in self._hosts:
            refusal = problem(
                403, f"the host is {shown(headers['host'])}; use {sorted(self._hosts)[0]}, or start with an API key"
            )
            await refusal(scope, receive, send)
        elif headers.get("sec-fetch-site") in ("cross-site", "same-site") and scope["method"] not in ("GET", "HEAD"):
            refusal = problem(403, "a page of another web site sent this request; use the page of this service")
            await refusal(scope, receive, send)
        elif self._key is not None and not _is_open(path) and not self._key.accepts(headers):
            await problem(401, "the API key is missing or wrong; send Authorization: Bearer KEY")(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _name(host: str) -> str:
    """The host without its port."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdecimal() else host).lower()


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(PAGE_FILES)


def _secure(headers: MutableHeaders) -> None:
    headers.setdefault("Cache-Control", "no-store")
    for name, value in _HEADERS.items():
        headers[name] = value


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "other"


def _route(scope: Scope) -> str:
    """The route of a request as the service defines it; never text that a client chose."""
    return str(getattr(scope.get("route"), "path", "none"))
