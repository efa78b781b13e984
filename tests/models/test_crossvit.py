"""CrossViT-Tiny: timm's names and logits, weights that load or are refused in one line, rows that stay apart."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import dpcert
from dpcert.data import fetch
from dpcert.errors import ModelError
from dpcert.isolation import refuse_mixing
from dpcert.models import crossvit
from dpcert.models.check import check_model
from dpcert.models.checkpoint import read_tensors
from dpcert.models.crossvit import Architecture, CrossViT, CrossViTClassifier, crossvit_tiny, load_published
from dpcert.pretraining import hub

REFERENCE = json.loads((Path(__file__).parent / "crossvit_reference.json").read_text())
SMALL = Architecture(patches=(15, 14), widths=(8, 12), depths=((1, 2), (2, 1)), heads=2, mlp_ratio=2)  # 5 tokens in each branch


def small(classes=3, size=30):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CrossViT(classes, size, SMALL)


def small_classifier(classes=3, shape=(3, 16, 20)):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CrossViTClassifier(shape, classes, 30, SMALL)


def stream(name):
    words = [REFERENCE["seed"], int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")]
    return np.random.default_rng(words)


def filled(name, shape):
    """The reference's rule for the value of a tensor."""
    values = stream(name).standard_normal(shape)
    if len(shape) >= 2 and name.endswith("weight"):
        values = values / np.sqrt(np.prod(shape[1:]))
    elif "norm" in name and name.endswith("weight"):
        values = 1 + 0.1 * values
    else:
        values = (0.1 if name.endswith("bias") else 0.5) * values
    return torch.from_numpy(values.astype(np.float32))


@pytest.fixture(scope="module")
def reference():
    model = crossvit_tiny()
    model.load_state_dict({name: filled(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()})
    pixels = torch.from_numpy(stream("input").random((2, 3, 240, 240)).astype(np.float32))
    return model, pixels


def gap(model, pixels):
    with torch.no_grad():
        return float((model(pixels) - torch.tensor(REFERENCE["logits"])).abs().max())


def test_names_and_shapes_are_timms():
    model = crossvit_tiny()
    shapes = sorted((name, list(tensor.shape)) for name, tensor in model.state_dict().items())
    assert len(shapes) == REFERENCE["tensors"] and sum(p.numel() for p in model.parameters()) == 6_727_700
    digest = hashlib.sha256(json.dumps(shapes, separators=(",", ":")).encode()).hexdigest()
    assert digest == REFERENCE["shapes_sha256"]
    assert {"head.0.weight", "head.1.bias", "pos_embed_0", "cls_token_1"} <= {name for name, _ in shapes}


def test_logits_are_timms(reference):
    assert gap(*reference) < 1e-4


@pytest.mark.parametrize(
    "broken",
    [
        lambda m, patch: patch.setattr(m.blocks[1].fusion[0].attn, "scale", 1.0),
        lambda m, patch: patch.setattr(m.blocks[0].blocks[0][0].attn, "heads", 1),
        lambda m, patch: patch.setattr(m.norm[0], "eps", 0.1),
        lambda m, patch: patch.setattr(m.blocks[2].blocks[1][3].mlp, "act", torch.nn.ReLU()),
    ],
    ids=["scale", "heads", "epsilon", "activation"],
)
def test_the_reference_logits_notice_a_wrong_network(reference, monkeypatch, broken):
    model, pixels = reference
    broken(model, monkeypatch)
    assert gap(model, pixels) > 1e-4


def test_attention_is_torchs():
    """An oracle besides the reference: nn.MultiheadAttention with the same weights."""
    torch.manual_seed(0)
    ours, theirs = crossvit.Attention(12, 3), torch.nn.MultiheadAttention(12, 3, batch_first=True)
    theirs.in_proj_weight.data, theirs.in_proj_bias.data = ours.qkv.weight.data, ours.qkv.bias.data
    theirs.out_proj.weight.data, theirs.out_proj.bias.data = ours.proj.weight.data, ours.proj.bias.data
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])


