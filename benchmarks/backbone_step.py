"""How much time does a private step cost on larger models: the residual backbone, a small ViT and a depthwise network?

The backbone (width 48, BatchNorm frozen) is compared with the fastest non-private step we could write and with Opacus 1.6, as
in `training_step`; with only its head trained it is compared with the forward pass. The ViT and the depthwise network compare
the engine with the reference engine (``torch.func.vmap``).
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks._measure import arguments, interleaved, ratio, save, summary
from benchmarks.training_step import KEY, chunks, views_of
from dpcert.data.dataset import Dataset
from dpcert.gradients.choose import choose
from dpcert.gradients.engine import Clip
from dpcert.gradients.layerwise import Layerwise
from dpcert.gradients.memory import default_physical_batch, keep_freed_memory
from dpcert.gradients.vmap import clipped_sum
from dpcert.losses import cross_entropy
from dpcert.methods import method
from dpcert.models.resnet import resnet
from dpcert.privacy.clipping import Flat
from dpcert.privacy.ledger import Ledger
from dpcert.privacy.mechanism import Mechanism, opening_facts
from dpcert.training.loop import plan_for
from dpcert.training.settings import Settings
from dpcert.training.step import StepContext, private_step, small_parts_change_no_bit
from dpcert.workers import worker_count

SHAPE, COPIES, SIGMA = (3, 32, 32), 2, 0.5
BEST, OPACUS, OURS = "best non-private", "Opacus 1.6", "dpcert"
Step = Callable[[], object]


def backbone(trained: str = "") -> nn.Module:
    """The backbone as it is fine-tuned: BatchNorm with fixed statistics; only parameters with `trained` in their name."""
    torch.manual_seed(0)
    model = resnet("resnet-48", SHAPE, 10).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    return model


def images(batch: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(batch, *SHAPE, generator=generator), torch.randint(0, 10, (batch,), generator=generator)
    return Dataset(x, y, x[:1], y[:1], classes=10)


def ordinary(data: Dataset, size: int) -> Step:
    """A non-private step on the same rows: the same views, one backward pass, SGD with momentum."""
    model = backbone().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y, counter = data.x_train, data.y_train, [0]

    def step() -> None:
        counter[0] += 1
        optimizer.zero_grad()
        for part in chunks(len(x), size):
            rows = views_of(x[part], COPIES, part, counter[0])
            labels = y[part].repeat_interleave(COPIES + 1)
            (F.cross_entropy(model(rows.flatten(0, 1)), labels, reduction="sum") / (len(x) * (COPIES + 1))).backward()
        optimizer.step()

    return step


def forward_only(data: Dataset, size: int) -> Step:
    """The forward pass of the same views, without gradients."""
    model, counter = backbone().to(memory_format=torch.channels_last), [0]

    def step() -> None:
        counter[0] += 1
        with torch.no_grad():
            for part in chunks(len(data.x_train), size):
                model(views_of(data.x_train[part], COPIES, part, counter[0]).flatten(0, 1))

    return step


def private(data: Dataset, trained: str = "") -> Step:
    """The real private step of dpcert on a batch of all records (q = 1)."""
    model, m, batch = backbone(trained), method("dp-gaussian", sigma=SIGMA, copies=COPIES), len(data.x_train)
    settings = Settings.of(epsilon=8.0, epochs=1000, batch_size=batch, learning_rate=0.01)
    plan, ledger = plan_for(data, m, settings), Ledger()
    ledger.open(opening_facts(plan, noise_is_secret=True))
    ledger.authorise(0, plan.steps, plan.noise_multiplier, plan.sampling_probability)
    problem = StepContext(
        model,
        data.x_train,
        data.y_train,
        m,
        Clip(Flat(), 0.1),
        choose("auto", model, m.loss, SHAPE, worker_count(torch.device("cpu")), rows=plan.steps * batch),
        Mechanism(plan, KEY, ledger),
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9),
        default_physical_batch(model, SHAPE),
    )
    problem = replace(problem, small_parts=small_parts_change_no_bit(problem))  # as training does
    counter = [0]

    def step() -> None:
        private_step(problem, counter[0])
        counter[0] += 1

    return step


def opacus(data: Dataset, size: int) -> Step:
    """As in the authors' code: hooks give a gradient per row; the rows of one example are averaged, clipped and summed.

    Opacus refuses to train BatchNorm, so those parameters stay frozen here, which saves it some work.
    """
    warnings.simplefilter("ignore")
    from opacus import GradSampleModule

    model = backbone().train()  # Opacus records nothing in evaluation mode
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval().requires_grad_(False)
    model = GradSampleModule(model, loss_reduction="sum", strict=False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    x, y, counter = data.x_train, data.y_train, [0]

    def step() -> None:
        counter[0] += 1
        sums = [torch.zeros_like(p) for p in parameters]
        for part in chunks(len(x), size):
            optimizer.zero_grad()
            rows = views_of(x[part], COPIES, part, counter[0])
            F.cross_entropy(model(rows.flatten(0, 1)), y[part].repeat_interleave(COPIES + 1), reduction="sum").backward()
            gradients = [p.grad_sample.view(len(rows), COPIES + 1, *p.shape).mean(dim=1) for p in parameters]
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
            factors = (0.1 / (norms + 1e-6)).clamp(max=1.0)
            for total, gradient, parameter in zip(sums, gradients, parameters, strict=True):
                total += torch.einsum("i,i...", factors, gradient)
                parameter.grad_sample = None
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = (total + 0.1 * torch.randn_like(total)) / len(x)
        optimizer.step()

    return step


class Attention(nn.Module):
    """A transformer block with the projections of queries, keys and values in one linear layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(rows, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, width))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    """A small vision transformer with a class token and position embeddings."""

    def __init__(self, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(0.02 * torch.randn(1, 65, width))
        self.blocks = nn.Sequential(*(Attention(width, 3) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class Inverted(nn.Module):
    """An inverted residual block: expand, depthwise convolution, project."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.layers = nn.Sequential(
            *(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()),
            *(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def depthwise() -> nn.Module:
    stem = [nn.Conv2d(3, 24, 3, 2, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU6()]
    down = [nn.Conv2d(24, 48, 2, 2), *(Inverted(48) for _ in range(2))]
    return nn.Sequential(
        *stem, Inverted(24), Inverted(24), *down, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)
    ).eval()


def engine_step(model: nn.Module, engine, data: Dataset, size: int) -> Step:
    """The clipped sum of one engine, without noise and update."""
    model, clip = copy.deepcopy(model), Clip(Flat(), 0.1)
    x, y = data.x_train, data.y_train

    def step() -> None:
        for part in chunks(len(x), size):
            engine(model, cross_entropy, views_of(x[part], COPIES, part, 0), y[part], clip)

    return step


def compared(title: str, contenders: dict[str, Step], base: str, rounds: int, table: Table) -> dict[str, object]:
    """Time the contenders and add their ratios to `base`, the fastest of the contenders whose names begin with it."""
    seconds = interleaved(contenders, rounds, warm_up=1)
    best = min((name for name in contenders if name.startswith(base)), key=lambda name: summary(seconds[name])["median_ms"])
    shown = {base: seconds[best], **{name: s for name, s in seconds.items() if not name.startswith(base)}}
    result: dict[str, object] = {name: {**summary(s), "ratio": ratio(s, seconds[best])} for name, s in shown.items()}
    if OPACUS in seconds:
        result["speedup over Opacus"] = ratio(seconds[OPACUS], seconds[OURS])
    for name, s in shown.items():
        r = ratio(s, seconds[best])
        table.add_row(title, name, f"{summary(s)['median_ms']:.0f}", f"{r['median']:.2f}", f"{r['low']:.2f} to {r['high']:.2f}")
    return result


def main() -> None:
    options = arguments(__doc__ or "")
    keep_freed_memory()  # as training does; every contender profits
    rounds, batch = (3, 64) if options.quick else (options.rounds, 512)
    data, part = images(batch), images(min(batch, 32))
    table = Table(title=f"one step, K = {COPIES}; the backbone with B = {batch}, the engines with {len(part.x_train)} examples")
    for heading in ("case", "contender", "ms (median)", "ratio", "quartiles"):
        table.add_column(heading)
    every = {
        "best non-private 16": ordinary(data, 16),
        "best non-private 32": ordinary(data, 32),
        "best non-private 64": ordinary(data, 64),
        OURS: private(data),
        OPACUS: opacus(data, 16),
    }
    head = {
        "forward pass 32": forward_only(data, 32),
        "forward pass 64": forward_only(data, 64),
        "forward pass 128": forward_only(data, 128),
        OURS: private(data, "head"),
    }
    result = {
        "backbone, all": compared("all parameters", every, BEST, rounds, table),
        "backbone, head": compared("head only", head, "forward pass", rounds, table),
    }
    for name, model in {"ViT": Vit().eval(), "depthwise": depthwise()}.items():
        engines = {OURS: engine_step(model, Layerwise(), part, 16), "vmap": engine_step(model, clipped_sum, part, 16)}
        result[name] = compared(name, engines, OURS, rounds, table)
    Console(width=120).print(table)
    print(save("backbone_step", {"rounds": rounds, "batch": batch, **result}))


if __name__ == "__main__":
    main()
