"""The model that the service answers with: loaded once, ready to vote, and its answers."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..attacks.kinds import attack
from ..attacks.measure import Images, SmoothedTarget, perturbed
from ..certification import smooth
from ..certification.metrics import largest_radius
from ..certification.votes import ROWS_ON_CPU, FreshVotes, device_of, voting_copy, winners
from ..errors import ModelError, RunError
from ..models.factory import Shape
from ..models.noisy import NoisyModel
from ..report.pictures import as_data_url
from ..report.words import CLASSES
from ..rng import Purpose, normal_at_positions, secret_key
from ..runs.open import OpenRun
from ..store.durable import sha256_hex
from ..store.opened import open_metrics
from ..store.public import read_directory
from ..store.runs import METRICS, MODEL
from .answers import Attacked, Certified, Model, Noisy, Prediction, Privacy
from .settings import Asked
from .turns import Ticket

BASE, SMOOTHED = "base", "smoothed"
VOTES_A_TURN = ROWS_ON_CPU  # the noise of so many votes is drawn at once
_ATTACK = attack("pgd-l2", 20, 1)
_DRAWS = 8  # noise samples a step of an attack on the smoothed classifier
_ROUNDING = 1.0 - 2.0**-20
Tell = Callable[[int, np.ndarray], None]  # the votes cast so far, and their counts by class
Votes = Ticket[FreshVotes]


def unheard(cast: int, votes: np.ndarray) -> None:
    """Tell nobody."""


class InTurns:
    """Counts votes a few at a time, each time with the counter that is free. Its noise is a function of its own secret key."""

    def __init__(self, ticket: Votes, sigma: float, tell: Tell = unheard) -> None:
        self.sigma, self._ticket, self._tell, self._key = sigma, ticket, tell, secret_key()
        self.counted: dict[Purpose, np.ndarray] = {}

    def count(self, x: Tensor, start: int, stop: int, purpose: Purpose, index: int) -> np.ndarray:
        """The contract of `Counter`."""
        votes = np.zeros(0, dtype=np.int64)
        for first in range(start, stop, VOTES_A_TURN):
            last = min(first + VOTES_A_TURN, stop)
            with self._ticket.turn() as counter, torch.inference_mode():
                new = counter.with_key(self._key).count(x, first, last, purpose, index)
            votes = votes + new if len(votes) else new
            if purpose is Purpose.CERTIFY_ESTIMATION:
                self._tell(last - start, votes)
        self.counted[purpose] = votes
        return votes


@dataclass(frozen=True)
class ServedModel:
    """A model in memory with the SHA-256 of the bytes it was loaded from. No answer reads a file."""

    model: nn.Module
    _base: nn.Module  # a copy, which one thread uses at a time
    sha256: str
    shape: Shape
    sigma: float
    n0: int
    asked: Asked  # the default, and the most votes
    card: Model
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    def predict(self, x: Tensor, asked: Asked, ticket: Votes, tell: Tell = unheard) -> Prediction:
        """CERTIFY with new noise; `tell` hears the counts of the estimate while it grows."""
        request, counter = asked.request(self.sigma, self.n0), InTurns(ticket, self.sigma, tell)
        found = request.certify(counter, x, smooth.ABSTAIN, 0)
        return Prediction(
            predicted=found.predict,
            radius=found.radius,
            abstained=found.predict == smooth.ABSTAIN,
            votes=counter.counted[Purpose.CERTIFY_ESTIMATION].tolist(),
            n0=request.n0,
            n=request.n,
            alpha=request.alpha,
            sigma=self.sigma,
            dtype=self.card.dtype,
            model_sha256=self.sha256,
        )

    def noisy(self, x: Tensor, count: int, ticket: Votes) -> Noisy:
        """Copies of an image with new noise, and the base model's class of each."""
        with ticket.turn():
            noise = normal_at_positions(secret_key(), Purpose.PREDICT, 0, count, self.shape, torch.device("cpu"))
            copies = x + self.sigma * noise
            return Noisy(
                sigma=self.sigma,
                images=[as_data_url(copy.numpy()) for copy in copies],
                classes=self._base_classes(copies),
                model_sha256=self.sha256,
            )

    def attacked(self, x: Tensor, strength: float, target: str, label: int | None, ticket: Votes) -> Attacked:
        """Move an image by at most `strength` away from a class: `label`, or the one that the target predicts."""
        smoothing = SmoothedTarget(self.sigma, _DRAWS) if target == SMOOTHED else None
        if label is None:
            label = self._class_of(x, target, ticket)
        image, moved = Images(x[None], torch.tensor([label]), [0]), x
        with ticket.long_turn() as pass_on:
            if strength > 0:
                moved = perturbed(self.model, image, _ATTACK, strength, secret_key(), 0, smoothing, pass_on)[0]
            moved, distance = _within(x, moved, strength)
            before, after = self._base_classes(torch.stack([x, moved]))
        return Attacked(
            image=moved.tolist(),
            png=as_data_url(moved.numpy()),
            strength=strength,
            distance=distance,
            target=target,
            label=label,
            base_class=after,
            base_class_before=before,
            model_sha256=self.sha256,
        )

    def _class_of(self, x: Tensor, target: str, ticket: Votes) -> int:
        """The class that the target most likely predicts; a guess, not a certificate."""
        if target == SMOOTHED:
            return int(InTurns(ticket, self.sigma).count(x, 0, self.n0, Purpose.PREDICT, 0).argmax())
        with ticket.turn():
            return max(0, self._base_classes(x[None])[0])

    def _base_classes(self, x: Tensor) -> list[int]:
        """The base model's class of each image without further noise; -1 for a tie or NaN."""
        with self._one_at_a_time, torch.inference_mode():
            counts = [winners(self._base(row[None].to(device_of(self._base)))) for row in x]
        return [int(count.argmax()) if count.any() else -1 for count in counts]


