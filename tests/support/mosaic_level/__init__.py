# SPDX-License-Identifier: Apache-2.0
"""Kernels on the Mosaic level's names, which take the module that has them.

That is `pallas_gpu.mosaic` or `jax.experimental.mosaic.gpu`: they run with both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jax.interpreters import mlir
from jaxlib.mlir import ir


@contextlib.contextmanager
def emitting() -> Iterator[None]:
    """A context for `as_gpu_kernel`: upstream emits the body there."""
    with mlir.make_ir_context(), ir.Location.unknown():
        yield
