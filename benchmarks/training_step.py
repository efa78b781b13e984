"""How much time does privacy cost? One private and one non-private training step on the same rows, for K in {0, 2, 8}.

Contenders: the fastest non-private step we could write (channels last, chunks), standard SGD, our engines in the real private
step, and Opacus 1.6 as in the authors' code (a gradient for each row, averaged over the views of an example).
"""

import warnings
from dataclasses import replace

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from benchmarks._measure import arguments, bars, interleaved, ratio, save, summary
from dpcert.data.dataset import Dataset
from dpcert.data.registry import load_dataset
from dpcert.gradients.choose import choose, name_of
from dpcert.gradients.engine import Clip
from dpcert.methods import method
from dpcert.models.registry import build_model
from dpcert.privacy.clipping import Flat
from dpcert.privacy.ledger import Ledger
from dpcert.privacy.mechanism import Mechanism, opening_facts
from dpcert.rng import Purpose, key_from_seed, normal_at_positions
from dpcert.training.loop import plan_for
from dpcert.training.settings import Settings
from dpcert.training.step import StepContext, private_step, small_parts_change_no_bit
from dpcert.workers import worker_count

BATCH, SIGMA, KEY = 512, 0.5, key_from_seed(0, "bench")
BEST, STOCK, OPACUS, FASTEST = "best non-private", "stock SGD", "Opacus 1.6", "dpcert"


def chunks(total: int, size: int):
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def views_of(x: torch.Tensor, copies: int, part: slice, step: int) -> torch.Tensor:
    noise = normal_at_positions(KEY, Purpose.VIEWS, part.start, part.stop, (copies, *x.shape[1:]), x.device, step)
    return torch.cat([x.unsqueeze(1), x.unsqueeze(1) + SIGMA * noise], dim=1) if copies else x.unsqueeze(1)


def ordinary(data: Dataset, copies: int, size: int, channels_last: bool):
    """A non-private step on the same rows: the same views, one backward pass, SGD with momentum."""
    model = build_model("cnn", seed=0)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y, counter = data.x_train[:BATCH], data.y_train[:BATCH], [0]

    def step() -> None:
        counter[0] += 1
        optimizer.zero_grad()
        for part in chunks(BATCH, size):
            rows = views_of(x[part], copies, part, counter[0])
            labels = y[part].repeat_interleave(copies + 1)
            (F.cross_entropy(model(rows.flatten(0, 1)), labels, reduction="sum") / (BATCH * (copies + 1))).backward()
        optimizer.step()

    return step


def private(data: Dataset, copies: int, engine: str):
    """The real private step of dpcert, on a batch of exactly 512 (q = 1 of 512 records)."""
    model = build_model("cnn", seed=0)
    m = method("dp-gaussian", sigma=SIGMA, copies=copies) if copies else method("dpsgd")
    small = Dataset(data.x_train[:BATCH], data.y_train[:BATCH], data.x_test[:1], data.y_test[:1], classes=10)
    settings = Settings.of(epsilon=8.0, epochs=1000, batch_size=BATCH, learning_rate=0.01)
    plan = plan_for(small, m, settings)
    ledger = Ledger()
    ledger.open(opening_facts(plan, noise_is_secret=True))
    ledger.authorise(0, plan.steps, plan.noise_multiplier, plan.sampling_probability)
    problem = StepContext(
        model,
        small.x_train,
        small.y_train,
        m,
        Clip(Flat(), 0.1),
        choose(engine, model, m.loss, small.input_shape, worker_count(torch.device("cpu"))),
        Mechanism(plan, KEY, ledger),
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        settings.train.physical_batch,
    )
    problem = replace(problem, small_parts=small_parts_change_no_bit(problem))  # as training does
    counter = [0]

    def step() -> None:
        private_step(problem, counter[0])
        counter[0] += 1

    return step


def fastest_engine(data: Dataset) -> str:
    """The engine that a long run uses: machine code where there is a compiler."""
    engine, *_ = choose("auto", build_model("cnn", seed=0), method("dpsgd").loss, data.input_shape, rows=10**9)
    return name_of(engine).split()[0]


def opacus(data: Dataset, copies: int):
    """As in the authors' code: hooks give a gradient per row; the rows of one example are averaged, clipped and summed."""
    warnings.simplefilter("ignore")
    from opacus import GradSampleModule

    model = GradSampleModule(build_model("cnn", seed=0), loss_reduction="sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y, counter = data.x_train[:BATCH], data.y_train[:BATCH], [0]

    def step() -> None:
        counter[0] += 1
        optimizer.zero_grad()
        rows = views_of(x, copies, slice(0, BATCH), counter[0])
        F.cross_entropy(model(rows.flatten(0, 1)), y.repeat_interleave(copies + 1), reduction="sum").backward()
        gradients = [p.grad_sample.view(BATCH, copies + 1, *p.shape).mean(dim=1) for p in model.parameters()]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
        factors = (0.1 / (norms + 1e-6)).clamp(max=1.0)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            summed = torch.einsum("i,i...", factors, gradient)
            parameter.grad = (summed + 0.1 * torch.randn_like(summed)) / BATCH
            parameter.grad_sample = None
        optimizer.step()

    return step


def main() -> None:
    options = arguments(__doc__ or "")
    rounds = 3 if options.quick else options.rounds
    data = load_dataset("mnist")
    result, groups = {}, {}
    table = Table(title="one step, B = 512, the paper's CNN; ratio to the best non-private step")
    for heading in ("K", "contender", "ms (median)", "ratio", "quartiles"):
        table.add_column(heading)
    for copies in (0, 2, 8):
        contenders = {
            "non-private 64": ordinary(data, copies, 64, True),
            "non-private 128": ordinary(data, copies, 128, True),
            "non-private 512": ordinary(data, copies, 512, True),
            STOCK: ordinary(data, copies, BATCH, False),
            FASTEST: private(data, copies, fastest_engine(data)),
            "dpcert layerwise": private(data, copies, "layerwise"),
            "dpcert vmap": private(data, copies, "vmap"),
            OPACUS: opacus(data, copies),
        }
        seconds = interleaved(contenders, rounds)
        best = min(
            (name for name in contenders if name.startswith("non-private")), key=lambda n: summary(seconds[n])["median_ms"]
        )
        shown = {BEST: seconds[best], **{name: s for name, s in seconds.items() if not name.startswith("non-private")}}
        ratios = {name: ratio(s, seconds[best]) for name, s in shown.items()}
        result[f"K={copies}"] = {name: {**summary(shown[name]), "ratio": ratios[name]} for name in shown}
        result[f"K={copies}"]["speedup over Opacus"] = ratio(seconds[OPACUS], seconds[FASTEST])
        groups[f"K = {copies}"] = {name: r["median"] for name, r in ratios.items()}
        for name, r in ratios.items():
            spread = f"{r['low']:.2f} to {r['high']:.2f}"
            table.add_row(str(copies), name, f"{summary(shown[name])['median_ms']:.0f}", f"{r['median']:.2f}", spread)
    Console(width=120).print(table)
    print(save("training_step", {"rounds": rounds, **result}))
    print(bars("training_step", "Cost of a step (best non-private = 1)", groups, "ratio"))


if __name__ == "__main__":
    main()
