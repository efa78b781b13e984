"""Views of an example: ``(model, x [b, ...], labels [b], noise [b, K, ...]) -> [b, R, ...]``, each from its row only."""

from .gaussian import Gaussian as Gaussian
from .original import Original as Original
from .smoothadv import SmoothAdv as SmoothAdv
