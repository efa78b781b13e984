"""Models by name: a seed fixes the weights and nothing else."""

import torch

from dpcert.models.registry import build_model


def test_a_seeded_model_leaves_the_global_generator_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, second, other = (build_model("linear", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first[1].weight, second[1].weight) and not torch.equal(first[1].weight, other[1].weight)


def test_without_a_seed_the_weights_come_from_the_global_generator():
    torch.manual_seed(7)
    first, second = build_model("linear"), build_model("linear")
    torch.manual_seed(7)
    assert torch.equal(build_model("linear")[1].weight, first[1].weight) and not torch.equal(first[1].weight, second[1].weight)
