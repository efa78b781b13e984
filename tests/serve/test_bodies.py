"""Bodies: whatever the bytes, an image of the model's shape in [0, 1], or a refusal with a documented status."""

import io
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from dpcert.serve.bodies import image_of
from dpcert.serve.refusals import RefusedError

GRAY, COLOR = (1, 4, 3), (3, 4, 3)
KINDS = ("application/json", "image/png", "image/jpeg")


def read(kind: str, body: bytes, shape=GRAY):
    """The image, or the status of the refusal; anything else is a bug."""
    try:
        image = image_of(kind, body, shape)
    except RefusedError as error:
        assert error.status in (400, 422) and 10 < len(str(error)) < 600
        return error.status
    assert image.shape == shape and image.dtype == torch.float32
    assert bool(torch.isfinite(image).all()) and image.min() >= 0 and image.max() <= 1
    return image


def encoded(pixels: np.ndarray, name: str, mode: str | None = None) -> bytes:
    file = io.BytesIO()
    (Image.fromarray(pixels) if mode is None else Image.fromarray(pixels).convert(mode)).save(file, name)
    return file.getvalue()


@given(st.sampled_from(KINDS), st.binary(max_size=400), st.sampled_from([GRAY, COLOR]))
@settings(max_examples=150)
def test_any_bytes(kind, body, shape):
    read(kind, body, shape)


values = st.one_of(st.floats(), st.integers(-(10**30), 10**30), st.booleans(), st.none(), st.text(max_size=5))
nested = st.recursive(values, lambda inner: st.lists(inner, max_size=5), max_leaves=30)


@given(st.one_of(nested, st.dictionaries(st.sampled_from(["image", "Image", ""]), nested, max_size=2)))
@example({"image": [[0.5, 0.5, 0.5]] * 4})
@example({"image": [[["x" * 10**6, 0.5, 0.5]] * 4]})
@example({"image": [[10**400, 0, 0]] * 4})
@settings(max_examples=200)
def test_any_json(content):
    read("application/json", json.dumps(content).encode())


@given(st.lists(st.lists(st.floats(-1, 2), min_size=3, max_size=3), min_size=4, max_size=4))
@settings(max_examples=60)
def test_json_arrives_exactly_or_is_refused(rows):
    found = read("application/json", json.dumps({"image": rows}).encode())
    inside = all(0 <= value <= 1 for row in rows for value in row)
    assert torch.equal(found, torch.tensor([rows], dtype=torch.float32)) if inside else found == 422


@given(st.binary(min_size=12, max_size=12), st.sampled_from(["PNG", "JPEG"]))
@settings(max_examples=40)
def test_a_gray_picture_arrives_and_fills_every_channel(pixels, name):
    array = np.frombuffer(pixels, np.uint8).reshape(4, 3)
    for shape in (GRAY, COLOR):
        found = read(f"image/{name.lower()}", encoded(array, name), shape)
        assert torch.equal(found, found[:1].expand(shape))
        if name == "PNG":
            assert torch.equal(found[0], torch.from_numpy(array.astype(np.float32) / 255))


@given(st.data())
@settings(max_examples=150)
def test_damaged_pictures(data):
    name = data.draw(st.sampled_from(["PNG", "JPEG"]))
    whole = encoded(np.arange(36, dtype=np.uint8).reshape(4, 3, 3), name)
    body = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for place in data.draw(st.lists(st.integers(0, max(0, len(body) - 1)), max_size=4)) if body else []:
        body[place] = data.draw(st.integers(0, 255))
    read(f"image/{name.lower()}", bytes(body), COLOR)


@pytest.mark.parametrize("length", [0.3, 0.6, 0.9])
def test_a_truncated_picture_is_never_half_an_image(length):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    for name in ("PNG", "JPEG"):
        whole = encoded(pixels, name)
        assert read(f"image/{name.lower()}", whole[: int(length * len(whole))], (1, 64, 64)) == 400


def test_pictures_that_eight_bits_would_change_are_refused():
    deep = encoded(np.full((4, 3), 300, np.uint16), "PNG")
    clear = encoded(np.zeros((4, 3, 4), np.uint8), "PNG")
    solid = np.zeros((4, 3, 4), np.uint8)
    solid[..., 3] = 255
    assert read("image/png", deep) == read("image/png", clear, COLOR) == 400
    assert not isinstance(read("image/png", encoded(solid, "PNG"), COLOR), int)


def test_the_content_type_decides_the_reader():
    picture = encoded(np.zeros((4, 3), np.uint8), "PNG")
    assert read("image/jpeg", picture) == read("application/json", picture) == 400
    for name in ("BMP", "GIF", "TIFF", "PPM"):
        assert read("image/png", encoded(np.zeros((4, 3), np.uint8), name)) == 400


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400", "-0.001", "1.001", "null", '"0.5"', "true", "[0.5]"])
def test_one_bad_value_refuses_the_image(text):
    body = '{"image":[[' + text + ",0.5,0.5]" + ",[0.5,0.5,0.5]" * 3 + "]}"
    assert read("application/json", body.encode()) in (400, 422)
    assert math.isfinite(float(read("application/json", body.replace(text, "0.25", 1).encode()).sum()))
