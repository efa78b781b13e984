"""Small models of the kinds that are fine-tuned: two-branch attention, depthwise convolutions, the residual backbone."""

import torch
import torch.nn.functional as F
from torch import nn

from dpcert.models.cnn import cnn, lenet
from dpcert.models.resnet import ResNet

SHAPE, CLASSES = (3, 16, 16), 4


class SelfAttention(nn.Module):
    """A pre-norm block with queries, keys and values from one linear layer."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
        )
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x):
        rows, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(rows, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        weights = ((q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5).softmax(dim=-1)
        x = x + self.scale * self.out((weights @ v).transpose(1, 2).reshape(rows, tokens, width))
        return x + self.mlp(self.norm2(x))


class Branch(nn.Module):
    def __init__(self, width, patch):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.places = nn.Parameter(0.1 * torch.randn(1, (16 // patch) ** 2 + 1, width))
        self.block = SelfAttention(width, 2)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.block(torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.places)


class CrossViT(nn.Module):
    """Two branches of different patch sizes; each class token attends to the tokens of the other branch."""

    def __init__(self):
        super().__init__()
        widths = (8, 12)
        self.branches = nn.ModuleList([Branch(width, patch) for width, patch in zip(widths, (4, 8), strict=True)])
        self.project = nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 8)])
        self.cross = nn.ModuleList([nn.MultiheadAttention(width, 2, batch_first=True) for width in (12, 8)])
        self.norm = nn.ModuleList([nn.LayerNorm(12), nn.LayerNorm(8)])
        self.head = nn.ModuleList([nn.Linear(12, CLASSES), nn.Linear(8, CLASSES)])

    def forward(self, x):
        tokens = [branch(x) for branch in self.branches]
        logits = []
        for own, other in ((0, 1), (1, 0)):
            token = self.project[own](tokens[own][:, :1])
            context = torch.cat([token, tokens[other][:, 1:]], dim=1)
            token = token + self.cross[own](token, context, context, need_weights=False)[0]
            logits.append(self.head[own](self.norm[own](token)[:, 0]))
        return torch.mean(torch.stack(logits, dim=0), dim=0)


class Inverted(nn.Module):
    """Expand, depthwise convolution, squeeze and excite, project."""

    def __init__(self, width_in, width, stride, kernel):
        super().__init__()
        wide = 3 * width_in
        self.expand, self.norm1 = nn.Conv2d(width_in, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.depthwise = nn.Conv2d(wide, wide, kernel, stride, padding=kernel // 2, groups=wide, bias=False)
        self.norm2, self.squeeze, self.excite = nn.BatchNorm2d(wide), nn.Conv2d(wide, 4, 1), nn.Conv2d(4, wide, 1)
        self.project, self.norm3 = nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)
        self.same = stride == 1 and width_in == width

    def forward(self, x):
        y = F.silu(self.norm2(self.depthwise(F.silu(self.norm1(self.expand(x))))))
        y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        y = self.norm3(self.project(y))
        return x + y if self.same else y


class EfficientNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, 2, padding=1, bias=False), nn.BatchNorm2d(6)
        self.blocks = nn.Sequential(Inverted(6, 6, 1, 3), Inverted(6, 8, 2, 5))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, CLASSES)

    def forward(self, x):
        x = F.interpolate(x, scale_factor=1.5, mode="bilinear", align_corners=False)
        return self.head(self.pool(self.blocks(F.relu6(self.norm(self.stem(x))))).flatten(1))


def frozen_statistics(model):
    """BatchNorm as after pretraining: statistics and affines of its own, in evaluation mode."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.uniform_(-0.3, 0.3)
            layer.running_var.uniform_(0.5, 2.0)
            layer.weight.data.uniform_(0.5, 1.5)
            layer.bias.data.uniform_(-0.2, 0.2)
    return model.eval()


def only(model, *parts):
    """Train the parameters whose names contain one of `parts`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in parts))
    return model


def resnet(*parts):
    model = frozen_statistics(ResNet(SHAPE, CLASSES, 4))
    return only(model, *parts) if parts else model


VISION = {
    "crossvit": lambda: CrossViT().eval(),
    "crossvit, tokens and attention": lambda: only(CrossViT().eval(), "token", "places", "in_proj", "scale"),
    "efficientnet": lambda: frozen_statistics(EfficientNet()),
    "efficientnet, norms": lambda: only(frozen_statistics(EfficientNet()), "norm"),
    "resnet": resnet,
    "resnet, last stage and head": lambda: resnet("stage3", "head"),
    "resnet, norms": lambda: resnet("norm"),
    "resnet, head": lambda: resnet("head"),
    "resnet, two stages": lambda: frozen_statistics(ResNet(SHAPE, CLASSES, 4, (2, 3))),
    "cnn, wide": lambda: cnn(SHAPE, CLASSES, width=2),
    "cnn, group norm": lambda: cnn(SHAPE, CLASSES, norm="group", pool="average"),
    "cnn, plain norm and front": lambda: cnn(SHAPE, CLASSES, norm="plain", blur=0.7, input_scale=0.6),
    "lenet": lambda: lenet(SHAPE, CLASSES),
    "lenet, average": lambda: lenet(SHAPE, CLASSES, pool="average", norm="none"),
}


def made(name, trained=False):
    """A model with fixed weights, fresh or after a few ordinary steps."""
    torch.manual_seed(0)
    model = VISION[name]()
    if trained:
        x, y = torch.rand(12, *SHAPE), torch.randint(0, CLASSES, (12,))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        for _ in range(8):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        optimizer.zero_grad()
    return model
