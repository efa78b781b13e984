"""Features of frozen layers, computed once: what a head phase trains on.

If only the head trains, everything before it is a fixed function. Each record then gets a fixed set of noisy views, and their
features are computed once, before the first step. The features are private data: they stay in memory and are never written.
A resumed run computes the same features again, because the noise of the views depends on the run key and the record's position.
"""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError
from ..isolation import each_row_alone
from ..methods import Method
from ..models.parts import layers_before_head
from ..rng import POSITIONS_PER_BLOCK, Purpose, normal_at_positions
from ..views import Gaussian, Original, SmoothAdv
from ..workers import parallel_map

_ROWS = 512  # rows (records x views) at a time
LARGEST_BYTES = 8 << 30
ROWS_OF_FEATURES = 1 << 14  # rows at a time in a step: features are far smaller than images
Tell = Callable[[int, int], None]


def method_of_head_phase(method: Method, copies: int) -> Method:
    """Return `method` with `copies` Gaussian views instead of its own; views without noise stay as they are.

    The views of a head phase are drawn once, so adversarial views, which change with the head, become Gaussian ones.
    """
    views = method.views
    if isinstance(views, (Gaussian, SmoothAdv)):
        return replace(method, views=Gaussian(views.sigma, copies, views.keep_original))
    return method


def trunk_of(model: nn.Module, method: Method, input_shape: tuple[int, ...]) -> nn.Module | None:
    """Return the frozen layers before the head, as a module; None if features cannot be stored for this model.

    Views must not depend on the head.
    """
    return layers_before_head(model, input_shape) if type(method.views) in (Gaussian, Original) else None


def stored_features(
    trunk: nn.Module, images: Tensor, method: Method, key: bytes, step: int, device: torch.device, workers: int, tell: Tell
) -> Tensor:
    """Return the features of all views of all records, ``[N, R, features]``.

    The noise is a function of (key, step, position of the record). Each part has the same number of rows, padded if need be:
    the features of a record are the same whatever other records exist.
    """
    views, shape = method.views, tuple(images.shape[1:])
    size = max(1, _ROWS // views.count // POSITIONS_PER_BLOCK) * POSITIONS_PER_BLOCK
    width = trunk(torch.zeros((1, *shape), device=device)).shape[1]
    needed = len(images) * views.count * width * 4
    if needed > LARGEST_BYTES:
        raise ConfigError(
            f"head.copies is {views.copies}: the features of {len(images)} records need {needed / 2**30:.0f} GiB; lower it"
        )
    stored = torch.empty((len(images), views.count, width), device=device)

    def work(forward: Callable[[Tensor], Tensor], start: int) -> tuple[int, Tensor]:
        x = images[start : start + size].to(device)
        records = len(x)
        x = F.pad(x, (0, 0) * (images.ndim - 1) + (0, size - records))
        noise = normal_at_positions(key, Purpose.VIEWS, start, start + size, (views.copies, *shape), device, step)
        rows = views(trunk, x, torch.zeros(size, dtype=torch.long, device=device), noise).flatten(0, 1)
        with torch.inference_mode():
            return start + records, torch.unflatten(forward(rows), 0, (size, views.count))[:records]

    trunk.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    forwards = [each_row_alone(copy.deepcopy(trunk), shape) for _ in range(workers)]
    for done, features in parallel_map(forwards, work, range(0, len(images), size)):
        stored[done - len(features) : done] = features
        tell(done, len(images))
    return stored
