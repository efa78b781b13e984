"""CrossViT-Tiny (Chen, Fan and Panda 2021): two transformers on patches of two sizes that exchange their class tokens.

Parameter names are those of timm's ``crossvit_tiny_240``, so the published ImageNet weights load. There is no dropout, and
attention is written with plain products: the fused kernel has no batching rule under ``torch.func.vmap``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ModelError
from .checkpoint import load_weights
from .preprocessing import Resize, check_input
from .resnet import Normalize

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_SCALE = (0.229, 0.224, 0.225)
PREFIX = "network."  # of the published names in a `CrossViTClassifier`
_LAYER_NORM_EPSILON = 1e-6
_INITIAL_SCALE = 0.02


@dataclass(frozen=True)
class Architecture:
    """The sizes of a CrossViT. The pairs are for the branches of small and of large patches."""

    patches: tuple[int, int] = (12, 16)
    widths: tuple[int, int] = (96, 192)
    depths: tuple[tuple[int, int], ...] = ((1, 4), (1, 4), (1, 4))  # transformer blocks of the branches, in each stage
    heads: int = 3
    mlp_ratio: int = 4

    @property
    def multiple(self) -> int:
        """Input sizes must be multiples of this: the second branch sees the image reduced to 14/15 of its size."""
        small, large = self.patches
        return math.lcm(15, small, 15 * large // math.gcd(14, 15 * large))


TINY = Architecture()


def _norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=_LAYER_NORM_EPSILON)


def _attend(query: Tensor, key: Tensor, value: Tensor, heads: int, scale: float) -> Tensor:
    """Multi-head attention of ``[n, tokens, width]`` tensors."""
    query, key, value = (torch.unflatten(part, -1, (heads, -1)).transpose(1, 2) for part in (query, key, value))
    scores = (query * scale) @ key.transpose(-2, -1)
    return (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Self-attention over all tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, tokens, width]``."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        mixed: Tensor = self.proj(_attend(query, key, value, self.heads, self.scale))
        return mixed


class CrossAttention(nn.Module):
    """Attention of the class token, token 0, over all tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.wq = nn.Linear(width, width)
        self.wk = nn.Linear(width, width)
        self.wv = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, 1, width]``."""
        token: Tensor = self.proj(_attend(self.wq(x[:, :1]), self.wk(x), self.wv(x), self.heads, self.scale))
        return token


class Mlp(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        output: Tensor = self.fc2(self.act(self.fc1(x)))
        return output


class Block(nn.Module):
    """A transformer block: attention, then an MLP, each with a shortcut and a LayerNorm in front."""

    def __init__(self, width: int, heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.norm1 = _norm(width)
        self.attn = Attention(width, heads)
        self.norm2 = _norm(width)
        self.mlp = Mlp(width, mlp_ratio * width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        x = x + self.attn(self.norm1(x))
        output: Tensor = x + self.mlp(self.norm2(x))
        return output


class Fusion(nn.Module):
    """The class token of one branch reads the patches of the other branch."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = _norm(width)
        self.attn = CrossAttention(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        """The new class token, ``[n, 1, width]``."""
        token: Tensor = x[:, :1] + self.attn(self.norm1(x))
        return token


def _project(width_in: int, width: int) -> nn.Sequential:
    return nn.Sequential(_norm(width_in), nn.GELU(), nn.Linear(width_in, width))


class Stage(nn.Module):
    """Transformer blocks in each branch, then each class token visits the other branch and returns."""

    def __init__(self, widths: tuple[int, int], depths: tuple[int, int], heads: int, mlp_ratio: int) -> None:
        super().__init__()
        there = tuple(reversed(widths))
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Block(width, heads, mlp_ratio) for _ in range(depth)))
            for width, depth in zip(widths, depths, strict=True)
        )
        self.projs = nn.ModuleList(_project(own, other) for own, other in zip(widths, there, strict=True))
        self.fusion = nn.ModuleList(Fusion(other, heads) for other in there)
        self.revert_projs = nn.ModuleList(_project(other, own) for own, other in zip(widths, there, strict=True))

    def forward(self, small: Tensor, large: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of both branches."""
        small, large = self.blocks[0](small), self.blocks[1](large)
        return self._visit(0, small, large), self._visit(1, large, small)

    def _visit(self, branch: int, own: Tensor, other: Tensor) -> Tensor:
        """The tokens `own` of a branch, with a class token that has read the patches of the `other` branch."""
        visitor = torch.cat([self.projs[branch](own[:, :1]), other[:, 1:]], dim=1)
        token = self.revert_projs[branch](self.fusion[branch](visitor))
        return torch.cat([token, own[:, 1:]], dim=1)


class PatchEmbed(nn.Module):
    """Cut the image into patches, one token each."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, patches, width]``."""
        tokens: Tensor = self.proj(x).flatten(2).transpose(1, 2)
        return tokens


class CrossViT(nn.Module):
    """The bare network: normalized images ``[n, 3, size, size]`` to logits, the mean of the heads of both branches."""

    def __init__(self, classes: int, size: int = 240, architecture: Architecture = TINY) -> None:
        super().__init__()
        check_input("crossvit", (3, size, size), size, architecture.multiple)
        widths = architecture.widths
        if any(width % architecture.heads for width in widths):
            raise ModelError(f"widths {list(widths)} must be multiples of the number of heads, {architecture.heads}")
        self.reduced_size = size * 14 // 15
        tokens = [1 + (side // patch) ** 2 for side, patch in zip((size, self.reduced_size), architecture.patches, strict=True)]
        self.pos_embed_0 = nn.Parameter(torch.zeros(1, tokens[0], widths[0]))
        self.cls_token_0 = nn.Parameter(torch.zeros(1, 1, widths[0]))
        self.pos_embed_1 = nn.Parameter(torch.zeros(1, tokens[1], widths[1]))
        self.cls_token_1 = nn.Parameter(torch.zeros(1, 1, widths[1]))
        self.patch_embed = nn.ModuleList(map(PatchEmbed, architecture.patches, widths))
        self.blocks = nn.ModuleList(
            Stage(widths, depths, architecture.heads, architecture.mlp_ratio) for depths in architecture.depths
        )
        self.norm = nn.ModuleList(map(_norm, widths))
        self.head = nn.ModuleList(nn.Linear(width, classes) for width in widths)
        self._initialize()

    def _initialize(self) -> None:
        for parameter in (self.pos_embed_0, self.cls_token_0, self.pos_embed_1, self.cls_token_1):
            nn.init.trunc_normal_(parameter, std=_INITIAL_SCALE)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=_INITIAL_SCALE)
                nn.init.zeros_(layer.bias)

    def tokens(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The final class tokens of both branches, ``[n, width]`` each."""
        reduced = F.interpolate(x, size=(self.reduced_size, self.reduced_size), mode="bicubic", align_corners=False)
        small = torch.cat([self.cls_token_0.expand(x.shape[0], -1, -1), self.patch_embed[0](x)], dim=1) + self.pos_embed_0
        large = torch.cat([self.cls_token_1.expand(x.shape[0], -1, -1), self.patch_embed[1](reduced)], dim=1) + self.pos_embed_1
        for stage in self.blocks:
            small, large = stage(small, large)
        return self.norm[0](small[:, 0]), self.norm[1](large[:, 0])

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, classes]``."""
        small, large = self.tokens(x)
        logits: Tensor = (self.head[0](small) + self.head[1](large)) / 2
        return logits


def crossvit_tiny(classes: int = 10) -> CrossViT:
    """The bare CrossViT-Tiny for normalized 240 x 240 images: 6.7 M parameters, named as in timm's ``crossvit_tiny_240``."""
    return CrossViT(classes)


class CrossViTClassifier(nn.Module):
    """CrossViT for images in [0, 1] of any size: resize, ImageNet normalization, then the bare network as ``network``."""

    def __init__(
        self, input_shape: tuple[int, int, int], classes: int, input_size: int = 240, architecture: Architecture = TINY
    ) -> None:
        super().__init__()
        check_input("crossvit-tiny", input_shape, input_size, architecture.multiple)
        self.resize = Resize(input_shape, input_size)
        self.normalize = Normalize(3, IMAGENET_MEAN, IMAGENET_SCALE)
        self.network = CrossViT(classes, input_size, architecture)

    def features(self, x: Tensor) -> Tensor:
        """The class tokens of both branches side by side, ``[n, 96 + 192]``."""
        return torch.cat(self.network.tokens(self.normalize(self.resize(x))), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, classes]`` of images in [0, 1]."""
        logits: Tensor = self.network(self.normalize(self.resize(x)))
        return logits


def load_published(network: CrossViT, published: Mapping[str, Tensor], origin: str) -> None:
    """Load the tensors of a checkpoint with timm's names into the bare network, with new heads that start at zero.

    Position embeddings of another input size are interpolated. The heads of the checkpoint must be there, so that weights of
    another model are refused, but they classify ImageNet and are not used.
    """
    tensors = {_current_name(name): tensor for name, tensor in published.items()}
    expected = network.state_dict()
    for name, tensor in list(tensors.items()):
        if name.startswith("head.") and name in expected and tensor.shape[1:] == expected[name].shape[1:]:
            tensors[name] = torch.zeros_like(expected[name])
        elif name.startswith("pos_embed_") and name in expected:
            tensors[name] = _resized_positions(tensor, expected[name])
    load_weights(network, tensors, origin)


def _current_name(name: str) -> str:
    """Names such as ``pos_embed.0`` in the first release of the weights became ``pos_embed_0`` in timm."""
    stem, _, branch = name.rpartition(".")
    return f"{stem}_{branch}" if stem in ("pos_embed", "cls_token") else name


def _resized_positions(given: Tensor, expected: Tensor) -> Tensor:
    """Position embeddings ``[1, 1 + side^2, width]`` for another number of patches; unchanged if they cannot be resized."""
    if given.ndim != 3 or given.shape == expected.shape or not given.is_floating_point():
        return given
    side, new_side = math.isqrt(max(given.shape[1] - 1, 0)), math.isqrt(expected.shape[1] - 1)
    if side < 1 or given.shape != (1, 1 + side**2, expected.shape[2]):
        return given
    grid = torch.unflatten(given[:, 1:].transpose(1, 2), 2, (side, side))
    resized = F.interpolate(grid, size=(new_side, new_side), mode="bicubic", align_corners=False, antialias=new_side < side)
    return torch.cat([given[:, :1], resized.flatten(2).transpose(1, 2)], dim=1)
