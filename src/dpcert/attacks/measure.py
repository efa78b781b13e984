"""Measure which images a classifier, or its smoothed version, still classifies correctly under attack."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._validate import finite_in, integer_in
from ..certification.smooth import Counter
from ..certification.sweep import SmoothedClassifier
from ..certification.votes import device_of
from ..input_gradients import for_input_gradients
from ..models.noisy import NoisyModel
from ..rng import Purpose, bulk_normal
from ..views.smoothadv import uphill
from ..workers import parallel_map, worker_count
from .kinds import LINF, Attack
from .norms import L2, Ball, Linf

_ROWS_ON_CPU, _ROWS_ELSEWHERE = 128, 2048  # through the model at once
_NOISE_PARTS = 1 << 20  # first noise part of an example's random stream; the parts below it are the random starts
Tell = Callable[[int], None]  # called with the number of finished ascents


def _silent(ascents: int) -> None:
    """Do nothing."""


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Images:
    """Test images with their labels and indices."""

    x: Tensor
    labels: Tensor
    indices: Sequence[int]

    def parts(self, rows: int) -> list["Images"]:
        """Split into batches of `rows` images."""
        return [self[first : first + rows] for first in range(0, len(self.x), rows)]

    def __getitem__(self, place: slice) -> "Images":
        return Images(self.x[place], self.labels[place], self.indices[place])


@dataclass(frozen=True)
class SmoothedTarget:
    """The smoothed classifier under attack: `draws` noise samples per gradient step, `votes` fresh ones for the result.

    If the model has noise inside, that noise is drawn, and `sigma` is what it is worth.
    """

    sigma: float
    draws: int = 16
    votes: int = 1000

    def __post_init__(self) -> None:
        finite_in("sigma", self.sigma, 0.0, 100.0, open_low=True, remedy="the paper uses 0.25, 0.5 and 1.0")
        integer_in("draws", self.draws, 1, 100_000)
        integer_in("--n", self.votes, 1, 10**7)


def perturbed(
    model: nn.Module,
    images: Images,
    how: Attack,
    strength: float,
    key: bytes,
    start: int = 0,
    smoothing: SmoothedTarget | None = None,
    between: Callable[[], None] = _nothing,
) -> Tensor:
    """Return where one start of an attack ends: on the base model at the first wrong class, otherwise after the last step.

    With `smoothing` it attacks the smoothed classifier. `between` is called between two steps; what it raises ends the attack.
    """
    return _ascent(_prepared(model), images, how, strength, key, start, smoothing, between)[0]


def base_right(
    model: nn.Module, images: Images, how: Attack, strength: float, key: bytes, batch: int | None = None, tell: Tell = _silent
) -> Tensor:
    """Return whether the base model is correct at every point that the attack tries, for each image; ``[b]``.

    PGD tries the image itself, its random starts and every point on its path. FGSM tries one point, as in the paper.
    """
    copies, rows = _copies(model), batch or _rows(model)

    def work(target: nn.Module, part: Images) -> Tensor:
        right = torch.ones(len(part.x), dtype=torch.bool) if how.is_single else _is_right(target, part.x, part.labels)
        for start in range(how.starts):
            here = right.nonzero()[:, 0]
            left = Images(part.x[here], part.labels[here], [part.indices[place] for place in here.tolist()])
            right[here] = _ascent(target, left, how, strength, key, start, None)[1]
        tell(len(part.x) * how.starts)
        return right

    return torch.cat(list(parallel_map(copies, work, images.parts(rows))))


def smoothed_right(
    model: nn.Module,
    images: Images,
    how: Attack,
    strength: float,
    key: bytes,
    smoothing: SmoothedTarget,
    batch: int | None = None,
    tell: Tell = _silent,
) -> Tensor:
    """Return whether the smoothed classifier is correct at every point that the attack tries, for each image; ``[b]``.

    The ascent is on -log( mean_j F(x' + eta_j)_y ) with new noise in each step (expectation over transformation, SmoothAdv's
    loss). The result is a majority of `votes` votes with noise that no ascent has seen: correct if the label has more votes
    than any other class. There is no alpha: an image whose two top classes are about even may go either way.
    """
    candidates = [] if how.is_single else [images.x]
    parts = images.parts(batch or max(1, _rows(model) // smoothing.draws))
    for start in range(how.starts):

        def work(target: nn.Module, part: Images, start: int = start) -> Tensor:
            moved, _ = _ascent(target, part, how, strength, key, start, smoothing)
            tell(len(part.x))
            return moved

        candidates.append(torch.cat(list(parallel_map(_copies(model), work, parts))))
    right = torch.ones(len(images.x), dtype=torch.bool)
    needed = {Purpose.PREDICT: smoothing.votes * len(candidates)}
    sigma = None if isinstance(model, NoisyModel) else smoothing.sigma
    with SmoothedClassifier(model, sigma).voting(images.x, key, needed) as counters:
        for number, points in enumerate(candidates):
            first = number * smoothing.votes

            def is_right(counter: Counter, place: int, points: Tensor = points, first: int = first) -> bool:
                index, label = images.indices[place], int(images.labels[place])
                votes = counter.count(points[place], first, first + smoothing.votes, Purpose.PREDICT, index)
                for_label, votes[label] = votes[label], -1
                return bool(for_label > votes.max())

            standing = right.nonzero()[:, 0].tolist()
            for place, stays in zip(standing, parallel_map(counters, is_right, standing), strict=True):
                right[place] = stays
    return right


def _ascent(
    target: nn.Module,
    images: Images,
    how: Attack,
    strength: float,
    key: bytes,
    start: int,
    smoothing: SmoothedTarget | None,
    between: Callable[[], None] = _nothing,
) -> tuple[Tensor, Tensor]:
    """Return where one ascent ends, and whether the base model was correct at each point that the attack tries.

    On the base model (`smoothing` None) an image stops at its first wrong class. The smoothed classifier is evaluated by the
    caller.
    """
    ball, device = _ball(how), device_of(target)
    x, labels = images.x.to(device), images.labels.to(device)
    moved, here = _begin(ball, x, images.indices, how, strength, key, start), torch.arange(len(x), device=device)
    ends, right = moved.clone(), torch.ones(len(x), dtype=torch.bool, device=device)
    for number in range(how.steps + 1):
        if number > 0:
            between()
            part = _NOISE_PARTS + start * how.steps + number - 1
            noise = _no_noise(moved) if smoothing is None else _noises(target, smoothing, x, images.indices, key, part)
            moved = ball.step(x, moved, _slope(target, moved, labels, noise), strength, how.step(strength))
            ends[here] = moved
        if smoothing is None and (number > 0 or not how.is_single):
            stays = _is_right(target, moved, labels).to(device)
            right[here[~stays]] = False
            x, labels, moved, here = x[stays], labels[stays], moved[stays], here[stays]
        if len(here) == 0:
            break
    return ends.cpu(), right.cpu()


def _begin(ball: Ball, x: Tensor, indices: Sequence[int], how: Attack, strength: float, key: bytes, start: int) -> Tensor:
    if how.is_single or len(x) == 0:
        return x
    return torch.stack([ball.random(key, image, index, start, strength) for image, index in zip(x, indices, strict=True)])


def _no_noise(x: Tensor) -> Tensor:
    """Return one view without noise: its smoothed loss is the base model's cross-entropy."""
    return torch.zeros_like(x).unsqueeze(1)


def _noises(target: nn.Module, smoothing: SmoothedTarget, x: Tensor, indices: Sequence[int], key: bytes, part: int) -> Tensor:
    """Return ``[b, draws, ...]``, separate noise for each example: for its image, or for its packed row if noise is inside."""

    def drawn(*shape: int) -> Tensor:
        size = (smoothing.draws, *shape)
        return torch.stack([bulk_normal(key, Purpose.ATTACK, size, x.device, index, part) for index in indices])

    if not isinstance(target, NoisyModel):
        return drawn(*x.shape[1:]).mul_(smoothing.sigma)
    noise = drawn(target.image_size + target.noise_size)
    noise[..., : target.image_size].mul_(target.input_scale)
    return noise


def _slope(target: nn.Module, x: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
    """Return the gradient for the images `x` of the loss with this noise, on images or on packed rows."""
    if not isinstance(target, NoisyModel) or noise.shape[2:] == x.shape[1:]:
        return uphill(target, x, labels, noise)
    rows = target.pack(x, x.new_zeros((len(x), *target.hidden_shape)))
    return uphill(target, rows, labels, noise)[:, : target.image_size].reshape(x.shape)


def _is_right(target: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Return whether the predicted class is the label; NaN logits are wrong."""
    with torch.no_grad():
        logits: Tensor = target(x.to(device_of(target)))
    right = (logits.argmax(dim=1) == labels.to(logits.device)) & ~logits.isnan().any(dim=1)
    return right.cpu()


def _ball(how: Attack) -> Ball:
    return Linf() if how.norm == LINF else L2()


def _prepared(model: nn.Module) -> nn.Module:
    return for_input_gradients(model).eval()


def _copies(model: nn.Module) -> list[nn.Module]:
    """Return one model per worker."""
    return [_prepared(model) for _ in range(worker_count(device_of(model)))]


def _rows(model: nn.Module) -> int:
    return _ROWS_ON_CPU if device_of(model).type == "cpu" else _ROWS_ELSEWHERE
