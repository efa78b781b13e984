"""Refuse models that cannot be trained privately or certified: layers that mix examples or draw random numbers.

Differential privacy bounds the effect of ONE example on the gradient. A layer that lets example i change the output of
example j (BatchNorm in training mode) breaks that bound, whatever the clip norm is.
"""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from ..errors import ModelError
from ..isolation import dissimilar_rows, refuse_mixing
from ..outputs import copied, does_not_take, logits_of

_WRAPPERS = {  # by name: importing the compiler takes seconds
    "OptimizedModule": "pass the module that torch.compile was called with",
    "DataParallel": "pass the wrapped module, model.module",
    "DistributedDataParallel": "pass the wrapped module, model.module",
    "ScriptModule": "pass the nn.Module that it was scripted or traced from",
}


def check_model(model: nn.Module, input_shape: tuple[int, ...], classes: int) -> None:
    """Raise a `ModelError` that names the layer and the remedy if the model mixes examples or shapes do not fit."""
    parameters = dict(model.named_parameters())
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ModelError("the model has no trainable parameter; set requires_grad on the parameters to train")
    for name, layer in model.named_modules():
        _refuse_known(name, layer)
    not_float32 = [name for name, parameter in parameters.items() if parameter.dtype != torch.float32]
    if not_float32:
        raise ModelError(
            f"parameter {not_float32[0]!r} is {parameters[not_float32[0]].dtype}, training needs float32; call model.float()"
        )
    _probe(model, input_shape, classes)
    copied(model)


def _refuse_known(name: str, layer: nn.Module) -> None:
    kind = f"layer {name!r} ({type(layer).__name__})"
    for wrapper, remedy in _WRAPPERS.items():
        if any(base.__name__ == wrapper for base in type(layer).__mro__):
            raise ModelError(f"the model is a {type(layer).__name__}, which cannot be trained one example at a time; {remedy}")
    if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
        raise ModelError(
            f"{kind} in training mode mixes the examples of a batch; replace it with nn.GroupNorm, "
            "or freeze it: layer.eval() with running statistics"
        )
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats and layer.training:
        raise ModelError(f"{kind} keeps running statistics of the examples; set track_running_stats=False")
    if isinstance(layer, (_DropoutNd, nn.RReLU)) and layer.training and getattr(layer, "p", 1.0) > 0:
        raise ModelError(f"{kind} draws random numbers that a resumed run cannot reproduce; remove it or call layer.eval()")


def _probe(model: nn.Module, input_shape: tuple[int, ...], classes: int) -> None:
    """Run different inputs: shapes must fit, no state may change, and no row may change the output of another."""
    rows = dissimilar_rows(input_shape)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.enable_grad():  # as in training: some layers keep state only then
            logits = model(rows.to(device))
    except Exception as error:  # a custom model may raise anything
        raise does_not_take(input_shape, error) from error
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(before[name], buffer)]
    if changed:
        raise ModelError(
            f"buffer {changed[0]!r} changes in the forward pass, so it stores information about examples; freeze that layer"
        )
    logits_of(logits, len(rows), classes)
    refuse_mixing(model, input_shape)
