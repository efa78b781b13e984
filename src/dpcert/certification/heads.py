"""Several linear heads on one frozen trunk: models whose last linear layer differs and nothing else.

A vote costs the trunk; a head costs almost nothing. So models ``head_k(trunk(x))`` with the same trunk are certified in one
pass: the trunk runs once for each noisy input, and every head votes on the same features.

Guarantee: the logits of a head are computed by the operations, and on the shapes, of that head's model alone. Heads are
therefore separate layers, never one wide matrix, whose products may be summed in another order.
"""

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..isolation import Forward, each_row_alone, one_at_a_time

_PROBED = 16  # inputs on which the parts are compared with the whole models


class SharedHeads(nn.Module):
    """A trunk with several linear heads. Its output has the logits of the first head, then those of the second, and so on."""

    def __init__(self, trunk: nn.Module, heads: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.trunk, self.heads = trunk, nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, heads * classes]``."""
        features = self.trunk(x)
        return torch.cat([head(features) for head in self.heads], dim=1)


@dataclass(frozen=True)
class Headed:
    """A model in two parts: everything up to its last linear layer, and that layer. `sha256` identifies the first part."""

    model: nn.Module
    trunk: nn.Module
    head: nn.Linear
    sha256: str


def heads_in(model: nn.Module) -> int:
    """Return how many classifiers vote in one pass of the model."""
    return len(model.heads) if isinstance(model, SharedHeads) else 1


def each_vote_alone(model: nn.Module, input_shape: tuple[int, ...]) -> Forward:
    """Like `each_row_alone`, also for several heads: plain linear layers on the features of a row.

    Returns a module only if it provably keeps rows apart, so that they may run together.
    """
    if not isinstance(model, SharedHeads):
        return each_row_alone(model, input_shape)
    trunk = each_row_alone(model.trunk, input_shape)
    heads = [head for head in model.heads if isinstance(head, nn.Linear)]
    return SharedHeads(trunk, heads).eval() if isinstance(trunk, nn.Module) else one_at_a_time(model)


def headed(model: nn.Module, x: Tensor) -> Headed | None:
    """Cut a model before the last linear layer that runs; None if there is no trunk to share.

    A trunk without a linear or convolutional layer is not worth sharing. Whether the two parts compute the same as the model
    is checked by `share`.
    """
    voter = copy.deepcopy(model).eval()
    name = _last_linear(voter, x)
    if not name:
        return None
    head = voter.get_submodule(name)
    if type(head) is not nn.Linear:
        return None
    voter.set_submodule(name, nn.Identity())
    if not any(isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)) for layer in voter.modules()):
        return None
    return Headed(model, voter, head, _digest(voter, name, head))


def _last_linear(model: nn.Module, x: Tensor) -> str | None:
    """Return the name of the last linear layer that runs on an input; None if the model fails or has none."""
    ran: list[str] = []
    handles = [
        layer.register_forward_hook(lambda *_, known=known: ran.append(known))
        for known, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        with torch.inference_mode():
            model(x[:1].to(next(model.parameters()).device))
    except Exception:  # any model may fail here; it is certified alone, which says why
        return None
    finally:
        for handle in handles:
            handle.remove()
    return ran[-1] if ran else None


def _digest(trunk: nn.Module, name: str, head: nn.Linear) -> str:
    """Return a digest of the classes, settings and tensors of a trunk, and of the place and shape of its head."""
    kind = type(trunk)
    digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__}\n{trunk}\n{name}: {head}\n".encode())
    for known, tensor in sorted([*trunk.named_parameters(), *trunk.named_buffers()], key=lambda pair: pair[0]):
        digest.update(f"{known} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def share(parts: Sequence[Headed], x: Tensor, sigma: float) -> SharedHeads | None:
    """Return one model that votes for all of `parts`; None if it does not compute exactly what each of them computes.

    Compared bit for bit on the first inputs with noise, so that code that the digest does not see cannot differ.
    """
    if len({part.sha256 for part in parts}) != 1:
        return None
    shared = SharedHeads(copy.deepcopy(parts[0].trunk), [_plain(part.head) for part in parts]).eval()
    rows = x[:_PROBED]
    noisy = rows + sigma * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    noisy = noisy.to(next(shared.parameters()).device)
    try:
        with torch.inference_mode():
            flat = shared.trunk(noisy).ndim == 2
            expected = torch.cat([copy.deepcopy(part.model).eval()(noisy) for part in parts], dim=1)
            return shared if flat and torch.equal(shared(noisy), expected) else None
    except Exception:  # any model may fail here; it is certified alone, which says why
        return None


def _plain(head: nn.Linear) -> nn.Linear:
    """Return a linear layer with copies of the weights and nothing else: no hook or replaced method that could mix rows."""
    plain = nn.Linear(head.in_features, head.out_features, head.bias is not None, device="meta")  # draws no random numbers
    plain.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    if head.bias is not None:
        plain.bias = nn.Parameter(head.bias.detach().clone(), requires_grad=False)
    return plain
