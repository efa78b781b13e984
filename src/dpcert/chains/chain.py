"""A chain of layers as machine code: logits of rows, per-example gradients, and their sums."""

import ctypes
import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn

from .build import library
from .layers import Layer, layers_of
from .numbers import digits, pointer

SOURCE = Path(__file__).parent / "chain.cpp"


class Chain:
    """The machine code of a chain. It has no state: threads may share it, and pass the weights and their own memory."""

    def __init__(self, code: ctypes.CDLL, layers: list[Layer]) -> None:
        self._code, self.layers = code, layers
        sizes = (ctypes.c_int64 * 4)()
        code.sizes(sizes)
        self._row, self._weights, self.size, self._group = sizes
        self.classes = layers[-1].output[2]

    def pack(self, model: nn.Module) -> Tensor:
        """Return the current weights of the model in the order that the machine code reads."""
        parameters = [model.get_parameter(name).detach().contiguous() for layer in self.layers for name in layer.parameters]
        return self._packed(parameters)

    def _packed(self, parameters: list[Tensor]) -> Tensor:
        pointers = (ctypes.c_void_p * len(parameters))(*(parameter.data_ptr() for parameter in parameters))
        weights = torch.zeros(self._weights)
        self._code.pack(pointers, pointer(weights))
        return weights

    def work(self, rows: int) -> Tensor:
        """Return memory for the activations of so many rows."""
        return torch.zeros((-(-rows // self._group) * self._group, self._row))

    def forward(
        self, rows: Tensor, weights: Tensor, work: Tensor | None = None, shift: Tensor | None = None, last: bool = False
    ) -> Tensor:
        """Return the logits of ``rows [n, c, h, w]`` (``[n, h, w, c]`` if `last`), with `shift` added to each.

        `work` then has the activations of all rows, for `backward`.
        """
        rows, shift = rows.contiguous(), None if shift is None else shift.contiguous()
        logits = torch.empty((len(rows), self.classes))
        place = self.work(1) if work is None else work
        numbers = ctypes.c_int64(last), pointer(weights), ctypes.c_int64(len(rows)), ctypes.c_int64(work is not None)
        self._code.forward(pointer(rows), pointer(shift), *numbers, pointer(place), pointer(logits))
        return logits

    def backward(self, work: Tensor, weights: Tensor, slopes: Tensor, gradients: Tensor) -> Tensor:
        """Write the gradients of each example to ``gradients [b, size]``; return their squared norms in float64.

        ``slopes [b, views, classes]`` are the gradients of the logits. Of `gradients`, float64 sums are made by `add`.
        """
        slopes, squares = slopes.contiguous(), torch.empty(len(slopes), dtype=torch.float64)
        views = slopes.shape[1]
        numbers = pointer(weights), ctypes.c_int64(len(slopes)), ctypes.c_int64(views), pointer(slopes)
        self._code.backward(pointer(work), *numbers, pointer(self.work(views)), pointer(gradients), pointer(squares))
        return squares

    def add(self, gradients: Tensor, factors: Tensor, total: Tensor) -> None:
        """Add ``sum_i factors[i] * gradients[i]`` to `total`, one example after the other, in float64."""
        factors = factors.contiguous()
        self._code.add(pointer(gradients), ctypes.c_int64(len(factors)), pointer(factors), pointer(total))

    def in_order(self, values: Tensor) -> dict[str, Tensor]:
        """Split ``[..., size]`` into the trained parameters, each flat in its own order."""
        found, start = {}, 0
        for layer in self.layers:
            taps = layer.kernel[0] * layer.kernel[1] * layer.image[2]
            for name in layer.trained:
                stop = start + layer.output[2] * (taps if name == layer.weight else 1)
                part = values[..., start:stop]
                found[name], start = layer.in_order(part) if name == layer.weight else part, stop
        return found

    def fingerprint(self) -> str:
        """Return a digest of the gradients for fixed weights and rows: equal where the machine code gives the same bits."""
        parameters = [values for layer in self.layers for values in _fixed_parameters(layer)]
        weights, (height, width, channels) = self._packed(parameters), self.layers[0].image
        work, gradients = self.work(4), torch.empty((2, self.size))
        logits = self.forward(digits(4, channels, height, width) + 0.5, weights, work)
        squares = self.backward(work, weights, digits(2, 2, self.classes), gradients)
        digest = hashlib.sha256()
        for values in (logits, squares, gradients):
            digest.update(values.numpy().data)
        return digest.hexdigest()[:16]


def _fixed_parameters(layer: Layer) -> list[Tensor]:
    shape = (layer.output[2], layer.image[2], *layer.kernel)
    scale = 2.0 / torch.Size(shape[1:]).numel() ** 0.5
    return [scale * digits(*(shape if name == layer.weight else shape[:1])) for name in layer.parameters]


def compiled_chain(model: nn.Module, input_shape: tuple[int, ...]) -> Chain | None:
    """Return the model as machine code; None if it is not a chain of known layers, or this machine cannot compile it."""
    layers = layers_of(model, input_shape)
    code = None if layers is None else library(SOURCE, f"LAYERS={', '.join(layer.text for layer in layers)}")
    return None if layers is None or code is None else Chain(code, layers)
