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
from torch import Tensor, fx, nn

from ..errors import ConfigError
from ..isolation import Forward, each_row_alone
from ..methods import Method, noise_shape, view_shape
from ..models.folding import fold_norms
from ..models.parts import layers_before_head
from ..rng import POSITIONS_PER_BLOCK, Purpose, normal_at_positions
from ..scale.world import World
from ..views import Gaussian, Inner, InnerOnce, Original, SmoothAdv, StoBatch
from ..workers import parallel_map

_ROWS = 512  # rows (records x views) of a part
_ROWS_AT_ONCE = 128  # rows of a pass: their activations stay near the cache, and the memory of one pass serves the next
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LARGEST_BYTES = 8 << 30
ROWS_OF_FEATURES = 1 << 14  # rows at a time in a step: features are far smaller than images
Tell = Callable[[int, int], None]


def method_of_head_phase(method: Method, copies: int) -> Method:
    """Return `method` with `copies` Gaussian views instead of its own; views without noise stay as they are.

    The views of a head phase are drawn once, so adversarial views, which change with the head, become Gaussian ones, or noisy
    ones inside the model. The head sees features only, so columns after the logits are left out.
    """
    views = method.views
    if isinstance(views, (Inner, StoBatch)):
        noisy = (
            Inner(views.sigma, copies, views.keep_original) if isinstance(views, StoBatch) else replace(views, copies=copies)
        )
        return replace(method, views=noisy, regulariser=None if method.columns else method.regulariser)
    if isinstance(views, (Gaussian, SmoothAdv)):
        return replace(method, views=Gaussian(views.sigma, copies, views.keep_original))
    return method


def trunk_of(model: nn.Module, method: Method, input_shape: tuple[int, ...]) -> nn.Module | None:
    """Return the frozen layers before the head, as a module; None if features cannot be stored for this model.

    Views must not depend on the head.
    """
    return layers_before_head(model, input_shape) if type(method.views) in (Gaussian, Original, Inner, InnerOnce) else None


def _records_at_a_time(method: Method) -> int:
    return max(1, _ROWS // method.views.count // POSITIONS_PER_BLOCK) * POSITIONS_PER_BLOCK


def records_of_rank(world: World, method: Method, records: int) -> range:
    """Return the records whose features this rank computes and stores: whole parts, so that no feature depends on the ranks."""
    size = _records_at_a_time(method)
    parts = world.share(-(-records // size))
    return range(min(parts.start * size, records), min(parts.stop * size, records))


def stored_features(
    trunk: nn.Module,
    images: Tensor,
    method: Method,
    key: bytes,
    step: int,
    device: torch.device,
    workers: int,
    tell: Tell,
    records: range | None = None,
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """Return the features of all views of `records` (of all records unless given), ``[N, R, features]``, float32.

    The noise is a function of (key, step, position of the record). Each part has the same number of rows, padded if need be,
    and is computed in passes of fixed sizes: the features of a record are the same whatever other records exist.
    """
    views, shape = method.views, tuple(images.shape[1:])
    noise_of_one, seen = noise_shape(views, trunk, shape), view_shape(views, trunk, shape)
    size, records = _records_at_a_time(method), range(len(images)) if records is None else records
    width = trunk(torch.zeros((1, *shape), device=device)).shape[1]
    needed = len(records) * views.count * width * 4
    if needed > LARGEST_BYTES:
        raise ConfigError(
            f"head.copies is {views.copies}: the features of {len(records)} records need {needed / 2**30:.0f} GiB; lower it"
        )
    stored = torch.empty((len(records), views.count, width), device=device)

    def work(forward: Callable[[Tensor], Tensor], start: int) -> tuple[int, Tensor]:
        x = images[start : min(start + size, records.stop)].to(device)
        present = len(x)
        x = F.pad(x, (0, 0) * (images.ndim - 1) + (0, size - present))
        noise = normal_at_positions(key, Purpose.VIEWS, start, start + size, (views.copies, *noise_of_one), device, step)
        rows = views(trunk, x, torch.zeros(size, dtype=torch.long, device=device), noise).flatten(0, 1)
        with torch.inference_mode():
            done = start + present - records.start
            features = torch.cat([forward(some) for some in rows.split(_ROWS_AT_ONCE)])  # type: ignore[no-untyped-call]
            return done, torch.unflatten(features, 0, (size, views.count))[:present]

    forwards = [_prepared(copy.deepcopy(trunk), seen, precision) for _ in range(workers)]
    for done, features in parallel_map(forwards, work, range(records.start, records.stop, size)):
        stored[done - len(features) : done] = features
        tell(done, len(records))
    return stored


def _prepared(trunk: nn.Module, shape: tuple[int, ...], precision: torch.dtype) -> Forward:
    """Return the trunk as a function of rows that computes in `precision` and returns float32; no row can see another.

    A trunk with a proof is rewritten for speed: channels last, and without BatchNorm.
    """
    alone = each_row_alone(trunk, shape)
    if isinstance(alone, nn.Module):
        alone = fold_norms(alone if isinstance(alone, fx.GraphModule) else fx.symbolic_trace(alone))
        alone.to(precision, memory_format=torch.channels_last)  # type: ignore[call-overload]
    else:
        trunk.to(precision)
    return lambda rows: alone(rows.to(precision)).float()
