"""Batch size, learning rate and epochs for custom data, from public numbers: N, the shape of an image, and the settings.

Each preset is tuned for one data set. For other data, the values below replace those of the preset unless the user sets them.
They are a starting point, not a tuned optimum, and do not depend on the records. The anchors are the two presets at N = 60,000:

* MNIST uses B = 512 and a learning rate of 0.5, Fashion-MNIST 2,048 and 4. The geometric means are about 1,024 and sqrt(2).
* B grows with the square root of N (B = 4 sqrt(N), rounded to a power of two). With B proportional to N, the batches of a
  small data set would be tiny and dominated by noise; with a constant B, there would be too few steps, each with more noise.
* The learning rate grows with B, as it does between the two presets (Tramer and Boneh 2021), and falls with C, because the
  length of a step is proportional to their product. Beyond 28 x 28 pixels it falls with the square root of the number of
  pixels: there are more weights, and the norm of the noise grows with the square root of their number.
* 40 epochs, as in both presets, but at most about 2,500 steps, because all steps share the same budget.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

KEYS = ("batch_size", "learning_rate", "epochs")
_BATCH_OVER_ROOT = 4.0
_ANCHOR_BATCH, _ANCHOR_RATE, _ANCHOR_CLIP, _ANCHOR_PIXELS = 1024, math.sqrt(2.0), 0.1, 28 * 28
_LARGEST_RATE = 4.0  # that of Fashion-MNIST
_MOST_ALLOWED = 1e6  # what train.learning_rate accepts, for a tiny clip norm
_EPOCHS, _MOST_STEPS = 40.0, 2500
_RATE_WITHOUT_CLIPPING = 0.01  # the authors' value; gradients are not clipped
_RATE_OF_ADAM = 0.001  # the step size of Adam does not depend on the gradient norm


@dataclass(frozen=True)
class TrainingDefaults:
    """Values for the keys of ``[train]`` that the user did not set."""

    batch_size: int
    learning_rate: float
    epochs: float


def training_defaults(
    records: int, input_shape: Sequence[int], *, optimizer: str = "sgd", clip_norm: float = _ANCHOR_CLIP, clips: bool = True
) -> TrainingDefaults:
    """The values for `records` public records of images of this shape; see the module docstring for the reasons."""
    batch = min(records, 2 ** round(math.log2(_BATCH_OVER_ROOT * math.sqrt(records))))
    epochs = max(1.0, min(_EPOCHS, float(round(_MOST_STEPS * batch / records))))
    if optimizer != "sgd":
        rate = _RATE_OF_ADAM
    elif not clips:
        rate = _RATE_WITHOUT_CLIPPING
    else:
        smaller = min(1.0, math.sqrt(_ANCHOR_PIXELS / math.prod(input_shape)))
        rate = min(_LARGEST_RATE, _ANCHOR_RATE * batch / _ANCHOR_BATCH) * (_ANCHOR_CLIP / clip_norm) * smaller
        rate = min(_MOST_ALLOWED, rate)
    return TrainingDefaults(batch, float(f"{rate:.2g}"), epochs)


def in_words(chosen: TrainingDefaults, keys: Sequence[str], records: int, size_given: bool, input_shape: Sequence[int]) -> str:
    """One line that says which values were chosen, based on what, and how to override them."""
    values = ", ".join(f"train.{key}={getattr(chosen, key):g}" for key in keys)
    source = "data.size" if size_given else "the number of training records, treated as public"
    shape = " x ".join(str(size) for size in input_shape)
    return (
        f"custom data: chose {values} for N = {records} ({source}) and images of {shape}; the presets are tuned for other "
        "data. Override with --set"
    )
