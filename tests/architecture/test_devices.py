"""The hot path stays on its device: everything that waits for a device, or makes a tensor on the CPU, is listed with a reason.

Each step and each vote runs these files. `tests/scale/test_meta_device.py` runs them without a CPU tensor; this list also has
what it cannot see: code that works on a GPU, but stops Python until the GPU is idle.
"""

import ast
from collections import Counter

import pytest

from .test_imports import SOURCE

HOT = (
    *("views/original", "views/gaussian", "views/smoothadv", "losses", "input_gradients"),
    *("gradients/engine", "gradients/vmap", "gradients/layerwise", "gradients/layers", "gradients/parts", "gradients/traced"),
    *("privacy/clipping", "privacy/noise", "privacy/sampling", "training/step", "training/averaging", "rng", "workers"),
    *("certification/votes", "certification/bank", "certification/heads", "certification/compiled", "certification/smooth"),
)
LEAVING = {"numpy", "item", "tolist", "cpu", "nonzero"}  # methods that copy from a device and wait for it
ASKING = {"bool", "float", "int", "torch.equal", "torch.allclose"}  # of a tensor, these wait too
MAKING = {
    *("zeros", "ones", "empty", "full", "tensor", "as_tensor", "arange", "linspace", "eye", "rand", "randn", "randint"),
    *("randperm", "Generator", "from_numpy", "frombuffer"),
}

NUMBER = "a Python number"
COUNTED = "of NumPy counts, which have left the device"
ONCE = "once per model, before the first step or vote"
SECRET = "the secret stream is AES on the CPU; what it draws is moved to the device explicitly"
INDICES = "indices of the batch, which are drawn on the CPU and stay there"
ON_CPU = "only for a model on the CPU"
PROBE = "a fixed probe, the same on every device; moved to the device before it is used"

JUSTIFIED: dict[str, dict[str, str]] = {
    "views/gaussian": {"int(self.keep_original)": NUMBER},
    "views/smoothadv": {"int(self.keep_original)": NUMBER},
    "losses": {"float(sigma)": NUMBER},
    "input_gradients": {"int(p)": NUMBER},
    "gradients/engine": {"bool(torch.isfinite(norms).all())": "asked on a CPU only"},
    "gradients/parts": {
        "torch.rand(5, 7)": ONCE,
        "torch.rand(5, 3)": ONCE,
        "torch.allclose(_onednn_product(left, right), left @ right.mT)": ONCE,
        "torch.tensor(squares, dtype=torch.float64)": "asked on a CPU only",
    },
    "privacy/noise": {"torch.from_numpy(standard_normal(bounded.value.numel(), key, step))": SECRET},
    "privacy/sampling": {"int(Fraction(sampling_probability) * 2 ** 64)": NUMBER},
    "training/step": {
        "torch.from_numpy(context.mechanism.sample(len(context.labels), step))": SECRET,
        "torch.tensor([context.first_stored, context.first_stored + len(context.images)])": INDICES,
        "torch.searchsorted(batch, stored).tolist()": INDICES,
        "torch.cat([batch[:0], *(batch[part.start:part.stop] for part in parts)]).numpy()": INDICES,
        "int(min(size, most))": NUMBER,
        "torch.Generator()": PROBE,
        "torch.rand((large, context.method.views.count, *shape), generator=generator)": PROBE,
        "torch.randn(shape, generator=torch.Generator().manual_seed(0))": PROBE,
        "torch.arange(len(x))": "a mask of rows, once per training: an index may be on the CPU",
        "torch.equal(whole, torch.cat(in_small))": ONCE,
        "torch.equal(before[others], views(model, other, labels, noise)[others])": ONCE,
    },
    "rng": {
        "int(purpose)": NUMBER,
        "torch.from_numpy(_generator(key, purpose, step, part).standard_normal(shape, dtype=np.float32))": ON_CPU,
        "torch.empty((len(blocks), block, *shape))": ON_CPU,
        "drawn.numpy()": ON_CPU,
    },
    "certification/votes": {
        "torch.bincount(votes, minlength=classes + 1)[:classes].cpu()": "a few numbers for up to a million logits",
        "torch.bincount(votes, minlength=classes + 1)[:classes].cpu().numpy()": "the line above",
    },
    "certification/bank": {
        "torch.randn(x.shape, generator=torch.Generator().manual_seed(0))": PROBE,
        "torch.Generator()": PROBE,
        "bool((a - b).abs().max() <= _AGREEMENT * b.abs().max())": ONCE,
    },
    "certification/heads": {
        "tensor.detach().cpu()": ONCE,
        "tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()": ONCE,
        "torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))": PROBE,
        "torch.Generator()": PROBE,
        "torch.equal(shared(noisy), expected)": ONCE,
    },
    "certification/compiled": {
        "value.contiguous().numpy()": ON_CPU,
        "torch.from_numpy(self._session.run(None, feeds)[0])": ON_CPU,
        "torch.randn((_ROWS, *features.shape[1:]), generator=torch.Generator().manual_seed(0))": ON_CPU,
        "torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))": ON_CPU,
        "torch.Generator()": ON_CPU,
        "torch.arange(_ROWS)": ON_CPU,
        "torch.arange(len(mixed))": ON_CPU,
        "torch.arange(0, len(mixed), 2)": ON_CPU,
        "int(row)": ON_CPU,
        "float('inf')": NUMBER,
    },
    "certification/smooth": {
        "int(selection.argmax())": COUNTED,
        "int(votes[selected])": COUNTED,
        "int(c)": COUNTED,
        "int(votes[first])": COUNTED,
        "int(votes[second])": COUNTED,
        "int(counter.count(x, 0, n0, Purpose.CERTIFY_SELECTION, index).argmax())": COUNTED,
        "int(counter.count(x, cast, look, Purpose.CERTIFY_ESTIMATION, index)[selected])": COUNTED,
        "float(ndtr(radius / counter.sigma))": NUMBER,
    },
}
ALSO_ONCE = {
    "training/step": {"torch.Generator()": 2},
    "certification/compiled": {"torch.Generator()": 2, "torch.arange(len(mixed))": 2},
}


