"""Run directories of a grid without any training: files written with the library's own writers, figures chosen by the test."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from dpcert.attacks.kinds import STRENGTHS
from dpcert.certification.metrics import average_certified_radius, certified_accuracy, radii_to_show
from dpcert.methods import METHODS, PRIOR
from dpcert.paper.grid import DATASETS, TARGETS, Cell, needs_of
from dpcert.privacy.ledger import Ledger
from dpcert.store.durable import sha256_hex, write_checked_json
from dpcert.store.records import AttackRow, CertificateRow, Row, SampleRow, header, text_of
from dpcert.training.state import model_bytes

SIZE = 10_000
PLAN = {"delta": 1e-5, "relation": "add-or-remove-one", "noise_multiplier": 1.0, "sampling_probability": 0.01, "clip_norm": 0.1}
SETTINGS = ("sigma", "n0", "n", "alpha", "split", "alpha_is")  # beside the rows and in metrics.json alike
PUBLIC = {"name": "resnet-48", "sha256": "ab" * 32, "data": "150,000 public images"}
PHASES = [
    {"trains": "head", "steps": 4, "batch_size": 1000, "sampling_probability": 1.0, "clip_norm": 0.2, "noise_multiplier": 9.0},
    {"trains": "last:2,norms", "steps": 6, "batch_size": 10, "sampling_probability": 0.01, "clip_norm": 0.1, "noise_multiplier": 1.0},
]  # fmt: skip


def _write_rows(path: Path, kind: type[Row], rows: Sequence[Row]) -> None:
    path.write_text("\n".join([header(kind), *(text_of(row) for row in rows)]) + "\n")


def certificate_rows(radius: np.ndarray, *, skipped: bool = False) -> list[CertificateRow]:
    """A radius of 0 is an image that is not certified; with `skipped`, one that got a wrong answer and no further votes."""
    stride = SIZE // len(radius)
    rows = []
    for k, r in enumerate(radius):
        good = bool(r > 0)
        if skipped and not good:
            rows.append(CertificateRow(k * stride, 1, 2, 0.0, 0, 0.1, None, 10_000, 0.0))
            continue
        rows.append(
            CertificateRow(k * stride, 1, 1 if good else -1, float(r), int(good), 0.1, 9000, 10_000, 0.9 if good else 0.0)
        )
    return rows


def entry(sigma: float, radius: np.ndarray, *, skipped: bool = False) -> dict:
    """The certification as it stands in metrics.json."""
    right = radius > 0
    acr = average_certified_radius(radius, right)
    at = {r: certified_accuracy(radius, right, r) for r in radii_to_show(sigma)}
    facts = {"sigma": sigma, "n0": 100, "n": 10_000, "alpha": 0.001, "fresh_noise": False, "skip_misclassified": skipped}
    return {
        **facts,
        "alpha_is": "per input",
        "examples": len(radius),
        "subset": "some",
        "split": "test",
        "stride": SIZE // len(radius),
        "acr": acr.value,
        "acr_interval": [acr.low, acr.high],
        "certified_accuracy": {f"{r:.2f}": e.value for r, e in at.items()},
        "certified_accuracy_interval": {f"{r:.2f}": [e.low, e.high] for r, e in at.items()},
        "abstained": 0 if skipped else int((~right).sum()),
        "file": f"certificates-sigma{sigma:.2f}{'-skipped' if skipped else ''}.tsv",
    }


def fake_run(
    results: Path,
    cell: Cell,
    radii: dict[float, np.ndarray],
    *,
    clean: float | None = 0.9,
    weights: bool = True,
    samples: Callable[[int], tuple[float, float, float]] | None = None,
    fgsm: Sequence[float] | None = None,
    seconds: float = 100.0,
    epsilon: float = 3.0,
) -> Path:
    """A finished run: `radii` by sigma, `samples` gives (gradient, Hessian, Lipschitz) of the k-th image."""
    skipped = cell.skips_misclassified
    folder = results / cell.name
    folder.mkdir(parents=True)
    config = cell.config().to_toml().encode()
    (folder / "config.toml").write_bytes(config)
    model = _model_and_ledger(folder, sha256_hex(config), epsilon, weights=weights)
    for sigma, radius in radii.items():
        rows = folder / entry(sigma, radius, skipped=skipped)["file"]
        _write_rows(rows, CertificateRow, certificate_rows(radius, skipped=skipped))
        settings = {name: value for name, value in entry(sigma, radius).items() if name in SETTINGS}
        write_checked_json(rows.with_suffix(".json"), {**settings, "model_sha256": model})
    private = {"private": True, "reason": None, "epsilon": epsilon, "accountant": "pld", "steps": 10, **PLAN}
    metrics = {
        "dataset": cell.dataset,
        "method": cell.method,
        "sigma_train": None if METHODS[cell.method].views == "none" else cell.sigma,
        "clean_accuracy": clean,
        "privacy": {
            **private,
            "conditions": [],
            **({"phases": PHASES, "public_inputs": [PUBLIC]} if cell.is_fine_tuned else {}),
        },
        "certification": [entry(sigma, radius, skipped=skipped) for sigma, radius in sorted(radii.items())],
        "timing": {"train_seconds": seconds, "certify_seconds": 20.0},
        "config_sha256": sha256_hex(config),
    }
    write_checked_json(folder / "metrics.json", metrics)
    if samples is not None:
        sigma, radius = next(iter(sorted(radii.items())))
        rows = [
            SampleRow(k * (SIZE // len(radius)), 1, 1, *_ordered(samples(k)), sigma, float(r), int(r > 0))
            for k, r in enumerate(radius)
        ]
        _write_rows(folder / "samples.tsv", SampleRow, rows)
        write_checked_json(folder / "samples.json", {"model_sha256": model})
    if fgsm is not None:
        attacks = [
            AttackRow("fgsm", "base", None, s, 1, 1, 1000, a, max(0.0, a - 0.02), min(1.0, a + 0.02))
            for s, a in zip(STRENGTHS["fgsm"], fgsm, strict=True)
        ]
        _write_rows(folder / "attacks.tsv", AttackRow, attacks)
        write_checked_json(folder / "attacks.json", {"model_sha256": model})
    return folder


def _model_and_ledger(folder: Path, config_sha256: str, epsilon: float, *, weights: bool) -> str:
    """A ledger and the model it was kept for; returns the model's SHA-256, also where the weights are not stored."""
    ledger = Ledger(folder / "ledger.jsonl")
    ledger.open(PLAN)
    ledger.authorise(0, 10, PLAN["noise_multiplier"], PLAN["sampling_probability"])
    ledger.close()
    facts = {"config_sha256": config_sha256, "ledger_head": ledger.head, "epsilon": repr(epsilon), "delta": repr(PLAN["delta"])}
    data = model_bytes(torch.nn.Linear(1, 1, bias=False), facts)
    if weights:
        (folder / "model.safetensors").write_bytes(data)
    return sha256_hex(data)


