"""Every reader of files, each as (valid seeds, how to read, how to damage). Readers that take a path get one on `folder`."""

import gzip
import hashlib
import io
import json
import math
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image

import dpcert
from dpcert.data import cifar, dataset, idx
from dpcert.paper.comparison import figures_of
from dpcert.privacy.ledger import GENESIS, Ledger
from dpcert.privacy.statement import state
from dpcert.report.tables import Certified, RunFacts, summary
from dpcert.runs import certify as certifying
from dpcert.runs import config as configs
from dpcert.runs import presets
from dpcert.runs.predict import read_images
from dpcert.runs.resolve import resolve
from dpcert.scale.tasks import read_record
from dpcert.store.durable import canonical_json, readable_json, sha256_hex
from dpcert.store.metrics import read_metrics
from dpcert.store.records import AttackRow, CertificateRow, CurveRow, RobustRow, SampleRow, header, read_rows, text_of
from dpcert.store.runs import RunDirectory
from dpcert.training.curve import Point
from dpcert.training.state import Origin, load_checkpoint, model_bytes, read_model, save_checkpoint
from tests.conftest import blobs
from tests.fuzz.mutate import NASTY, mutated, nasty

KEY = bytes(range(32))
Damage = Callable[[Random, list[bytes]], bytes]


@dataclass(frozen=True)
class Reader:
    """`read(data, folder)` may return or raise `DpcertError`; `share` of a round's inputs go to it."""

    seeds: Callable[[Path], list[bytes]]
    read: Callable[[bytes, Path], object]
    damage: Damage = field(default=mutated)
    share: int = 1


def _file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    def write_and_read(data: bytes, folder: Path) -> object:
        path = folder / name
        path.write_bytes(data)
        return read(path)

    return write_and_read


# --- data -----------------------------------------------------------------------------------------------------------


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def _idx_seeds(folder: Path) -> list[bytes]:
    images = np.arange(60, dtype=np.uint8).reshape(3, 4, 5)
    plain = [idx_bytes(images), idx_bytes(images[:, 0, 0].copy())]
    return [*plain, *(gzip.compress(data) for data in plain)]


def _read_idx(data: bytes, folder: Path) -> object:
    dimensions = 1 if len(data) % 2 else 3
    return idx.parse_idx(idx.unpacked(data, "x"), dimensions, "x")


def _cifar_seeds(folder: Path) -> list[bytes]:
    table = np.random.default_rng(0).integers(0, 256, (2, cifar.RECORD_BYTES), dtype=np.uint8)
    table[:, 0] %= 10
    return [table.tobytes(), table[:1].tobytes()]


NAMES = ("data_batch_1.bin", "test_batch.bin")
FOLDER = "cifar-10-batches-bin"


