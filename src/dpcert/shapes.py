"""What the shape of an array of images says: the order of its axes, and whether a model takes it."""

from collections.abc import Sequence

LARGEST_IMAGE = 1 << 22  # numbers in one image: a model for more would not fit in memory
_CHANNELS = (1, 3, 4)


def channels_last(shape: Sequence[int]) -> bool:
    """Whether one image of this shape looks like ``[h, w, channels]``: 1, 3 or 4 at the end, more in both places before."""
    return len(shape) == 3 and shape[2] in _CHANNELS and min(shape[0], shape[1]) > shape[2]


def transpose_advice(shape: Sequence[int]) -> str:
    """How to put the channels of an array first: of one image (three axes) or of many (four)."""
    if len(shape) == 3:
        return "the image looks like [H,W,C]; transpose it to [C,H,W]: x.transpose(2, 0, 1)"
    return "images look like [N,H,W,C]; transpose to [N,C,H,W]: x.transpose(0, 3, 1, 2)"


def mismatch(found: Sequence[int], expected: Sequence[int]) -> str | None:
    """Why a model for images ``[channels, h, w]`` of shape `expected` does not take one of shape `found`; None if it does."""
    (channels, *size), (wanted_channels, *wanted_size) = found, expected
    if list(found) == list(expected):
        return None
    if size != wanted_size:
        return f"is {_text(size)}, the model takes {_text(wanted_size)}; resize it"
    kind = "a grey image" if wanted_channels == 1 else f"{wanted_channels} channels"
    many = f", or {channels} images as [{channels}, 1, {size[0]}, {size[1]}]" if wanted_channels == 1 and channels > 4 else ""
    return f"has {channels} channel{'s' if channels > 1 else ''}, the model takes {wanted_channels}; give {kind}{many}"


def _text(size: Sequence[int]) -> str:
    return f"{size[0]} x {size[1]}"
