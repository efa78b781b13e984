"""Image array shapes: the order of the axes, and whether a model accepts them."""

from collections.abc import Sequence

LARGEST_IMAGE = 1 << 22  # values in one image: a model for more would not fit in memory
_CHANNELS = (1, 3, 4)


def channels_last(shape: Sequence[int]) -> bool:
    """Return whether an image shape looks like ``[h, w, channels]``: 1, 3 or 4 at the end, and larger h and w."""
    return len(shape) == 3 and shape[2] in _CHANNELS and min(shape[0], shape[1]) > shape[2]


def transpose_advice(shape: Sequence[int]) -> str:
    """Say how to put the channels first, for one image (three axes) or many (four)."""
    if len(shape) == 3:
        return "the image looks like [H,W,C]; transpose it to [C,H,W]: x.transpose(2, 0, 1)"
    return "images look like [N,H,W,C]; transpose to [N,C,H,W]: x.transpose(0, 3, 1, 2)"


def mismatch(shape: Sequence[int], expected: Sequence[int]) -> str | None:
    """Return why a model for images ``[channels, h, w]`` of shape `expected` rejects an image of `shape`; None if it fits."""
    (channels, *size), (wanted_channels, *wanted_size) = shape, expected
    if list(shape) == list(expected):
        return None
    if size != wanted_size:
        return f"is {_text(size)}, the model takes {_text(wanted_size)}; resize it"
    kind = "a grayscale image" if wanted_channels == 1 else f"{wanted_channels} channels"
    many = f", or {channels} images as [{channels}, 1, {size[0]}, {size[1]}]" if wanted_channels == 1 and channels > 4 else ""
    return f"has {channels} channel{'s' if channels > 1 else ''}, the model takes {wanted_channels}; give {kind}{many}"


def _text(size: Sequence[int]) -> str:
    return f"{size[0]} x {size[1]}"