def found_in(source: str) -> Counter[str]:
    """The calls of a file that wait for a device or make a tensor without naming a device."""
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in LEAVING
        makes = name.startswith("torch.") and name.removeprefix("torch.") in MAKING
        named = any(keyword.arg == "device" for keyword in node.keywords)
        if is_method or name in ASKING or (makes and not named):
            found[ast.unparse(node)] += 1
    return found


@pytest.mark.parametrize("name", HOT)
def test_what_leaves_the_device_is_listed_with_a_reason(name):
    found = found_in((SOURCE / f"{name}.py").read_text())
    listed = Counter(dict.fromkeys(JUSTIFIED.get(name, {}), 1) | ALSO_ONCE.get(name, {}))
    new, gone = found - listed, listed - found
    assert not new, f"{name}: keep it on the device, or list it with a reason: {dict(new)}"
    assert not gone, f"{name}: listed, but not there any more: {dict(gone)}"


def test_every_reason_is_for_a_hot_file():
    assert set(JUSTIFIED) | set(ALSO_ONCE) <= set(HOT)
    assert all(reason for listed in JUSTIFIED.values() for reason in listed.values())


@pytest.mark.parametrize(
    "line",
    [
        "loss = losses.sum().item()",
        "if bool(mask.any()): pass",
        "value = float(norms.max())",
        "rows = x.cpu().numpy()",
        "classes = torch.arange(10)",
        "g = torch.Generator().manual_seed(0)",
        "same = torch.equal(a, b)",
        "here = right.nonzero()[:, 0].tolist()",
        "x = torch.as_tensor(rows)",
    ],
)
def test_twin_a_new_one_is_seen(line):
    assert found_in(line)


@pytest.mark.parametrize(
    "line", ["torch.arange(10, device=logits.device)", "x.new_zeros(3)", "torch.zeros_like(x)", "x.float()"]
)
def test_what_follows_its_device_is_not_listed(line):
    assert not found_in(line)
