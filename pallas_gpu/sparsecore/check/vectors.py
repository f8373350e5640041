# SPDX-License-Identifier: Apache-2.0
"""Values: every one is a scalar, or fills registers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_gpu import _jax, errors
from pallas_gpu.program.nodes import Constant, Op
from pallas_gpu.sparsecore.check.kernel import Kernel
from pallas_gpu.sparsecore.types import WORD_BYTES, register_elements


def refuse_accuracy(op: Op) -> None:
    """Raises for an accuracy that is asked for: the instructions have theirs."""
    accuracy = op.params.get("accuracy")
    if accuracy not in (None, lax.AccuracyMode.DEFAULT):
        raise errors.UnsupportedError(
            f"{op.name} with an accuracy",
            expected="accuracy=None or jax.lax.AccuracyMode.DEFAULT",
            got=getattr(accuracy, "name", None) or f"Tolerance of {vars(accuracy)}",
            hint="omit it: that of the instructions is not documented",
        )


def require_registers(
    op: Op, inner: Iterable[Any], kernel: Kernel, known: set[Any]
) -> None:
    """Raises for a value that a subcore has no register for.

    Args:
      op: an operation.
      inner: values that its regions start with.
      known: the values that were looked at.
    """
    new = {x for x in (*op.inputs, *op.results, *inner) if x not in known}
    known.update(new)
    for value in new:
        aval = value if isinstance(value, Constant) else value.aval
        if not isinstance(aval, _jax.AbstractRef):
            _require(tuple(value.shape), value.dtype, op, kernel)


def _require(shape: tuple[int, ...], dtype: Any, op: Op, kernel: Kernel) -> None:
    dtype = jnp.dtype(dtype)
    got = f"{dtype.name}{list(shape)} of {op.name}"
    if dtype != jnp.bool_ and (
        dtype.itemsize > WORD_BYTES or not jnp.issubdtype(dtype, jnp.number)
    ):
        raise errors.DTypeError(
            "a value of a type that SparseCores do not compute with",
            expected="bools, and integers and floats of 8, 16 or 32 bits",
            got=got,
            hint="convert it to 32 bits",
        )
    if math.prod(shape) == 1:
        return
    if not kernel.is_vector:
        raise errors.UnsupportedError(
            "a vector on a scalar subcore",
            expected="scalars",
            got=got,
            hint="compute with vectors in a kernel with a plsc.VectorSubcoreMesh",
        )
    size = register_elements(dtype, kernel.chip.lanes)
    if math.prod(shape) % size:
        raise errors.ShapeError(
            f"a value does not fill registers of {kernel.chip.name}",
            expected=f"a multiple of {size} elements of {dtype.name}, or one",
            got=got,
            hint="loop over parts: x_vmem[plsc.ds(i, lanes)] with lanes = "
            "plsc.get_sparse_core_info().num_lanes",
        )