def test_cross_attention_is_row_0_of_attention():
    torch.manual_seed(0)
    ours, theirs = crossvit.CrossAttention(12, 3), crossvit.Attention(12, 3)
    theirs.qkv.weight.data = torch.cat([ours.wq.weight, ours.wk.weight, ours.wv.weight]).detach()
    theirs.qkv.bias.data = torch.cat([ours.wq.bias, ours.wk.bias, ours.wv.bias]).detach()
    theirs.proj = ours.proj
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(ours(x), theirs(x)[:, :1])


def test_images_of_the_users_size_are_resized_and_normalized_inside(reference):
    bare, pixels = reference
    model = CrossViTClassifier((3, 240, 240), 10)
    model.network.load_state_dict(bare.state_dict())
    mean, scale = (torch.tensor(v).view(3, 1, 1) for v in (crossvit.IMAGENET_MEAN, crossvit.IMAGENET_SCALE))
    assert gap(model, pixels * scale + mean) < 1e-4
    small_images = CrossViTClassifier((3, 32, 32), 7)
    assert small_images(torch.rand(2, 3, 32, 32)).shape == (2, 7)
    assert {name.removeprefix(crossvit.PREFIX) for name in small_images.state_dict()} >= set(bare.state_dict())


def test_every_parameter_has_a_gradient_and_rows_stay_apart():
    model = small_classifier()
    model(torch.rand(2, 3, 16, 20)).logsumexp(dim=1).sum().backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    keys = [name for name in unused if not name.endswith(".wk.bias")]  # softmax ignores what is added to all scores
    assert not keys
    refuse_mixing(model, (3, 16, 20))
    check_model(model, (3, 16, 20), 3)
    torch.fx.symbolic_trace(model)


class Shares(torch.nn.Module):
    def forward(self, x):
        return x - x.mean(dim=0)


def test_a_twin_that_shares_tokens_is_refused():
    model = small_classifier()
    model.network.blocks[1].revert_projs[0] = torch.nn.Sequential(torch.nn.Linear(12, 8), Shares())
    with pytest.raises(ModelError, match="revert_projs.0.1"):
        refuse_mixing(model, (3, 16, 20))


def test_features_and_heads_give_the_logits():
    model = small_classifier()
    x = torch.rand(4, 3, 16, 20)
    left, right = model.features(x).split([8, 12], dim=1)
    torch.testing.assert_close(model(x), (model.network.head[0](left) + model.network.head[1](right)) / 2)


def test_large_images_are_smoothed_before_pixels_are_dropped():
    """A pattern that alternates at every pixel is gray at a quarter of the size."""
    model = CrossViTClassifier((3, 120, 120), 3, 30, SMALL)
    stripes = (torch.arange(120) % 2).float().expand(1, 3, 120, 120)
    middle = model.resize(stripes)[..., 4:-4, 4:-4]
    assert float((middle - 0.5).abs().max()) < 0.05


@pytest.mark.parametrize("size", [0, -240, 241, 12, 224, 60, 2400, True, 240.0])
def test_input_sizes_that_do_not_fit_the_patches_are_refused(size):
    with pytest.raises(ModelError, match=r"^model.input_size is .*crossvit-tiny.* multiple of 120 in 120..960$"):
        CrossViTClassifier((3, 32, 32), 10, size)


@pytest.mark.parametrize("shape", [(1, 28, 28), (4, 32, 32), (32, 32), (3, 0, 32)])
def test_images_without_three_channels_are_refused(shape):
    with pytest.raises(ModelError, match="color images"):
        CrossViTClassifier(shape, 10)


