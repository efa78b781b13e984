"""Images in the bodies of requests: bounded in size, time and memory, and checked before the model sees them."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import numpy as np
from fastapi import Request
from starlette.requests import ClientDisconnect
from torch import Tensor

from .._validate import shown
from ..errors import DataError
from ..models.factory import Shape
from ..runs.predict import checked_images, decoded_picture
from .refusals import RefusedError
from .settings import BODIES_IN_MEMORY, Limits

_JSON, _PICTURES = "application/json", {"image/png": "PNG", "image/jpeg": "JPEG"}
_MOST_AXES = 3
BODY = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in _PICTURES} | {
    _JSON: {
        "schema": {
            "type": "object",
            "required": ["image"],
            "additionalProperties": False,
            "properties": {"image": {"type": "array", "description": "[h][w] or [c][h][w], values in [0, 1]", "items": {}}},
        }
    }
}


class Bodies:
    """Reads bodies. All bodies in memory together have at most `BODIES_IN_MEMORY` times the size limit of one."""

    def __init__(self, shape: Shape, limits: Limits) -> None:
        self.shape = shape
        self.most = limits.most_body_bytes(int(np.prod(shape)))
        self._seconds, self._held = limits.reading_seconds, 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[tuple[str, bytes]]:
        """Yield the content type and the bytes; they count as in memory until the end of the context."""
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != _JSON and kind not in _PICTURES:
            raise RefusedError(415, f"the content type is {shown(kind)}; send {', '.join((*_PICTURES, _JSON))}")
        if int(request.headers.get("content-length") or 0) > self.most:
            self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._seconds):
                async for part in request.stream():
                    self._hold(body, part)
            yield kind, bytes(body)
        except TimeoutError:
            raise RefusedError(408, f"the body did not arrive within {self._seconds:g} seconds; send it faster") from None
        except ClientDisconnect:
            raise RefusedError(400, "the upload ended before the body was complete; send it again") from None
        finally:
            self._held -= len(body)

    def _hold(self, body: bytearray, part: bytes) -> None:
        if len(body) + len(part) > self.most:
            self._too_large()
        if self._held + len(part) > BODIES_IN_MEMORY * self.most:
            raise RefusedError(503, "too many large requests at a time; try again later", retry=1)
        body += part
        self._held += len(part)

    def _too_large(self) -> NoReturn:
        raise RefusedError(413, f"the body is too large, the limit is {self.most} bytes; resize the image to the model's size")


def image_of(kind: str, body: bytes, shape: Shape) -> Tensor:
    """The image of a body, ``[channels, height, width]`` in [0, 1]. 400 if it cannot be read, 422 if it does not fit."""
    array = _from_json(body) if kind == _JSON else _from_picture(kind, body, shape)
    try:
        image = checked_images(array, "the image", shape, gray_is_repeated=kind != _JSON)
    except DataError as error:
        raise RefusedError(422, str(error)) from error
    if image.ndim != len(shape):
        raise RefusedError(422, f"the image has shape {list(image.shape)}, must be one image of shape {list(shape)}")
    return image


def _from_picture(kind: str, body: bytes, shape: Shape) -> np.ndarray:
    try:
        return decoded_picture(body, (_PICTURES[kind],), shape[1] * shape[2])
    except Exception as error:  # Pillow raises many kinds of errors on damaged pictures
        why = str(error) if isinstance(error, DataError) else "it cannot be decoded"
        raise RefusedError(
            400,
            f"the body is not a complete {_PICTURES[kind]} picture of {shape[2]} x {shape[1]} opaque 8-bit pixels ({why}); "
            "resize or convert it",
        ) from error


def _from_json(body: bytes) -> np.ndarray:
    try:
        content = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f'the body is not JSON ({_short(error)}); send {{"image": [[...]]}}') from error
    if not isinstance(content, dict) or list(content) != ["image"]:
        found = shown(sorted(content)) if isinstance(content, dict) else f"a {type(content).__name__}"
        raise RefusedError(400, f'the JSON is {found}, must be one object with the key "image": {{"image": [[...]]}}')
    axes = _axes(content["image"])
    if not 2 <= axes <= _MOST_AXES:
        raise RefusedError(422, f"the image has {axes} axes, must have 2 ([h][w]) or 3 ([c][h][w])")
    if not all(type(value) in (int, float) for value in _leaves(content["image"], axes)):
        raise RefusedError(422, f"the image must be numbers in [0, 1] in {axes} levels of lists, all of the same length")
    try:
        return np.array(content["image"], dtype=np.float64)
    except (ValueError, OverflowError) as error:  # rows of different lengths; integers of hundreds of digits
        raise RefusedError(422, "the rows of the image have different lengths, or a value is too large") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _axes(value: Any) -> int:
    """How deeply lists are nested at their first element, at most one more than allowed."""
    axes = 0
    while isinstance(value, list) and axes <= _MOST_AXES:
        axes, value = axes + 1, value[0] if value else None
    return axes


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    """The elements at a depth; a shallower element that is not a list is returned itself."""
    if depth == 0 or not isinstance(value, list):
        yield value if depth == 0 else None
        return
    for element in value:
        yield from _leaves(element, depth - 1)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) if not isinstance(error, RecursionError) else "nested too deeply"
    return text[:120]
