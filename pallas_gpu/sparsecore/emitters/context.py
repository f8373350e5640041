# SPDX-License-Identifier: Apache-2.0
"""The dialects that libtpu takes."""

from __future__ import annotations

from jax.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir
from jaxlib.mosaic.python import tpu


def context() -> ir.Context:
    """Returns a context with the dialects that libtpu takes."""
    made = jax_mlir.make_ir_context()
    tpu.register_dialect(made)
    return made