@pytest.mark.parametrize("patches", [(12, 16), (6, 8), (15, 14), (5, 7)])
def test_the_smallest_input_size_fits_both_patches(patches):
    """The stated multiple is valid, and no smaller number is."""
    architecture = Architecture(patches=patches)

    def fits(size):
        return size * 14 % 15 == 0 and size % patches[0] == 0 and size * 14 // 15 % patches[1] == 0

    assert [size for size in range(1, architecture.multiple + 1) if fits(size)] == [architecture.multiple]


def published(tmp_path, classes=1000, size=30, **changes):
    """A small checkpoint with timm's names and ImageNet heads; None removes a tensor."""
    tensors = {name: tensor.clone() + 0.01 for name, tensor in small(classes, size).state_dict().items()}
    tensors = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path)
    return path, tensors


def test_a_published_checkpoint_loads_with_new_heads(tmp_path):
    path, tensors = published(tmp_path)
    model = small_classifier()
    load_published(model.network, read_tensors(path), str(path))
    for name, tensor in model.network.state_dict().items():
        expected = torch.zeros_like(tensor) if name.startswith("head.") else tensors[name]
        assert torch.equal(tensor, expected), name
    assert not model(torch.rand(2, 3, 16, 20)).any()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_names_of_the_first_release_load_too(tmp_path):
    path, tensors = published(tmp_path)
    old = {name.replace("embed_", "embed.").replace("token_", "token."): tensor for name, tensor in tensors.items()}
    assert "pos_embed.0" in old and "patch_embed.0.proj.weight" in old
    safetensors.torch.save_file(old, path)
    model = small()
    load_published(model, read_tensors(path), str(path))
    assert torch.equal(model.cls_token_1, tensors["cls_token_1"])


def test_half_precision_loads_as_float32(tmp_path):
    _, tensors = published(tmp_path)
    safetensors.torch.save_file({name: tensor.half() for name, tensor in tensors.items()}, tmp_path / "half.safetensors")
    model = small()
    load_published(model, read_tensors(tmp_path / "half.safetensors"), "half.safetensors")
    assert model.norm[0].weight.dtype == torch.float32
    torch.testing.assert_close(model.pos_embed_0.detach(), tensors["pos_embed_0"], atol=1e-3, rtol=1e-3)


def test_positions_of_another_size_are_interpolated(tmp_path):
    """A linear ramp over the image stays one: the middle of the new grid is the mean of the old."""
    ramp = torch.arange(4.0).view(1, 1, 4).expand(1, 4, 4).flatten(1)
    positions = torch.cat([torch.full((1, 1), 7.0), ramp], dim=1)[..., None].expand(1, 17, 8).contiguous()
    path, _ = published(tmp_path, size=60, pos_embed_0=positions)
    model = small(size=30)
    load_published(model, read_tensors(path), str(path))
    loaded = model.pos_embed_0[0, :, 0]
    assert loaded[0] == 7.0 and loaded.shape == (5,)
    assert torch.allclose(loaded[1:].view(2, 2), loaded[1:3].expand(2, 2)) and loaded[1] < 1.5 < loaded[2]
    torch.testing.assert_close(loaded[1:].mean(), torch.tensor(1.5))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"norm.0.weight": None}, "has no tensor 'norm.0.weight'; use"),
        ({"norm.0.weight": None, "norm.1.bias": None}, "has no tensor 'norm.0.weight' and 1 more"),
        ({"head.1.bias": None}, "has no tensor 'head.1.bias'"),
        ({"blocks.9.x": torch.zeros(1)}, "has an unknown tensor 'blocks.9.x'"),
        ({"norm.0.weight": torch.zeros(9)}, r"'norm.0.weight' is torch.float32 \[9\], the model needs float \[8\]"),
        ({"head.0.weight": torch.zeros(1000, 9)}, r"'head.0.weight' is torch.float32 \[1000, 9\]"),
        (
            {"pos_embed_0": torch.zeros(1, 7, 8)},
            r"'pos_embed_0' is torch.float32 \[1, 7, 8\], the model needs float \[1, 5, 8\]",
        ),
        ({"pos_embed_0": torch.zeros(1, 0, 8)}, "'pos_embed_0' is"),
        ({"pos_embed_0": torch.zeros(1, 1, 8)}, "'pos_embed_0' is"),
        ({"pos_embed_0": torch.zeros(3)}, "'pos_embed_0' is"),
        ({"pos_embed_0": torch.zeros(1, 10, 8, dtype=torch.int64)}, "'pos_embed_0' is torch.int64"),
        ({"norm.0.weight": torch.zeros(8, dtype=torch.int64)}, "'norm.0.weight' is torch.int64"),
        ({"norm.0.weight": torch.full((8,), torch.nan)}, "'norm.0.weight' has NaN or infinite values"),
        ({"head.0.bias": torch.full((1000,), torch.inf)}, "'head.0.bias' has NaN or infinite values"),
        ({"norm.0.weight": torch.full((8,), 1e300, dtype=torch.float64)}, "'norm.0.weight' has NaN or infinite values"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line(tmp_path, changes, message):
    path, _ = published(tmp_path, **changes)
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=message) as refusal:
        load_published(model, read_tensors(path), str(path))
    assert "\n" not in str(refusal.value) and str(path) in str(refusal.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04K\x01.", b"PK\x03\x04" + bytes(50), b"<!DOCTYPE html>\n<html>", bytes(8) + b"{}"]
)
def test_files_of_another_kind_are_refused_in_one_line(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="model.safetensors") as refusal:
        load_published(small(), read_tensors(path), str(path))
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match="absent.safetensors cannot be read"):
        read_tensors(tmp_path / "absent.safetensors")