def tar_of(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def member(name: str, size: int, **changes: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    for key, value in changes.items():
        setattr(info, key, value)
    return info


def _tar_seeds(folder: Path) -> list[bytes]:
    data = _cifar_seeds(folder)[1]
    files = [(member(f"{FOLDER}/{name}", len(data)), data) for name in NAMES]
    long = (member("x" * 150, 3), b"abc")
    return [tar_of(*files), tar_of(long, *files), tar_of(long, *files, form=tarfile.PAX_FORMAT)]


def _read_tar(data: bytes, folder: Path) -> object:
    """As the fetcher does: whatever tarfile raises is one error."""
    from dpcert.errors import DataError

    whole, cifar.BATCH_RECORDS = cifar.BATCH_RECORDS, 1
    try:
        return dict(cifar.archive_members(io.BytesIO(data), FOLDER, NAMES))
    except Exception as error:
        raise DataError(str(error)) from error
    finally:
        cifar.BATCH_RECORDS = whole


def _npz_seeds(folder: Path) -> list[bytes]:
    small = blobs(0, train=6, test=4, size=4)
    seeds = []
    for save in (np.savez, np.savez_compressed):
        for arrays in (small, small | {"x_train": np.zeros((6, 1, 4, 4), np.uint8), "x_test": np.ones((4, 4, 4))}):
            save(folder / "seed.npz", **arrays)
            seeds.append((folder / "seed.npz").read_bytes())
    return seeds


def _npy_seeds(folder: Path) -> list[bytes]:
    seeds = []
    for array in (np.zeros((4, 4), np.float32), np.asfortranarray(np.ones((2, 1, 4, 4))), np.zeros((1, 4, 4), np.uint8)):
        np.save(folder / "seed.npy", array)
        seeds.append((folder / "seed.npy").read_bytes())
    return seeds


def _png_seeds(folder: Path) -> list[bytes]:
    seeds = []
    for mode, shape in (("L", (8, 8)), ("RGB", (8, 8, 3)), ("RGBA", (8, 8, 4))):
        file, pixels = io.BytesIO(), np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)
        pixels[..., 3:] = 255 if mode == "RGBA" else pixels[..., 3:]  # opaque: transparent pictures are refused
        Image.fromarray(pixels, mode).save(file, "PNG")
        seeds.append(file.getvalue())
    return seeds


# --- config ---------------------------------------------------------------------------------------------------------


def _toml_seeds(folder: Path) -> list[bytes]:
    chosen = ("mnist/dp-gaussian", "mnist/dp-macer", "fashion-mnist/dp-smoothadv+consistency", "mnist/psac")
    made = [resolve(name, {}).to_toml().encode() for name in chosen if name in presets.names()]
    return [*made, b"[train]\nepochs = 3\n", b'[data]\npath = "x.npz"\nsize = 10\n[certify]\nexamples = "all"\n']


def _read_config(path: Path) -> object:
    config = configs.parse(configs.read_toml(path), str(path))
    return config.build_method(), config.settings(), config.to_toml()


def _read_assignment(data: bytes, folder: Path) -> object:
    name, value = configs.parse_assignment(data.decode("utf-8", errors="replace"))
    return resolve(None, {name: value})


# --- ledger ---------------------------------------------------------------------------------------------------------


def events() -> list[dict[str, object]]:
    from dpcert.privacy.clipping import CLIP_RULES
    from dpcert.privacy.mechanism import Plan, opening_facts

    plan = Plan(1000, True, 10, True, 0, 10, 25, "flat", {}, 0.1, 1.0, 3.0, 1e-5)
    assert "flat" in CLIP_RULES
    blocks = [{"event": "authorise", "first_step": f, "steps": s} for f, s in ((0, 10), (10, 10), (20, 5))]
    setting = {"noise_multiplier": 1.0, "sampling_probability": 0.01}
    opening = {"event": "open", "format": 1, **opening_facts(plan, noise_is_secret=True)}
    return [opening, *({**block, **setting} for block in blocks), {"event": "close", "steps": 25}]


def chained(events: list[object]) -> bytes:
    """A ledger whose hashes are right whatever its events say: what a forger without the key can write."""
    head, lines = GENESIS, []
    for event in events:
        digest = hashlib.sha256(f"{head}\n{canonical_json(event)}".encode()).hexdigest()
        lines.append(canonical_json({"data": event, "previous": head, "hash": digest}))
        head = digest
    return ("\n".join(lines) + "\n").encode()


def _ledger_seeds(folder: Path) -> list[bytes]:
    path = folder / "seed.jsonl"
    ledger = Ledger(path, KEY)
    ledger.open({key: value for key, value in events()[0].items() if key not in ("event", "format")})
    ledger.authorise(0, 10, 1.0, 0.01)
    return [chained(list(events())), path.read_bytes()]


def _rechained(random: Random, seeds: list[bytes]) -> bytes:
    changed = nasty(random, events())
    try:
        return chained(changed if isinstance(changed, list) else [changed])
    except ValueError:
        return b"\n"


def _read_ledger(path: Path) -> object:
    ledger = Ledger.load(path, None)
    return str(state(ledger)), state(ledger).as_metrics(), ledger.contains("0" * 64)


# --- weights and checkpoints ----------------------------------------------------------------------------------------


@cache
def _model() -> torch.nn.Module:
    return dpcert.build_model("linear", input_shape=(1, 2, 2), classes=3, seed=0)


def _model_seeds(folder: Path) -> list[bytes]:
    return [model_bytes(_model(), {"method": "dpsgd", "epsilon": "3.0"}), model_bytes(torch.nn.Linear(1, 1), {})]


def _header_edited(random: Random, seeds: list[bytes]) -> bytes:
    """The JSON header of a safetensors file changed in one place, with its length put right."""
    data = random.choice(seeds)
    size = int.from_bytes(data[:8], "little")
    table = nasty(random, json.loads(data[8 : 8 + size]))
    if random.random() < 0.5 and isinstance(table, dict):
        kinds = ("BF16", "F16", "F64", "I8", "BOOL", "F8_E4M3", "F8_E5M2", "C64", "U64", "F4", "F32", "I64")
        for value in table.values():
            if isinstance(value, dict) and "dtype" in value and random.random() < 0.7:
                value["dtype"] = random.choice(kinds)
                value["shape"] = random.choice(([3, 4], [12], [24], [6, 4], [0], [], [48], [2, 3], [3], [6], [12, 1, 2]))
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = dpcert.build_model("linear", input_shape=(1, 2, 2), classes=3, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 1, 2, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def _state_seeds(folder: Path) -> list[bytes]:
    directory = RunDirectory(folder / "run")
    directory.create()
    save_checkpoint(directory, 3, *_trained(), "0" * 64, Origin("1" * 64, "2" * 64), [Point(2, 0.5, None), Point(3, None, 0.5)])
    return [directory.state.read_bytes()]


def _rechecked_state(random: Random, seeds: list[bytes]) -> bytes:
    facts = json.loads(seeds[0])
    del facts["check"]
    changed = nasty(random, facts)
    if not isinstance(changed, dict):
        return (canonical_json(changed) + "\n").encode()
    changed["check"] = sha256_hex(canonical_json(changed).encode())
    return (canonical_json(changed) + "\n").encode()


def _read_state(data: bytes, folder: Path) -> object:
    directory = RunDirectory(folder / "run")
    directory.state.write_bytes(data)
    return load_checkpoint(directory, *_trained())


def _read_checkpoint(data: bytes, folder: Path) -> object:
    """A damaged checkpoint whose digest in state.json is right."""
    directory = RunDirectory(folder / "run")
    (directory.private / "checkpoint-3.safetensors").write_bytes(data)
    facts = {
        "step": 3,
        "checkpoint": "checkpoint-3.safetensors",
        "sha256": sha256_hex(data),
        "ledger_head": "",
        "data_identity": "",
        "config_sha256": None,
        "curve": [[2, 0.5, None], [3, 0.5, 0.75]],
    }
    facts["check"] = sha256_hex(canonical_json(facts).encode())
    return _read_state((canonical_json(facts) + "\n").encode(), folder)


def _checkpoint_seeds(folder: Path) -> list[bytes]:
    _state_seeds(folder)
    return [(folder / "run" / "private" / "checkpoint-3.safetensors").read_bytes()]


# --- certificates ---------------------------------------------------------------------------------------------------

ROWS = [CertificateRow(i, i % 3, (i + 1) % 3 - 1, 0.1 * i, i % 2, 0.01, 90 + i, 100, 0.8) for i in range(4)]
DECISIONS = [RobustRow(i, i % 3, i % 3, i % 3 - 1, 1, 0.01, 500) for i in range(4)]
SAMPLES = [SampleRow(i, i % 3, i % 3, 1e-7 * i, 0.2, 1e-4, 40.0, 0.5, 0.1 * i, 1) for i in range(4)]
ATTACKS = [AttackRow("fgsm", "base", None, 0.1 * i, 1, 1, 500, 0.5, 0.4, 0.6) for i in range(4)]
CURVE = [CurveRow(i, 0.1 * i, math.inf if i % 2 else 0.5, None if i % 2 else 0.25, None if i < 2 else 0.5) for i in range(4)]
KINDS = {CertificateRow: ROWS, RobustRow: DECISIONS, SampleRow: SAMPLES, AttackRow: ATTACKS, CurveRow: CURVE}


def _row_seeds(folder: Path) -> list[bytes]:
    return [("\n".join([header(kind), *map(text_of, rows)]) + "\n").encode() for kind, rows in KINDS.items()]


def _rechecked_rows(random: Random, seeds: list[bytes]) -> bytes:
    """Rows with a field of another kind and the checksum that belongs to it."""
    lines = random.choice(seeds).decode().splitlines()
    place = random.randrange(1, len(lines))
    fields = lines[place].split("\t")[:-1]
    for _ in range(random.choice((1, 1, 3))):
        fields[random.randrange(len(fields))] = random.choice(
            (*map(str, NASTY[:26]), "nan", "inf", "-inf", "1_0", " 1", "1e400", "-1")
        )
    body = "\t".join(fields)
    lines[place] = f"{body}\t{hashlib.sha256(body.encode()).hexdigest()[:12]}"
    return ("\n".join(lines) + "\n").encode("utf-8", errors="replace")


def _read_table(path: Path) -> object:
    columns = path.read_bytes().partition(b"\n")[0]
    kind = next((kind for kind in KINDS if header(kind).encode() == columns), CertificateRow)
    rows = read_rows(kind, path, allow_torn_end=path.stat().st_size % 2 == 0)
    return [text_of(row) for row in rows]


FACTS = {"sigma": 0.5, "n0": 100, "n": 1000, "alpha": 0.001, "model_sha256": "0" * 64}


def _sidecar(facts: object) -> bytes:
    check = {"check": sha256_hex(canonical_json(facts).encode())}
    return readable_json({**facts, **check} if isinstance(facts, dict) else facts)


def _sidecar_seeds(folder: Path) -> list[bytes]:
    return [_sidecar({**FACTS, "seed": None, "noise_key": KEY.hex()}), _sidecar({**FACTS, "seed": 3, "noise_key": KEY.hex()})]


def _read_sidecar(path: Path) -> object:
    certifying.read_facts(path).get("n0")
    key = certifying._recorded_key(path, FACTS, None)
    assert len(key) == 32
    return key


# --- metrics --------------------------------------------------------------------------------------------------------


@cache
def _metrics() -> dict[str, object]:
    metrics = json.loads((Path(__file__).parents[2] / "results" / "mnist-dp-gaussian" / "metrics.json").read_text())
    metrics.pop("check")  # or every edit of it would stop at the checksum
    return metrics


def _metrics_seeds(folder: Path) -> list[bytes]:
    not_private = {
        **_metrics(),
        "privacy": {"private": False, "reason": "no noise", "epsilon": None, "delta": 1e-5, "conditions": []},
    }
    return [json.dumps(value, indent=2).encode() for value in (_metrics(), not_private)]


def _read_metrics(path: Path) -> object:
    metrics = read_metrics(path)
    facts = RunFacts(path, metrics, "", [Certified(entry, []) for entry in metrics["certification"]])
    return summary([facts], figures_of), facts.title


def _read_outcome(path: Path) -> object:
    """A record that says nothing counts as refused."""
    from dpcert.errors import RunError

    record = read_record(path)
    if record == (None, None):
        raise RunError("nothing is recorded")
    return record


READERS: dict[str, Reader] = {
    "idx": Reader(_idx_seeds, _read_idx, share=3),
    "cifar batch": Reader(_cifar_seeds, lambda data, folder: cifar.parse_batch(data, "x", None)),
    "cifar archive": Reader(_tar_seeds, _read_tar, share=2),
    "npz": Reader(_npz_seeds, _file("x.npz", dataset.read_npz), share=3),
    "npy": Reader(_npy_seeds, _file("x.npy", read_images), share=3),
    "png": Reader(_png_seeds, _file("x.png", read_images)),
    "config": Reader(_toml_seeds, _file("x.toml", _read_config), share=3),
    "assignment": Reader(lambda folder: [b"train.epochs=1", b"data.path=/x.npz", b"method.sigma=0.25"], _read_assignment),
    "ledger": Reader(_ledger_seeds, _file("ledger.jsonl", _read_ledger), share=2),
    "ledger, hashes right": Reader(_ledger_seeds, _file("ledger.jsonl", _read_ledger), _rechained, share=2),
    "weights": Reader(_model_seeds, _file("model.safetensors", read_model), share=2),
    "weights, header edited": Reader(_model_seeds, _file("model.safetensors", read_model), _header_edited, share=2),
    "state": Reader(_state_seeds, _read_state),
    "state, checksum right": Reader(_state_seeds, _read_state, _rechecked_state),
    "checkpoint, digest right": Reader(_checkpoint_seeds, _read_checkpoint),
    "checkpoint, header edited": Reader(_checkpoint_seeds, _read_checkpoint, _header_edited),
    "rows": Reader(_row_seeds, _file("rows.tsv", _read_table), share=2),
    "rows, checksum right": Reader(_row_seeds, _file("rows.tsv", _read_table), _rechecked_rows, share=2),
    "outcome": Reader(lambda folder: [b'{"error": "RunError", "reason": "no space"}'], _file("outcome", _read_outcome)),
    "sidecar": Reader(_sidecar_seeds, _file("certificates-sigma0.50.json", _read_sidecar)),
    "sidecar, checksum right": Reader(
        _sidecar_seeds,
        _file("certificates-sigma0.50.json", _read_sidecar),
        lambda random, seeds: _sidecar(nasty(random, {**FACTS, "seed": None, "noise_key": KEY.hex()})),
    ),
    "metrics": Reader(_metrics_seeds, _file("metrics.json", _read_metrics)),
    "metrics, JSON right": Reader(
        _metrics_seeds,
        _file("metrics.json", _read_metrics),
        lambda random, seeds: json.dumps(nasty(random, json.loads(random.choice(seeds)))).encode(),
    ),
}  # fmt: skip
