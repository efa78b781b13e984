"""Count votes: the classes that a classifier predicts for noisy copies of one input.

A vote is *wrong* (it counts for no class) if its logits contain a NaN, or if the two largest differ by less than rounding:
another batch size, thread count or kernel could then have given another vote.
"""

import contextlib
import copy
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..isolation import Forward, refuse_mixing
from ..outputs import copied, logits_of, require_logits
from ..rng import Purpose, normal_at_positions
from ..scale.shards import tell, told
from ..scale.world import ALONE, World
from ..workers import worker_count
from .bank import NoiseBank, SplitModel, channels_last, cut_is_the_same, draw_bank, split, split_at
from .compiled import (
    REST_INPUTS,
    WHOLE_INPUTS,
    Compiled,
    MachineCode,
    Rest,
    compile_rest,
    compile_whole,
    load_compiled,
    rest_as_machine_code,
    seconds_a_row,
    whole_as_machine_code,
)
from .heads import each_vote_alone, heads_in
from .smooth import Counter

TIE_TOLERANCE = 2.0**-16  # relative to the largest logit; float32 rounding stays below it, a sixth of it in the backbone
_LOGITS_KEPT = 1 << 20  # 4 MB; counting chunk by chunk would be slower
ALWAYS_WORTH_COMPILING = 10**12  # votes
WORTH_COMPILING = 2.0  # seconds of votes; compiling takes about one and saves half of them
WORTH_MACHINE_CODE = 5000  # votes of an input, however many inputs are left: a resumed sweep must count in the same way
ROWS_ON_CPU, ROWS_ELSEWHERE = 128, 4096  # a chunk fits in a core's cache; other devices need large chunks


def voting_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the model for voting: evaluation mode, channels-last (pools are several times faster)."""
    voter = copied(getattr(model, "_orig_mod", model)).eval()  # unwrap torch.compile: its bits change with the batch size
    voter.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return voter


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a voting copy of the model, in inference mode."""
    voter = voting_copy(model)
    with torch.inference_mode():
        yield voter


