# SPDX-License-Identifier: Apache-2.0
"""The Mosaic level: kernels and inline code that emit MLIR themselves."""

import importlib as _importlib

from pallas_gpu.primitives import inline as _inline

_inline.handles_by(lambda: _importlib.import_module("pallas_gpu.mosaic.inlined"))