def test_without_a_network_the_manual_steps_are_named(tmp_path, monkeypatch):
    def unreachable(url, timeout):
        raise OSError("no route")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fetch.urllib.request, "urlopen", unreachable)
    with pytest.raises(ModelError, match="no route.*download model.safetensors from https://.*model.weights=FILE") as refusal:
        hub.crossvit_weights()
    assert "\n" not in str(refusal.value) and not list(tmp_path.rglob("*.safetensors"))


def test_a_download_is_kept_if_it_is_safetensors(tmp_path, monkeypatch):
    path, _ = published(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    page = tmp_path / "page.html"
    page.write_text("<html>log in</html>")
    monkeypatch.setattr(hub, "CROSSVIT_URL", page.as_uri())
    with pytest.raises(ModelError, match="not a .safetensors file"):
        hub.crossvit_weights()
    monkeypatch.setattr(hub, "CROSSVIT_URL", path.as_uri())
    kept = hub.crossvit_weights()
    assert kept.read_bytes() == path.read_bytes()
    path.unlink()
    assert hub.crossvit_weights() == kept


@pytest.mark.slow
def test_one_private_step_of_the_full_network():
    """B = 16 at 240 x 240 pixels, DP-Gaussian with one noisy copy, through `dpcert.train` with all of its checks."""
    generator = np.random.default_rng(0)
    images, labels = generator.random((72, 3, 32, 32), dtype=np.float32), np.arange(72) % 10
    data = dpcert.Dataset(images[:64], labels[:64], images[64:], labels[64:], classes=10, size=64)
    model = CrossViTClassifier((3, 32, 32), 10)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    method = dpcert.method("dp-gaussian", sigma=0.25, copies=1)
    options = {"clip_norm": 0.1, "optimizer": "adam", "learning_rate": 1e-3, "noise_seed": 1}
    run = dpcert.train(model, data, method, epochs=16 / 64 + 1e-9, batch_size=16, physical_batch=16, **options)
    assert run.plan.steps == 1 and run.plan.batch_size == 16
    moved = {name: float((parameter.detach() - before[name]).abs().max()) for name, parameter in model.named_parameters()}
    assert all(0 < change <= 1.01e-3 for change in moved.values())  # Adam's first step: the learning rate, in every weight
