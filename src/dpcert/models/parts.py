"""Parts of a model by name: its head, and the parameters that ``model.train`` selects."""

import copy
from collections.abc import Callable
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import ModelError
from ..isolation import dissimilar_rows

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
ALL, HEAD, LAST, NORMS, BIASES = "all", "head", "last:", "norms", "biases"
_AGREEMENT = 1e-5  # of the largest logit: only rounding may differ
HOW_TO_SELECT = (
    f"{ALL}, {HEAD}, {LAST}N, {NORMS}, {BIASES}, or a pattern of parameter names such as stage3.*; several with commas"
)


def head_name(model: nn.Module) -> str:
    """Return the name of the head: the module called ``head``, or otherwise the last linear layer."""
    named: list[str] = [name for name, _ in model.named_modules() if name.split(".")[-1] == "head"]
    linear: list[str] = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not named and not linear:
        raise ModelError("the model has no linear layer, so it has no head to train; name its parameters in model.train")
    return named[0] if named else linear[-1]


def parameters_of(model: nn.Module, module: str) -> set[str]:
    """Return the names of the parameters of a submodule."""
    prefix = f"{module}." if module else ""
    return {name for name, _ in model.named_parameters() if name.startswith(prefix)}


def layers_before_head(model: nn.Module, input_shape: tuple[int, ...]) -> nn.Module | None:
    """Return a copy of the model without its head; None unless the model is its head, a linear layer, applied to the rest."""
    name = head_name(model)
    head = model.get_submodule(name)
    if not isinstance(head, nn.Linear):
        return None
    trunk = copy.deepcopy(model)
    parent, _, local = name.rpartition(".")
    if not name:
        return None
    setattr(trunk.get_submodule(parent), local, nn.Identity())
    rows = dissimilar_rows(input_shape).to(head.weight.device)
    with torch.no_grad():
        expected, features = model(rows), trunk(rows)
        same = features.shape == (len(rows), head.in_features) and torch.allclose(
            head(features), expected, rtol=0.0, atol=_AGREEMENT * float(expected.abs().max().clamp(min=1.0))
        )
    return trunk if same else None


def selected(model: nn.Module, train: str) -> set[str]:
    """Return the parameters that ``model.train`` selects.

    ``head`` is the new last layer, and every other selection by keyword contains it. ``last:N`` is the last N children of the
    model that have parameters, so ``last:1`` is usually the head.
    """
    names: set[str] = set()
    for term in (term.strip() for term in train.split(",")):
        chosen = _of_term(model, term)
        if not chosen:
            some = ", ".join(list(dict(model.named_parameters()))[:3])
            raise ModelError(f"model.train {term!r} matches no parameter (they are named {some}, ...); use {HOW_TO_SELECT}")
        names |= chosen
    return names


def freeze_others(model: nn.Module, train: str) -> None:
    """Let exactly the selected parameters require gradients."""
    names = selected(model, train)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)


def _of_term(model: nn.Module, term: str) -> set[str]:
    everything = {name for name, _ in model.named_parameters()}
    if term == ALL:
        return everything
    if term == HEAD:
        return parameters_of(model, head_name(model))
    if term.startswith(LAST):
        return _of_last_children(model, term)
    if term in (NORMS, BIASES):
        found = _of_norms(model) if term == NORMS else {name for name in everything if name.split(".")[-1] == "bias"}
        return found | parameters_of(model, head_name(model)) if found else set()
    return {name for name in everything if fnmatchcase(name, term)}


def _of_last_children(model: nn.Module, term: str) -> set[str]:
    count = term.removeprefix(LAST)
    if not count.isdecimal() or int(count) < 1:
        raise ModelError(f"model.train is {term!r}, must be {LAST}N with N at least 1, for example {LAST}2")
    prefix, inner = "", model
    while len(children := _with_parameters(inner)) == 1 and not isinstance(next(iter(children.values())), nn.Linear):
        name, inner = next(iter(children.items()))  # a wrapper around the model proper
        prefix += f"{name}."
    last = list(children)[-int(count) :]
    return {name for child in last for name in parameters_of(model, f"{prefix}{child}")}


def _with_parameters(model: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in model.named_children() if any(True for _ in child.parameters())}


def _of_norms(model: nn.Module) -> set[str]:
    def inside(name: str) -> Callable[[str], str]:
        return lambda local: f"{name}.{local}" if name else local

    return {
        inside(name)(local)
        for name, layer in model.named_modules()
        if isinstance(layer, _NORMS)
        for local, _ in layer.named_parameters(recurse=False)
    }
