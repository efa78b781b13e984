"""A chain of layers as machine code: logits of rows, per-example gradients, and their sums."""

import ctypes
import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn

from .build import library
from .layers import Layer, layers_of

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
        self._code.pack(pointers, _pointer(weights))
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
        numbers = ctypes.c_int64(last), _pointer(weights), ctypes.c_int64(len(rows)), ctypes.c_int64(work is not None)
        self._code.forward(_pointer(rows), _pointer(shift), *numbers, _pointer(place), _pointer(logits))
        return logits

    def backward(self, work: Tensor, weights: Tensor, slopes: Tensor, gradients: Tensor) -> Tensor:
        """Write the gradients of each example to ``gradients [b, size]``; return their squared norms in float64.

        ``slopes [b, views, classes]`` are the gradients of the logits. Of `gradients`, float64 sums are made by `add`.
        """
        slopes, squares = slopes.contiguous(), torch.empty(len(slopes), dtype=torch.float64)
        views = slopes.shape[1]
        numbers = _pointer(weights), ctypes.c_int64(len(slopes)), ctypes.c_int64(views), _pointer(slopes)
        self._code.backward(_pointer(work), *numbers, _pointer(self.work(views)), _pointer(gradients), _pointer(squares))
        return squares

    def add(self, gradients: Tensor, factors: Tensor, total: Tensor) -> None:
        """Add ``sum_i factors[i] * gradients[i]`` to `total`, one example after the other, in float64."""
        factors = factors.contiguous()
        self._code.add(_pointer(gradients), ctypes.c_int64(len(factors)), _pointer(factors), _pointer(total))

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
        logits = self.forward(_digits(4, channels, height, width) + 0.5, weights, work)
        squares = self.backward(work, weights, _digits(2, 2, self.classes), gradients)
        digest = hashlib.sha256()
        for values in (logits, squares, gradients):
            digest.update(values.numpy().data)
        return digest.hexdigest()[:16]


def _fixed_parameters(layer: Layer) -> list[Tensor]:
    shape = (layer.output[2], layer.image[2], *layer.kernel)
    scale = 2.0 / torch.Size(shape[1:]).numel() ** 0.5
    return [scale * _digits(*(shape if name == layer.weight else shape[:1])) for name in layer.parameters]


def _digits(*shape: int) -> Tensor:
    """Return numbers in [-0.5, 0.5), by operations that every processor rounds alike."""
    integers = torch.arange(torch.Size(shape).numel()) * 40503 % 65536
    return (integers.double() / 65536 - 0.5).float().view(shape)


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def compiled_chain(model: nn.Module, input_shape: tuple[int, ...]) -> Chain | None:
    """Return the model as machine code; None if it is not a chain of known layers, or this machine cannot compile it."""
    layers = layers_of(model, input_shape)
    code = None if layers is None else library(SOURCE, f"LAYERS={', '.join(layer.text for layer in layers)}")
    return None if layers is None or code is None else Chain(code, layers)
