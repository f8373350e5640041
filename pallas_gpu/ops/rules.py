# SPDX-License-Identifier: Apache-2.0
"""Rules for the arguments that all ready kernels pass on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
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


def require_order(what: str, minor: Any, strip: int) -> None:
    """Checks the order of a product's tiles.

    Raises:
      ArgumentError: there is no such dimension, or a strip has no tiles.
    """
    if not is_axis(minor) or strip < 1:
        raise errors.ArgumentError(
            f"{what}: invalid order of tiles",
            expected="minor 'm' or 'n' and a positive strip",
            got=f"minor={minor!r}, strip={strip}",
            hint="strip is a number of tiles, e.g. 8",
        )


def as_dtype(value: Any) -> jnp.dtype | None:
    """Returns an element type; None for an array, and for what is no type."""
    if hasattr(value, "shape") and not isinstance(value, jnp.dtype):
        return None
    try:
        return jnp.dtype(value)
    except (TypeError, ValueError):
        return None


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


def require_tile(what: str, m: int, n: int, k: int) -> None:
    """Checks a tile of a product of 16-bit types by wgmma.

    wgmma: M is a multiple of 64, N at most 256, K a multiple of 16; TMA's 16-byte rows
    and the swizzle need N in multiples of 16.

    Raises:
      ArgumentError: the tensor core does not support it.
    """
    if m < 1 or m % 64 or not 16 <= n <= 256 or n % 16 or k < 16 or k % 16:
        raise errors.ArgumentError(
            f"{what}: the tensor core does not support this tile",
            expected="tile_m a multiple of 64, tile_n of 16 up to 256, tile_k of 16",
            got=f"tile_m={m}, tile_n={n}, tile_k={k}",
            hint=f"start from {what}()",
        )


def require_stages(what: str, stages: int) -> None:
    """Checks the buffers of a ring: one is released when the next product has started.

    Raises:
      ArgumentError: there are fewer than two.
    """
    if stages < 2:
        raise errors.ArgumentError(
            f"{what}: there are too few stages",
            expected="stages of 2 or more",
            got=stages,
            hint="four hide the latency of copies on an H200",
        )