def refuse_mixing_voters(voter: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Raise `ModelError` if the noisy copies of an input change each other's votes."""
    if isinstance(each_vote_alone(voter, input_shape), nn.Module):
        return  # provably apart
    try:
        refuse_mixing(voter, input_shape, voting=True)
    except ModelError:
        raise
    except Exception:  # the classifier rejects the probe inputs: each row runs alone in any case
        return


class FreshVotes:
    """Separate noise for every input: a function of (key, purpose, index of the input, position)."""

    def __init__(
        self, model: nn.Module, sigma: float, key: bytes, batch: int | None = None, forward: Forward | None = None
    ) -> None:
        self.model, self.sigma, self.key = model, sigma, key
        self.device = device_of(model)
        self._forward = forward  # of `model`, each row alone
        self.batch = batch or _rows(self.device)

    def count(self, x: Tensor, start: int, stop: int, purpose: Purpose, index: int) -> np.ndarray:
        """The contract of `Counter`."""
        x = x.to(self.device)
        forward = self._forward = self._forward or each_vote_alone(self.model, tuple(x.shape))

        def chunks() -> Iterator[Tensor]:
            for first in range(start, stop, self.batch):
                last = min(first + self.batch, stop)
                noise = normal_at_positions(self.key, purpose, first, last, tuple(x.shape), self.device, index, ROWS_ON_CPU)
                yield forward(torch.add(x, noise, alpha=self.sigma))

        return tally(chunks(), heads_in(self.model))

    def with_key(self, key: bytes) -> "FreshVotes":
        """Return the same counter with other noise; it shares the model."""
        return FreshVotes(self.model, self.sigma, key, self.batch, self._forward)


class BankVotes:
    """Noise from a bank shared by all inputs, with the model's first linear layer applied to it once."""

    def __init__(
        self, cut: SplitModel, bank: NoiseBank, sigma: float, batch: int | None = None, rest: Rest | None = None
    ) -> None:
        self.cut, self.bank, self.sigma = cut, bank, sigma
        like = next(iter(bank.parts.values()))
        self.device = like.device
        self.batch = batch or _rows(self.device)
        self.rest = rest or self._eager
        self._buffer = channels_last(like.new_empty((self.batch, *like.shape[1:])))

    def count(self, x: Tensor, start: int, stop: int, purpose: Purpose, index: int) -> np.ndarray:
        """The contract of `Counter`."""
        features = self.cut.features(x.unsqueeze(0).to(self.device))
        chunks = self.bank.parts[purpose][start:stop].split(self.batch)  # type: ignore[no-untyped-call]
        return tally((self.rest(noise, features) for noise in chunks), heads_in(self.cut.model))

    def _eager(self, noise: Tensor, features: Tensor) -> Tensor:
        logits = self.cut.logits(torch.add(noise, features, out=self._buffer[: len(noise)]))
        return logits.clone()  # a model that ends with its first layer returns the buffer itself


class OneInput:
    """The counters of several heads for one input: each range of votes is cast once, for all heads."""

    def __init__(self, counter: Counter, heads: int) -> None:
        self._counter, self._heads = counter, heads
        self._cast: dict[tuple[int, int, Purpose, int], np.ndarray] = {}

    def of_head(self, head: int) -> Counter:
        """Return the counter of one head."""
        return _OfHead(self, head)

    def count(self, x: Tensor, start: int, stop: int, purpose: Purpose, index: int, head: int) -> np.ndarray:
        """The contract of `Counter`, for one head."""
        asked = (start, stop, purpose, index)
        if asked not in self._cast:
            self._cast[asked] = self._counter.count(x, start, stop, purpose, index)
        return np.split(self._cast[asked], self._heads)[head].copy()

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise."""
        return self._counter.sigma


@dataclass(frozen=True)
class _OfHead:
    """A counter for one of the heads."""

    shared: OneInput
    head: int

    @property
    def sigma(self) -> float:
        return self.shared.sigma

    def count(self, x: Tensor, start: int, stop: int, purpose: Purpose, index: int) -> np.ndarray:
        return self.shared.count(x, start, stop, purpose, index, self.head)


def tally(chunks: Iterable[Tensor], heads: int = 1) -> np.ndarray:
    """Count the votes per class over all chunks of logits. Counts several chunks at once; memory does not grow with n.

    The logits of several heads stand side by side, and so do their counts.
    """
    waiting: list[Tensor] = []
    votes, kept = np.zeros(0, dtype=np.int64), 0
    for logits in chunks:
        waiting.append(logits_of(logits))
        kept += logits.numel()
        if kept >= _LOGITS_KEPT:
            votes, waiting, kept = _added(votes, waiting, heads), [], 0
    return _added(votes, waiting, heads) if waiting else votes


def _added(votes: np.ndarray, waiting: list[Tensor], heads: int) -> np.ndarray:
    new = np.concatenate([winners(logits) for logits in torch.cat(waiting).chunk(heads, dim=1)])
    return votes + new if len(votes) else new


def winners(logits: Tensor) -> np.ndarray:
    """Count the votes per class of ``logits [rows, classes]``; a tie or a NaN counts for no class."""
    classes = logits_of(logits).shape[1]
    best, chosen = logits.float().topk(2, dim=1)
    clear = best[:, 0] - best[:, 1] > TIE_TOLERANCE * logits.abs().amax(dim=1)  # False for NaN
    return _counted(torch.where(clear, chosen[:, 0], classes), classes)


def _counted(votes: Tensor, classes: int) -> np.ndarray:
    """Count each class. The only place where votes leave their device: a few numbers for many thousand logits."""
    return torch.bincount(votes, minlength=classes + 1)[:classes].cpu().numpy()


def device_of(model: nn.Module) -> torch.device:
    """Return the model's device."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _rows(device: torch.device) -> int:
    return ROWS_ON_CPU if device.type == "cpu" else ROWS_ELSEWHERE


@dataclass(frozen=True)
class _Prepared:
    """What is prepared once per input shape; `cut` is None if the model runs whole."""

    whole: Forward
    cut: SplitModel | None
    rest: Compiled | MachineCode | None


class Voter:
    """A model prepared for voting: a copy in evaluation mode, split and compiled once per input shape.

    It stores no noise. Each call of `counters` draws a new bank, which lives only for that call: certificates are not valid
    for inputs that were chosen after the noise was known.

    Whether a model is split or compiled is measured, and may change a vote that is close to a tie. So rank 0 decides for all
    ranks, and they run its ONNX graph.
    """

    def __init__(self, model: nn.Module, sigma: float, batch: int | None = None, world: World = ALONE) -> None:
        self.sigma, self.batch, self._world = sigma, batch, world
        self.model = voting_copy(model)
        self.device = device_of(self.model)
        self._checked: set[tuple[int, ...]] = set()
        self._prepared: dict[tuple[tuple[int, ...], bool], _Prepared] = {}  # by shape, and whether machine code is worth it
        self._compiled: dict[tuple[int, ...], Compiled | None] = {}
        self._code: dict[tuple[int, ...], MachineCode | None] = {}
        self._one_at_a_time = threading.Lock()

    @contextlib.contextmanager
    def counters(
        self, x: Tensor, key: bytes, votes: dict[Purpose, int], *, fresh_noise: bool = False
    ) -> Iterator[list[Counter]]:
        """Yield counters for the inputs `x`, one per worker: from a bank if the model can be split, else with fresh noise."""
        with torch.inference_mode():
            self._check(x)
            counters = None if fresh_noise else self._from_a_bank(x, key, votes)
            if counters is None:
                code = self._whole_code(x) if self._machine_code(votes) else None
                compiled = code or self._whole_compiled(x, sum(votes.values()) * len(x))
                workers = range(worker_count(self.device))
                counters = [FreshVotes(copy.deepcopy(self.model), self.sigma, key, self.batch, compiled) for _ in workers]
            yield counters

    def lasting(self, x: Tensor, key: bytes) -> list[FreshVotes]:
        """Return counters for inputs like `x` that last, one per worker: compiled in any case, with fresh noise only."""
        with torch.inference_mode():
            self._check(x)
            compiled, shape = self._compiled_if_worth_it(x, ALWAYS_WORTH_COMPILING), tuple(x.shape[1:])
            models = [copy.deepcopy(self.model) for _ in range(worker_count(self.device))]
            forwards = [compiled or each_vote_alone(model, shape) for model in models]
            pairs = zip(models, forwards, strict=True)
            return [FreshVotes(model, self.sigma, key, self.batch, forward) for model, forward in pairs]

    def _check(self, x: Tensor) -> None:
        """Check once per shape: the model must accept the inputs, return logits, and not mix the noisy copies."""
        shape = tuple(x.shape[1:])
        with self._one_at_a_time:
            if shape not in self._checked:
                require_logits(self.model, x[:1].to(self.device))
                refuse_mixing_voters(self.model, shape)
                self._checked.add(shape)

    def _machine_code(self, votes: dict[Purpose, int]) -> bool:
        """Return whether machine code is worth compiling. Ranks do without: they run the graph of rank 0."""
        return self._world.size == 1 and self.device.type == "cpu" and sum(votes.values()) >= WORTH_MACHINE_CODE

    def _whole_code(self, x: Tensor) -> MachineCode | None:
        """Compile the whole model to machine code, once per shape."""
        shape = tuple(x.shape[1:])
        with self._one_at_a_time:
            if shape not in self._code:
                self._code[shape] = whole_as_machine_code(self.model, x, self.sigma)
            return self._code[shape]

    def _whole_compiled(self, x: Tensor, votes: int) -> Compiled | None:
        """Return the whole model compiled for these inputs, or None."""
        if not self._world.is_first:
            return self._graph_of_rank_0(WHOLE_INPUTS)
        compiled = self._compiled_if_worth_it(x, votes)
        self._tell_graph(compiled)
        return compiled

    def _compiled_if_worth_it(self, x: Tensor, votes: int) -> Compiled | None:
        """Compile the whole model once per shape, and only if it keeps rows apart.

        Compiling takes as long as many thousand votes of a small network, so a few votes are cast without it.
        """
        shape = tuple(x.shape[1:])
        with self._one_at_a_time:
            if shape not in self._compiled:
                whole = each_vote_alone(self.model, shape) if self.device.type == "cpu" else None
                if not isinstance(whole, nn.Module) or votes * seconds_a_row(whole, x[:1]) < WORTH_COMPILING:
                    return None
                self._compiled[shape] = compile_whole(whole, x, self.sigma)
            return self._compiled[shape]

    def _tell_graph(self, compiled: Compiled | MachineCode | None) -> None:
        graph = compiled.graph if isinstance(compiled, Compiled) else None
        tell(self._world, graph is not None)
        if graph is not None and self._world.size > 1:
            self._world.broadcast(graph)

    def _graph_of_rank_0(self, inputs: tuple[str, ...]) -> Compiled | None:
        return load_compiled(self._world.broadcast(None), inputs) if told(self._world) else None

    def _from_a_bank(self, x: Tensor, key: bytes, votes: dict[Purpose, int]) -> list[Counter] | None:
        prepared = self._ready_for(x, self._machine_code(votes))
        cut = prepared.cut
        layout = torch.Tensor.contiguous if isinstance(prepared.rest, Compiled) else channels_last
        bank = None if cut is None else draw_bank(cut, self.sigma, key, votes, tuple(x.shape[1:]), self.device, layout)
        if cut is None or bank is None:
            return None
        workers = range(worker_count(self.device))
        return [BankVotes(copy.deepcopy(cut), bank, self.sigma, self.batch, prepared.rest) for _ in workers]

    def _ready_for(self, x: Tensor, machine_code: bool) -> _Prepared:
        """Return the model as it is prepared for these inputs on all world."""
        if not self._world.is_first:
            name = told(self._world)
            whole = each_vote_alone(self.model, tuple(x.shape[1:]))
            cut = None if name is None else split_at(name, self.model, tuple(x.shape[1:]), whole)
            return _Prepared(whole, cut, self._graph_of_rank_0(REST_INPUTS))
        ready = self._prepared_for(x, machine_code)
        tell(self._world, None if ready.cut is None else ready.cut.name)
        self._tell_graph(ready.rest)
        return ready

    def _prepared_for(self, x: Tensor, machine_code: bool) -> _Prepared:
        """Return what was prepared for this shape; without the split if the split model differs on these inputs.

        The caller gets its own copy of the split model: running it replaces a method for the time of a call, so two threads
        must not share one.
        """
        key = tuple(x.shape[1:]), machine_code
        with self._one_at_a_time:
            known = self._prepared.get(key)
            if known is None:
                known = self._prepared[key] = self._prepare(x, machine_code)
            elif known.cut is not None and not cut_is_the_same(known.cut, known.whole, x, self.sigma):
                return _Prepared(known.whole, None, None)
            return replace(known, cut=copy.deepcopy(known.cut))

    def _prepare(self, x: Tensor, machine_code: bool) -> _Prepared:
        whole = each_vote_alone(self.model, tuple(x.shape[1:]))
        cut = split(self.model, x, self.sigma, whole)
        if cut is None or self.device.type != "cpu":
            return _Prepared(whole, cut, None)
        features = cut.features(x[:1])
        code = rest_as_machine_code(cut, features) if machine_code else None
        return _Prepared(whole, cut, code or compile_rest(cut, features))


def voting(
    model: nn.Module,
    x: Tensor,
    *,
    sigma: float,
    key: bytes,
    votes: dict[Purpose, int],
    fresh_noise: bool = False,
    batch: int | None = None,
) -> contextlib.AbstractContextManager[list[Counter]]:
    """Return the counters of a model that is used for one call only."""
    return Voter(model, sigma, batch).counters(x, key, votes, fresh_noise=fresh_noise)
