"""Frozen BatchNorm as part of the convolution before it: the same function with one pass over memory less."""

from collections import Counter
from typing import Any

from torch import fx, nn
from torch.nn.utils import fuse_conv_bn_eval

_NORM_OF: dict[type[nn.Module], type[nn.Module]] = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d}


def fold_norms(traced: fx.GraphModule) -> fx.GraphModule:
    """Fold every BatchNorm in evaluation mode into the convolution whose only use it is; changes and returns `traced`.

    Outputs differ from before by rounding only. A convolution that is used twice, or whose output is used elsewhere, stays.
    """
    calls = Counter(node.target for node in traced.graph.nodes if node.op == "call_module")
    for node in list(traced.graph.nodes):
        source = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) > 1 or calls[source.target] > 1:
            continue
        norm: Any = traced.get_submodule(str(node.target))
        convolution: Any = traced.get_submodule(str(source.target))
        if type(norm) is _NORM_OF.get(type(convolution)) and not norm.training and norm.track_running_stats:
            traced.set_submodule(str(source.target), fuse_conv_bn_eval(convolution.eval(), norm))  # type: ignore[arg-type]
            node.replace_all_uses_with(source)
            traced.graph.erase_node(node)
    traced.recompile()
    return traced