def _ordered(metrics: tuple[float, float, float]) -> tuple[float, float, float, float]:
    gradient, hessian, lipschitz = metrics
    return gradient, hessian, 0.001, lipschitz


def radius_of(mean: float, sigma: float, count: int = 100, uncertified: float = 0.1, seed: int = 0) -> np.ndarray:
    """Radii about `mean`, a share of them 0, none above what 10,000 votes can prove."""
    generator = np.random.default_rng(seed)
    radius = np.clip(generator.normal(mean, 0.3 * sigma, count), 0.01, 3.19 * sigma)
    radius[: int(uncertified * count)] = 0.0
    return radius


def whole_grid(
    results: Path, *, count: int = 100, worlds: dict[str, dict] | None = None, datasets: Sequence[str] = DATASETS
) -> None:
    """All cells of all targets of the paper, in a world where every sentence of the paper holds; `worlds` changes single methods."""
    share = {
        "regular": 0.5,
        "dpsgd": 0.48,
        "psac": 0.49,
        "dp-gaussian": 3.15,
        "dp-smoothadv": 3.2,
        "dp-stability": 3.15,
        "dp-macer": 3.15,
    }
    for need in needs_of(list(TARGETS.values()), datasets):
        cell = need.cell
        if cell.method in PRIOR:  # the paper has no run of them
            continue
        base = cell.method.split("+")[0]
        world = {
            "mean": share[base] + (0.1 if (base, cell.dataset) == ("dpsgd", "mnist") else 0.0),
            "lost": 0.5 if base in ("regular", "dpsgd", "psac") else 0.05,
            "clean": 0.98 if base in ("regular", "dpsgd", "psac") else 0.97 - 0.001 * cell.sigma,
            "metrics": (1.0, 1.0, 1.0),
            "bimodal": base == "dpsgd",
            "noise": (4.0, 2.0, 0.0),
            "fgsm": (0.9, 0.8, 0.3, 0.1, 0.1),
        }
        if base == "regular":
            world["metrics"] = (30.0, 3.0, 3.0)
        elif base == "psac":
            world["metrics"] = (3.5, 3.0, 3.0)
        elif base == "dpsgd":
            world["metrics"] = (3.0, 2.5, 3.0)
        elif base == "dp-stability":
            world |= {"metrics": (1e4, 4.0, 0.3), "fgsm": (0.95, 0.9, 0.6, 0.12, 0.1)}
            world["clean"] += 0.002 if cell.is_fine_tuned else 0.0
        else:
            world["fgsm"] = (0.92, 0.86, 0.5, 0.11, 0.1)
        if cell.change and cell.change[0][0] != "method.copies":
            world["clean"] -= 0.01
        world |= (worlds or {}).get(cell.method, {})
        radii = {s: radius_of(world["mean"] * s, s, count, world["lost"], cell.seed) for s in need.sigmas}
        generator = np.random.default_rng(7)
        fall = next(iter(sorted(radii.items())), (0.5, np.zeros(count)))
        high, noise = (fall[1] == 0) & (np.arange(count) % 2 == 0), generator.normal(0, 0.1, (count, 3))

        def metrics(k, world=world, fall=fall, high=high, noise=noise):
            gone = 0.4 * fall[1][k] / fall[0]
            up = 3.0 if world["bimodal"] and high[k] else 0.0
            logs = np.array([-gone + up, -gone, -gone]) + np.array(world["noise"]) * noise[k]
            return tuple(float(v) for v in np.array(world["metrics"]) * 10.0**logs)

        fake_run(
            results,
            cell,
            radii,
            clean=world["clean"],
            samples=metrics if need.samples else None,
            fgsm=world["fgsm"] if need.attacks else None,
        )
