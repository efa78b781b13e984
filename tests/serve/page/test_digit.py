"""A drawing becomes what the makers of MNIST made of theirs."""

import numpy as np
import pytest

from dpcert.data.registry import load_dataset
from tests.serve.page.node import in_node, needs_node

pytestmark = needs_node
NORMALIZED = """
const { normalized } = await import("./digit.js");
return given.map((ink) => [...normalized(Float32Array.from(ink), 280, 28)]);
"""


def drawn(image, zoom, dx, dy):
    """A digit on a fine pad of 280 x 280: larger, somewhere else."""
    fine = np.kron(image, np.ones((zoom, zoom)))
    inked = np.argwhere(fine > 0.1)
    (top, left), (bottom, right) = inked.min(axis=0), inked.max(axis=0) + 1
    pad = np.zeros((280, 280))
    pad[dy : dy + bottom - top, dx : dx + right - left] = fine[top:bottom, left:right]
    return pad


@pytest.fixture(scope="module")
def digits():
    return load_dataset("mnist").x_test[:12, 0].numpy()


def test_a_digit_drawn_elsewhere_and_larger_is_the_digit_again(digits):
    pads = [drawn(image, 7 + number % 4, 5 + number, 40 - 2 * number) for number, image in enumerate(digits)]
    ours = np.array(in_node(NORMALIZED, [pad.ravel().round(3).tolist() for pad in pads])).reshape(-1, 28, 28)
    errors, twin = (np.abs(shifted - digits).mean() for shifted in (ours, np.roll(ours, 1, axis=2)))
    assert errors < 0.01 and twin > 5 * errors  # twin: one pixel off


def test_the_center_of_mass_is_in_the_middle_and_the_longer_side_is_20(digits):
    ours = np.array(in_node(NORMALIZED, [drawn(digits[0], 8, 60, 3).ravel().round(3).tolist()])[0]).reshape(28, 28)
    places = np.arange(28) + 0.5
    for axis in (0, 1):
        assert 14 <= (ours.sum(axis=axis) * places).sum() / ours.sum() < 15
    rows = np.flatnonzero(ours.max(axis=1) > 0.1)
    assert rows.max() - rows.min() + 1 == 20
    assert ours.min() >= 0 and ours.max() <= 1


def test_an_empty_drawing_is_black():
    assert not any(in_node(NORMALIZED, [[0] * 78400])[0])
