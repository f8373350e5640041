# SPDX-License-Identifier: Apache-2.0
"""Rules for the arguments that all ready kernels pass on."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import pallas_gpu as plgpu
from pallas_gpu import errors, expect

PARAMS = expect.optional(
    expect.instance(plgpu.CompilerParams, written="plgpu.CompilerParams(...)")
)
INTERPRET = expect.optional(
    expect.instance(
        bool, plgpu.InterpretParams, written="True, False or plgpu.InterpretParams(...)"
    )
)


def is_axis(value: Any) -> bool:
    """True for the name of an output dimension of a matrix product."""
    return isinstance(value, str) and value in ("m", "n")


def require_arrays(what: str, **given: Any) -> None:
    """Refuses what has a shape and a dtype, but no elements; None is left out.

    Raises:
      ArgumentTypeError: an argument is no array.
    """
    for name, x in given.items():
        if x is not None and not isinstance(x, jax.Array | np.ndarray):
            raise errors.ArgumentTypeError(
                f"{what}: {name} is not an array",
                expected="an array of JAX or NumPy",
                got=expect.shown(x),
                hint="for shapes alone, wrap the call in jax.eval_shape",
            )
