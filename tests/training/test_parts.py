"""The parts of a batch: sizes that follow from public numbers only, whatever the batch that was drawn."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dpcert
from dpcert.gradients.choose import choose
from dpcert.gradients.engine import Clip
from dpcert.privacy.clipping import Flat
from dpcert.rng import POSITIONS_PER_BLOCK
from dpcert.scale.world import World
from dpcert.training.step import StepContext, _part_sizes, _parts, records_of_step, small_parts_change_no_bit


@dataclass(frozen=True)
class Public:
    """What the sizes of parts may depend on."""

    batch_size: int
    views: int = 3
    workers: int = 2
    small_parts: bool = True
    physical_batch: int = 480
    engines: tuple = field(init=False)
    method: SimpleNamespace = field(init=False)
    mechanism: SimpleNamespace = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "engines", (None,) * self.workers)
        object.__setattr__(self, "method", SimpleNamespace(views=SimpleNamespace(count=self.views)))
        object.__setattr__(self, "mechanism", SimpleNamespace(plan=SimpleNamespace(batch_size=self.batch_size)))


@pytest.mark.parametrize("small_parts", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("batch_size", [1, 6, 60, 512, 2048, 50_000])
def test_every_part_has_one_of_two_sizes_whatever_the_batch(batch_size, workers, small_parts):
    sizes = _part_sizes(Public(batch_size, workers=workers, small_parts=small_parts), 480)
    assert sizes[0] >= sizes[1] and sizes[0] * 3 <= 480 and all(size % POSITIONS_PER_BLOCK == 0 for size in sizes)
    for drawn in {0, 1, 5, 8, 9, batch_size - 1, batch_size, batch_size + 1, batch_size + 37}:
        parts = _parts(drawn, sizes)
        assert {part.size for part in parts} <= set(sizes)
        places = [place for part in parts for place in range(part.start, part.stop)]
        assert places == list(range(drawn)) and all(part.stop - part.start <= part.size for part in parts)
        assert all(part.start % POSITIONS_PER_BLOCK == 0 for part in parts)


def test_little_is_padding_where_small_parts_are_allowed():
    sizes = _part_sizes(Public(512), 480)
    for drawn in range(440, 590, 7):
        assert sum(part.size for part in _parts(drawn, sizes)) < drawn + sizes[1] <= drawn + 40


@pytest.mark.parametrize("rows", [1, 3, 7, 20])
def test_memory_for_less_than_a_block(rows):
    large, small = _part_sizes(Public(512, views=3), rows)
    assert large == small == max(1, rows // 3)


class Engine:
    """Norms that depend on the size of the part where `honest` is False."""

    def __init__(self, honest):
        self.honest = honest

    def __call__(self, model, loss, views, labels, clip):
        norms = views.double().flatten(1).norm(dim=1)
        return SimpleNamespace(norms=norms if self.honest else norms * (1 + 1e-15 * len(views)))


@pytest.mark.parametrize("honest", [True, False])
def test_small_parts_are_used_only_where_they_change_no_bit(honest):
    method = dpcert.method("dp-gaussian", copies=2)
    mechanism = SimpleNamespace(plan=SimpleNamespace(every_phase=[SimpleNamespace(batch_size=512)]))
    model, images = dpcert.build_model("linear"), torch.rand(4, 1, 28, 28)
    problem = StepContext(model, images, torch.zeros(4), method, Clip(Flat(), 0.1), (Engine(honest),), mechanism, None, 480)
    assert small_parts_change_no_bit(problem) is honest


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("drawn", [[], [7], list(range(0, 900, 2))])
def test_the_ranks_read_each_record_of_a_step_once(ranks, drawn):
    """Together the whole batch, and no record twice: images that are read ahead are those that the rank needs."""
    method, batch = dpcert.method("dp-gaussian", copies=2), np.array(drawn, dtype=np.int64)
    plan = SimpleNamespace(every_phase=[SimpleNamespace(batch_size=512)])
    mechanism = SimpleNamespace(plan=plan, sample=lambda records, step: batch)
    shares = []
    for rank in range(ranks):
        images, labels = torch.rand(4, 1, 28, 28), torch.zeros(1000)
        context = StepContext(
            dpcert.build_model("linear"), images, labels, method, Clip(Flat(), 0.1), (Engine(True),), mechanism, None, 480
        )
        shares.append(records_of_step(replace(context, world=World(rank, ranks), workers=ranks), 0))
    assert all((np.diff(share) > 0).all() for share in shares)
    assert sorted(np.concatenate(shares).tolist()) == drawn


def test_small_parts_change_no_bit_of_the_papers_cnn_here():
    """Not a promise of any kernel: if it fails on a machine, all parts have one size there and nothing else changes."""
    method = dpcert.method("dp-gaussian", copies=2)
    model, images = dpcert.build_model("cnn", seed=0), torch.rand(4, 1, 28, 28)
    mechanism = SimpleNamespace(plan=SimpleNamespace(every_phase=[SimpleNamespace(batch_size=64)]))
    engines = choose("auto", model, method.loss, (1, 28, 28))
    problem = StepContext(model, images, torch.zeros(4), method, Clip(Flat(), 0.1), engines, mechanism, None, 480)
    found = small_parts_change_no_bit(problem)
    large, small = _part_sizes(replace(problem, small_parts=found), 480)
    assert isinstance(found, bool) and (large == small or found)
