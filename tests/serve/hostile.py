"""Requests that no honest client sends, each with the answers that are documented for it."""

import base64
import io
import json
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

CLOSED = None  # the connection was closed without an answer
REFUSED = (400, 422)
MAYBE = (200, *REFUSED)  # damaged, but perhaps still a picture: then the answer must be right
FEW = "/predict?n=16"
POSTS = (FEW, "/votes?n=16", "/noisy?count=1", "/attack?strength=0.1&target=base")


@dataclass(frozen=True)
class Hostile:
    """Bytes to send, and the statuses that may come back."""

    name: str
    parts: Sequence[bytes]
    expected: tuple[int | None, ...]


def request(method: str, path: str, body: bytes = b"", kind: str | None = "application/json", *lines: str) -> bytes:
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", *lines]
    head += [f"Content-Type: {kind}"] if kind is not None else []
    head += [] if any(line.startswith("Connection:") for line in lines) else ["Connection: close"]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in lines):
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join(head).encode("latin-1", "replace") + b"\r\n\r\n" + body


def picture(draw: random.Random, name: str = "PNG", shape: tuple[int, ...] = (28, 28)) -> bytes:
    file = io.BytesIO()
    pixels = np.frombuffer(draw.randbytes(int(np.prod(shape))), np.uint8).reshape(shape)
    Image.fromarray(pixels).save(file, name)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, pixels: bytes, *before: bytes, depth: int = 8, color: int = 0) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(before) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def flipped(draw: random.Random) -> Hostile:
    name = draw.choice(["PNG", "JPEG"])
    data = bytearray(picture(draw, name))
    for _ in range(draw.randint(1, 8)):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return Hostile("bits flipped", [request("POST", draw.choice(POSTS), bytes(data), f"image/{name.lower()}")], MAYBE)


def cut(draw: random.Random) -> Hostile:
    data = picture(draw)
    return Hostile(
        "picture cut", [request("POST", draw.choice(POSTS), data[: draw.randrange(len(data) - 20)], "image/png")], REFUSED
    )


def noise(draw: random.Random) -> Hostile:
    kind = draw.choice(["image/png", "image/jpeg", "application/json"])
    return Hostile("random bytes", [request("POST", draw.choice(POSTS), draw.randbytes(draw.randint(0, 3000)), kind)], REFUSED)


@cache
def bombs() -> list[bytes]:
    """Small files that would be large pictures, texts or color profiles."""
    small = zlib.compress(bytes(29 * 28))
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(30 << 20)))
    profile = chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(30 << 20)))
    inside = [png(28, 28, small, text), png(28, 28, small, profile), png(28, 28, zlib.compress(bytes(50 << 20)))]
    lines = zlib.compress(bytes(1 << 20))
    return [*inside, *(png(side, side, lines) for side in (29, 2000, 20_000, 60_000, 2**31 - 1))]


def bomb(draw: random.Random) -> Hostile:
    return Hostile("decompression bomb", [request("POST", draw.choice(POSTS), draw.choice(bombs()), "image/png")], MAYBE)


def other_shape(draw: random.Random) -> Hostile:
    shape = draw.choice([(27, 28), (28, 27), (1, 1), (28, 28, 3), (3, 28), (64, 64), (224, 224, 3)])
    return Hostile("picture of another shape", [request("POST", FEW, picture(draw, "PNG", shape), "image/png")], REFUSED)


def sixteen_bit(draw: random.Random) -> Hostile:
    data = png(28, 28, zlib.compress(b"".join(b"\0" + draw.randbytes(56) for _ in range(28))), depth=16)
    clear = png(28, 28, zlib.compress(b"".join(b"\0" + draw.randbytes(112) for _ in range(28))), color=6)
    return Hostile("16 bit or transparent", [request("POST", FEW, draw.choice([data, clear]), "image/png")], REFUSED)


VALUES = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e-9", "1.0001", "255", "null", '"0.5"', "true", "[]", "{}", "[0.5]"),
    *("1" * 400, "9" * 5000, "0x10", "1e", "--1", "", '"' + "x" * 1000 + '"'),
)


def value(draw: random.Random) -> Hostile:
    rows = [["0.5"] * 28 for _ in range(28)]
    rows[draw.randrange(28)][draw.randrange(28)] = draw.choice(VALUES)
    text = '{"image":[' + ",".join("[" + ",".join(row) + "]" for row in rows) + "]}"
    return Hostile("one bad value", [request("POST", draw.choice(POSTS), text.encode())], REFUSED)


def structure(draw: random.Random) -> Hostile:
    plain = [[0.5] * 28] * 28
    body = draw.choice(
        [
            *("", "[]", "{}", "null", "7", '"image"', '{"image":null}', '{"image":[]}', '{"image":[[]]}', '{"image":{}}'),
            *("[" * 100_000, '{"image":' * 20_000, '{"image":' + "[" * 30_000 + "]" * 30_000 + "}", "{" * 5000),
            *(
                json.dumps({"image": plain[:27]}),
                json.dumps({"image": [*plain[:27], [0.5] * 27]}),
                json.dumps({"Image": plain}),
            ),
            *(json.dumps({"image": plain, "n": 5}), json.dumps({"image": [[plain]]}), json.dumps({"image": [plain] * 2})),
            *(
                json.dumps([plain]),
                json.dumps({"image": [["x" * 200_000] + ["y"] * 27] * 2}),
                json.dumps({"image": plain})[:-5],
            ),
            json.dumps({"image": [[[0.5] for _ in range(28)] for _ in range(28)]}),
        ]
    )
    return Hostile("bad structure", [request("POST", draw.choice(POSTS), body.encode())], REFUSED)


