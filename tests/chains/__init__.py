"""Machine code for chains of layers."""

import pytest

from dpcert.chains.build import library
from dpcert.chains.chain import SOURCE

ONE_LAYER = "LAYERS={TANH, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, false, false, false}"
needs_compiler = pytest.mark.skipif(library(SOURCE, ONE_LAYER) is None, reason="needs a C++ compiler")
