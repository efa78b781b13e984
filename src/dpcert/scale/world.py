"""The ranks of a run: processes that share one computation through `torch.distributed`.

Rank 0 owns the ledger, the checkpoints, the lock, the files and the output; the others only compute. gloo carries what is in
main memory, NCCL what is on a GPU. Neither encrypts: the ranks must be on one machine or on a trusted network.
Nothing is pickled: messages are bytes and tensors.
"""

import atexit
import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import zip_longest
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ..errors import DpcertError, RankError
from .environment import RENDEZVOUS, Place, loopback_interface, place

TIME_TO_MEET = timedelta(minutes=5)
TIME_TO_REPORT = timedelta(seconds=10)
TIME_TO_ANSWER = timedelta(minutes=30)  # a dead process is noticed at once; this is for a machine that hangs
_LONGEST_SHOWN = 60  # characters of a value in a message: a digest is longer
_DONE, _FAILED = b"+", b"-"


class Summed(Protocol):
    """A dataclass with a tensor `value`, such as ClippedSum."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def value(self) -> Tensor:
        """What is added."""


S = TypeVar("S", bound=Summed)


class World:
    """One process of a group. All ranks call the same methods in the same order; a group of one needs no communication."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None, local_rank: int = 0) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self._group = group

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which owns ledger, checkpoints, lock, files and output."""
        return self.rank == 0

    def sum(self, clipped: S) -> S:
        """Return the sum of all ranks' values, in float64.

        The ranks' examples must be disjoint: then one record is in one term only, and the sensitivity is that of a term.
        Everything but `value` stays this rank's: the norms of other ranks' examples are not exchanged.
        """
        if self.size == 1:
            return clipped
        total = clipped.value.to(torch.float64, copy=True).contiguous()
        with self._reaching_others():
            dist.all_reduce(total, group=self._group)
        return replace(clipped, value=total)

    def from_first(self, make: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Return on every rank, bit for bit, the tensor that `make` returns on rank 0. It has the shape and type of `like`.

        `make` is called on rank 0 only.
        """
        if self.size == 1:
            return make()
        value = make().contiguous() if self.is_first else torch.empty_like(like)
        with self._reaching_others():
            dist.broadcast(value, src=self._global(0), group=self._group)
        return value

    def share(self, count: int) -> range:
        """Return the indices among 0..count-1 that this rank works on; may be empty."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is set on some rank. No rank returns before all have called."""
        return self.total(int(flag)) > 0

    def total(self, number: int) -> int:
        """Return the sum of a number over the ranks. No rank returns before all have called."""
        if self.size == 1:
            return number
        total = torch.tensor([number])
        with self._reaching_others():
            dist.all_reduce(total, group=self._group)
        return int(total)

    def wait(self) -> None:
        """Return when all ranks have called."""
        self.total(0)

    def broadcast(self, value: bytes | None) -> bytes:
        """Return rank 0's value on every rank; other ranks pass None. It travels through the group's memory, never a file."""
        if self.size == 1:
            assert value is not None
            return value
        length = torch.tensor([len(value) if value is not None else 0])
        with self._reaching_others():
            dist.broadcast(length, src=self._global(0), group=self._group)
            data = _as_tensor(value) if value is not None and self.is_first else torch.empty(int(length), dtype=torch.uint8)
            if len(data):
                dist.broadcast(data, src=self._global(0), group=self._group)
        return data.numpy().tobytes()

    def gather(self, value: bytes) -> list[bytes] | None:
        """Return the values of all ranks in order, on rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        lengths = self._lengths(value)
        padded = _padded(value, max(lengths))
        received = [torch.empty_like(padded) for _ in lengths] if self.is_first else None
        if len(padded):
            with self._reaching_others():
                dist.gather(padded, received, dst=self._global(0), group=self._group)
        return None if received is None else _cut(received, lengths)

    def agree(self, what: str, value: str) -> None:
        """Raise on every rank unless `value` is the same on all. Only short values are shown: a digest is not."""
        if self.size == 1:
            return
        lengths = self._lengths(value.encode())
        padded = _padded(value.encode(), max(1, *lengths))
        received = [torch.empty_like(padded) for _ in lengths]
        with self._reaching_others():
            dist.all_gather(received, padded, group=self._group)
        first, *others = (part.decode() for part in _cut(received, lengths))
        for rank, other in enumerate(others, start=1):
            if other != first:
                raise RankError(
                    f"rank {rank} and rank 0 differ in {what}{_difference(other, first)}; "
                    "start every rank with the same command, package, data and devices"
                )

    def first(self, work: Callable[[], bytes]) -> bytes:
        """Run `work` on rank 0 and return its bytes on every rank. An error that a user can cause raises on every rank."""
        if not self.is_first:
            return _opened(self.broadcast(None))
        try:
            made = work()
        except DpcertError as error:
            self.broadcast(_FAILED + str(error).encode())
            raise
        self.broadcast(_DONE + made)
        return made

    @contextlib.contextmanager
    def one_at_a_time_per_machine(self) -> Iterator[None]:
        """Run the block on the first rank of each machine, then on the others: they find what it has downloaded."""
        if self.local_rank > 0:
            self.wait()
        yield
        if self.local_rank == 0:
            self.wait()

    def _lengths(self, value: bytes) -> list[int]:
        length = torch.tensor([len(value)])
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        with self._reaching_others():
            dist.all_gather(lengths, length, group=self._group)
        return [int(number) for number in lengths]

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    @contextlib.contextmanager
    def _reaching_others(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the type of all errors of torch.distributed
            raise RankError(
                f"rank {self.rank} lost another rank: it ended or cannot be reached; rerun the same command to resume"
            ) from error


ALONE = World()


def _as_tensor(value: bytes) -> Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)


def _padded(value: bytes, length: int) -> Tensor:
    return _as_tensor(value.ljust(length, b"\0"))


def _cut(received: list[Tensor], lengths: list[int]) -> list[bytes]:
    return [part.numpy().tobytes()[:length] for part, length in zip(received, lengths, strict=True)]


def _opened(message: bytes) -> bytes:
    if message.startswith(_FAILED):
        raise RankError(message.removeprefix(_FAILED).decode())
    return message.removeprefix(_DONE)


def _difference(other: str, first: str) -> str:
    """Return the first line that differs, if both are short."""
    pairs = zip_longest(other.splitlines(), first.splitlines(), fillvalue="")
    here, there = next(((a, b) for a, b in pairs if a != b), ("", ""))
    shows = here != there and max(len(here), len(there)) <= _LONGEST_SHOWN
    return f" ({here}, rank 0: {there})" if shows else ""


_joined: list[World] = []
_store: list[Any] = []


def join() -> World:
    """Return this process's place in the group that torchrun's environment names; `ALONE` without one.

    The first call meets the other ranks; later calls return the same world.
    """
    here = place()
    if here.size == 1:
        return ALONE
    if not _joined:
        _joined.append(_meet(here))
    return _joined[0]


def is_first_to_report() -> bool:
    """Return True on one rank of a group, for an error that several ranks may have; always True for a process alone."""
    with contextlib.suppress(DpcertError, RuntimeError, ValueError, OSError):
        here = place()
        return here.size == 1 or int(_open_store(here, TIME_TO_REPORT).add("dpcert/reported", 1)) == 1
    return True  # without a group, each can only speak for itself


def _meet(here: Place) -> World:
    if here.on_one_machine and (interface := loopback_interface()) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # nothing leaves the machine
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if dist.is_initialized():  # by the caller's own program, perhaps for a GPU only
        return World(dist.get_rank(), dist.get_world_size(), dist.new_group(backend=backend), here.local_rank)
    # This module stores the default group of the moment of its import as a default argument. Imported later (by an optimizer,
    # say), it would keep the group and its threads alive until Python itself has ended, and a thread that then releases a
    # tensor aborts the process.
    importlib.import_module("torch.distributed.nn.functional")
    try:
        _refuse_other_size(here)
        group = PrefixStore("dpcert/group", _open_store(here))
        dist.init_process_group(backend, store=group, rank=here.rank, world_size=here.size, timeout=TIME_TO_ANSWER)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, DpcertError):
            raise
        detail = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise RankError(
            f"rank {here.rank} cannot join the other {here.size - 1} ranks ({detail}); check that all were started and reach "
            "MASTER_ADDR:MASTER_PORT"
        ) from error
    atexit.register(_leave)
    return World(here.rank, here.size, None, here.local_rank)  # None is the default group: no reference to it, see above


def _refuse_other_size(here: Place) -> None:
    """Raise if a rank was started for a group of another size; otherwise the ranks would wait for each other."""
    store = _open_store(here)
    store.set(f"dpcert/size/{here.rank}", str(here.size))
    for rank in range(here.size):
        size = int(store.get(f"dpcert/size/{rank}"))
        if size != here.size:
            raise RankError(
                f"rank {here.rank} was started for {here.size} ranks, rank {rank} for {size}; "
                "start all ranks with the same WORLD_SIZE"
            )


def _open_store(here: Place, timeout: timedelta = TIME_TO_MEET) -> Any:
    if not _store:
        path = os.environ.get(RENDEZVOUS)
        where = "env://" if path is None else f"file://{path}"
        store, _, _ = next(rendezvous(where, here.rank, here.size, timeout=timeout))
        store.set_timeout(timeout)
        _store.append(store)
    return _store[0]


def _leave() -> None:
    with contextlib.suppress(RuntimeError, ValueError, AssertionError):
        dist.destroy_process_group()
