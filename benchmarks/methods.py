"""What does each method cost compared with DPSGD? One step of the MNIST CNN at B = 512 and K = 2, for every method."""

from collections.abc import Callable
from dataclasses import replace

import torch

import dpcert
from benchmarks._measure import arguments, interleaved, ratio, save, summary
from dpcert.gradients.choose import choose
from dpcert.gradients.engine import Clip, trainable
from dpcert.methods import METHODS
from dpcert.privacy.ledger import Ledger
from dpcert.privacy.mechanism import Mechanism, make_plan, opening_facts
from dpcert.rng import key_from_seed
from dpcert.scale.world import ALONE, World
from dpcert.training.step import StepContext, private_step, small_parts_change_no_bit
from dpcert.workers import worker_count


def step_of(name: str, world: World = ALONE) -> Callable[[], None]:
    """One step of a method, on all ranks of `world`."""
    data, method = dpcert.load_dataset("mnist"), dpcert.method(name)
    model = dpcert.build_model("cnn", seed=0)
    plan = make_plan(
        dataset_size=60_000,
        size_given=True,
        classes=10,
        classes_given=True,
        held_out=0,
        batch_size=512,
        epochs=40,
        clip=method.clip_rule,
        clip_norm=0.1,
        epsilon=3.0,
        delta=1e-5,
    )
    key = key_from_seed(0, "noise")
    ledger = Ledger(None, key)
    ledger.open(opening_facts(plan, noise_is_secret=False))
    ledger.authorise(0, plan.steps, plan.noise_multiplier, plan.sampling_probability)
    engines = choose("auto", model, method.loss, (1, 28, 28), worker_count(torch.device("cpu")))
    optimizer = torch.optim.SGD(trainable(model).values(), lr=0.5, momentum=0.9)
    clip = Clip(method.clip_rule, 0.1)
    context = StepContext(
        model, data.x_train, data.y_train, method, clip, engines, Mechanism(plan, key, ledger), optimizer, 480
    )
    context = replace(context, world=world, workers=world.total(len(engines)))
    differs = world.any(not small_parts_change_no_bit(context))
    context = replace(context, small_parts=not differs)  # as training does
    steps = iter(range(2000, plan.steps))  # after the warm-up of the attack radius
    return lambda: private_step(context, next(steps))


def main() -> None:
    options = arguments(__doc__ or "")
    rounds = 3 if options.quick else options.rounds
    seconds = interleaved({name: step_of(name) for name in METHODS}, rounds)
    rows = {name: {**summary(times), "over_dpsgd": ratio(times, seconds["dpsgd"])} for name, times in seconds.items()}
    for name, row in rows.items():
        print(f"{name:26s} {row['median_ms']:7.1f} ms   {row['over_dpsgd']['median']:.2f} x DPSGD")  # type: ignore[index]
    save("methods", {"rounds": rounds, "methods": rows})


if __name__ == "__main__":
    main()
