"""SecureSGD's noise weights from the private records: one release, charged before it is computed.

Every record has a vector: for each channel of the noisy layer, the mean of |dLoss/dh| over its places, at the weights before
training and without noise. The vectors are clipped to an L2 norm, summed in float64, noised and divided by the public N. The
weights r and the noise scales are functions of this release: they are public, and stored with the model.

Guarantee: adding or removing one record moves the sum by at most the clip norm of the phase. The release is the first step of
the plan, a Gaussian mechanism with q = 1, and its noise is that of step 0 under the run key: no other step draws it, and a
resumed run repeats it.
"""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from ..data.ahead import as_in_steps
from ..data.dataset import Dataset
from ..gradients.engine import Clip, ClippedSum, FirstOnly, clip_and_sum
from ..models.noisy import NoisyModel
from ..models.systems import of_channels, probed_copy
from ..scale.world import ALONE, World
from ..workers import parallel_map, worker_count
from .step import StopAskedError, never

_ROWS = 128  # records at a time, whatever their number: rounding does not depend on it
Tell = Callable[[int, int], None]


def _untold(done: int, total: int) -> None:
    pass


def clipped_sum(
    model: NoisyModel,
    data: Dataset,
    clip: Clip,
    world: World = ALONE,
    tell: Tell = _untold,
    stop_asked: Callable[[], bool] = never,
) -> ClippedSum:
    """Return the sum of the clipped vectors of this rank's share of the records, ``[K]``, float64.

    A record whose vector is not finite contributes 0.
    """
    device, images = model.scales.device, as_in_steps(data.x_train)
    probed = probed_copy(model, torch.Generator().manual_seed(0))
    parts = range(0, len(data.y_train), _ROWS)
    nothing = torch.zeros(0, dtype=torch.float64, device=device)
    total = ClippedSum(nothing.new_zeros(len(model.scales)), clip.sensitivity, nothing)

    def work(tool: NoisyModel, start: int) -> ClippedSum:
        x, labels = (values[start : start + _ROWS].to(device) for values in (images, data.y_train))
        present, missing = len(x), _ROWS - len(x)
        x, labels = F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)), F.pad(labels, (0, missing))
        return clip_and_sum([vulnerabilities_of(tool, x, labels)], FirstOnly(clip, present))

    own = world.share(len(parts))
    tools = [copy.deepcopy(probed) for _ in range(worker_count(device))]
    for done, part in enumerate(parallel_map(tools, work, parts[own.start : own.stop]), start=1):
        total = total + part
        tell(done, len(own))
        if stop_asked():
            raise StopAskedError
    return total


def vulnerabilities_of(model: NoisyModel, x: Tensor, labels: Tensor) -> Tensor:
    """Return the vector of each record, ``[n, K]``. Each is computed as a batch of one, in which no other record exists."""

    def slope_of_one(image: Tensor, label: Tensor) -> Tensor:
        def loss(hidden: Tensor) -> Tensor:
            return F.cross_entropy(model.rest(hidden), label.unsqueeze(0))

        slope: Tensor = grad(loss)(model.hidden(image.unsqueeze(0)))
        return slope.squeeze(0)

    with torch.no_grad():
        return of_channels(vmap(slope_of_one)(x, labels))
