"""Views of an example: ``(model, x [b, ...], labels [b], noise [b, K, ...]) -> [b, R, ...]``, each from its row only."""

from .gaussian import Gaussian as Gaussian
from .inner import Inner as Inner
from .inner import InnerOnce as InnerOnce
from .original import Original as Original
from .smoothadv import SmoothAdv as SmoothAdv
from .stobatch import SharedStoBatch as SharedStoBatch
from .stobatch import StoBatch as StoBatch

ADVERSARIAL = (SmoothAdv.name, StoBatch.name, SharedStoBatch.name)  # their views depend on the model that is trained