def bytes_in_json(draw: random.Random) -> Hostile:
    text = bytearray(json.dumps({"image": [[round(draw.random(), 3) for _ in range(28)] for _ in range(28)]}).encode())
    for _ in range(draw.randint(1, 5)):
        text[draw.randrange(len(text))] = draw.randrange(256)
    return Hostile("bytes changed in JSON", [request("POST", FEW, bytes(text))], MAYBE)


def other_type(draw: random.Random) -> Hostile:
    kind = draw.choice(
        [None, "", "text/plain", "image/gif", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "\xff"]
    )
    return Hostile("another content type", [request("POST", draw.choice(POSTS), b"x", kind)], (415,))


def too_large(draw: random.Random) -> Hostile:
    said = draw.choice([2**20 + 1, 100 << 20, 10**15])
    parts = [
        [request("POST", FEW, b"x" * 1000, "image/png", f"Content-Length: {said}")],
        [request("POST", FEW, b"", "image/png", "Content-Length: 104857600"), bytes(3 << 20)],
        [request("POST", FEW, b"", "image/png", "Transfer-Encoding: chunked"), *[b"40000\r\n" + bytes(0x40000) + b"\r\n"] * 6],
    ]
    return Hostile("too large", draw.choice(parts), (413, CLOSED))


def query(draw: random.Random) -> Hostile:
    keys = [
        "n=0",
        "n=-1",
        "n=1e3",
        "n=abc",
        "n=10001",
        "n=" + "9" * 400,
        "alpha=nan",
        "alpha=0",
        "alpha=0.5",
        "alpha=inf",
        "N=5",
    ]
    keys += ["n=5&n=", "sigma=0.1", "alpha=%00", "%FF=1", "n=1;drop", "__class__=1"]
    attack = ["strength=inf", "strength=nan", "strength=-1", "strength=11", "", "strength=1&target=x", "strength=1&label=10"]
    path = draw.choice([f"/predict?{draw.choice(keys)}", f"/attack?{draw.choice(attack)}", "/noisy?count=17", "/noisy?count=0"])
    body = json.dumps({"image": [[0.5] * 28] * 28}).encode()
    return Hostile("bad query", [request("POST", path, body)], (400,))


def route(draw: random.Random) -> Hostile:
    paths = [
        "/x",
        "//",
        "/../../etc/passwd",
        "/page/../../../etc/passwd",
        "/page/%2e%2e/%2e%2e/model.safetensors",
        "/page/..%2fapp.py",
        "/%00",
    ]
    paths += [
        "/gallery/-1",
        "/gallery/10000",
        "/gallery/" + "9" * 400,
        "/gallery/x",
        "/gallery?count=101",
        "/predict",
        "/health/",
        "*",
        "/é",
    ]
    method = draw.choice(["GET", "PUT", "DELETE", "TRACE", "OPTIONS", "PATCH", "HEAD", "CONNECT", "BREW"])
    expected = (400, 404, 405, CLOSED)
    return Hostile("no such route", [request(method, draw.choice(paths), b"", None)], expected)


def protocol(draw: random.Random) -> Hostile:
    body = b'{"image":[[0.5]]}'
    broken = [
        draw.randbytes(200) + b"\r\n\r\n",
        b"GET /x HTTP/9.9\r\n\r\n",
        b"GET /x\r\n\r\n",
        b"\r\n" * 50 + b"x y z w\r\n\r\n",
        b"GET /x HTTP/1.1\r\n" + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET /x HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % i for i in range(5000)) + b"\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n",
        request("POST", FEW, body, "application/json", "Content-Length: -5"),
        request("POST", FEW, body, "application/json", "Content-Length: 5, 6"),
        request("POST", FEW, body, "application/json", "Content-Length: 5", "Content-Length: 9"),
        request("POST", FEW, b"ZZ\r\n", "application/json", "Transfer-Encoding: chunked"),
        request("POST", FEW, body, "application/json", "Transfer-Encoding: gzip"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(300),  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
    return Hostile("not HTTP", [draw.choice(broken)], (400, 403, 404, 422, 501, CLOSED))


def upgrade(draw: random.Random) -> Hostile:
    key = base64.b64encode(draw.randbytes(16)).decode()
    lines = ("Connection: Upgrade", "Upgrade: websocket", f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13")
    return Hostile("WebSocket", [request("GET", "/predict", b"", None, *lines)], (405,))


def pipelined(draw: random.Random) -> Hostile:
    one = request("POST", FEW, b"{}", "application/json", "Connection: keep-alive")
    return Hostile("pipelined", [one * draw.randint(2, 40)], (400,))


KINDS: tuple[Callable[[random.Random], Hostile], ...] = (
    *(flipped, cut, noise, bomb, other_shape, sixteen_bit, value, structure, bytes_in_json),
    *(other_type, too_large, query, route, protocol, upgrade, pipelined),
)


def hostile(number: int) -> Hostile:
    """Request number i of a fixed sequence that goes through all kinds."""
    return KINDS[number % len(KINDS)](random.Random(number))