def _within(x: Tensor, moved: Tensor, strength: float) -> tuple[Tensor, float]:
    """The moved image, shortened if rounding has put it outside the ball, and its exact distance."""
    distance = _distance(x, moved)
    if distance > strength:
        moved = x + (moved - x) * (strength / distance * _ROUNDING)
        distance = _distance(x, moved)
    return (moved, distance) if distance <= strength else (x, 0.0)


def _distance(x: Tensor, moved: Tensor) -> float:
    return float(torch.linalg.vector_norm(moved.double() - x.double()))


def served(run: OpenRun, sigma: float | None, n0: int, asked: Asked, *, gallery: bool) -> ServedModel:
    """The model of an opened run, for a service; `gallery` says whether there are test images to show."""
    if isinstance(run.model, NoisyModel):
        raise ModelError(f"the model of {run.path} has noise inside, which the service does not draw; use dpcert predict")
    chosen = run.config.certification_sigma if sigma is None else sigma
    asked.request(chosen, n0)  # checks the values
    return ServedModel(
        model=run.model,
        _base=voting_copy(run.model),
        sha256=run.model_sha256,
        shape=run.input_shape,
        sigma=chosen,
        n0=n0,
        asked=asked,
        card=_card(run, chosen, n0, asked, gallery),
    )


def _card(run: OpenRun, sigma: float, n0: int, asked: Asked, gallery: bool) -> Model:
    metrics = _metrics(run)
    names = CLASSES.get(run.config.data.name)
    return Model(
        dataset=metrics.get("dataset", run.config.data.name),
        method=metrics.get("method", run.config.method.name),
        input_shape=list(run.input_shape),
        classes=run.classes,
        class_names=list(names) if names is not None and len(names) == run.classes and not run.config.data.path else None,
        sigma=sigma,
        n0=n0,
        n=asked.n,
        alpha=asked.alpha,
        dtype="float32",
        model_sha256=run.model_sha256,
        largest_radius=largest_radius(asked.n, asked.alpha, sigma),
        clean_accuracy=metrics.get("clean_accuracy"),
        privacy=_privacy(run),
        certification=[_certified(entry) for entry in metrics.get("certification", []) if entry.get("split", "test") == "test"],
        gallery=gallery,
    )


def _metrics(run: OpenRun) -> dict[str, Any]:
    """metrics.json, checked, of the loaded model and no other; empty if there is no such file."""
    files = read_directory(run.path)
    if sha256_hex(files.bytes_of(MODEL)) != run.model_sha256:
        raise RunError(f"{files.place_of(MODEL)} changed while it was opened; start again")
    return open_metrics(files) if METRICS in files.content else {}


def _certified(entry: dict[str, Any]) -> Certified:
    return Certified(**{name: entry[name] for name in Certified.model_fields})


def _privacy(run: OpenRun) -> Privacy:
    stated = run.statement
    return Privacy(
        private=stated.private,
        reason=stated.reason,
        epsilon=stated.epsilon if stated.private and math.isfinite(stated.epsilon) else None,
        delta=stated.delta,
        relation=stated.relation,
        statement=stated.short,
        sentences=list(stated.sentences),
    )
