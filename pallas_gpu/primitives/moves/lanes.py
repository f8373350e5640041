# SPDX-License-Identifier: Apache-2.0
"""Votes, matches and shuffles of the lanes of a warp.

An array whose last axis has 32 elements has one of them in each lane of a warp. Control
flow is the same in all lanes, so that all of them take part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.layouts.registers.linear import WARP_LANES
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.types import values

__all__ = ["ballot", "elect", "match_any", "shfl", "vote"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is true of an operation in all stages.

    Attributes:
      dtype: of its result; None for that of the operand.
      of_lanes: whether each lane has a result of its own.
    """

    dtype: Any = None
    of_lanes: bool = True

    def result(self, operands: Any, **_: Any) -> Any:
        """The type of the result."""
        x = operands["x"]
        shape = x.shape if self.of_lanes else x.shape[:-1]
        return jax.core.ShapedArray(shape, np.dtype(self.dtype or x.dtype))


KINDS = {
    "ballot": Kind(np.uint32, of_lanes=False),
    "vote": Kind(np.bool_, of_lanes=False),
    "match_any": Kind(np.uint32),
    "shfl": Kind(),
}
PRIMITIVES = {
    name: registry.define(name, "lanes", result=kind.result)
    for name, kind in KINDS.items()
}
Mode = Literal["idx", "up", "down", "xor"]


@expect.arguments()
def ballot(x: values.Array) -> jax.Array:
    """Returns which lanes of a warp have a true value, as bits.

    PTX: vote.sync.ballot.b32. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp; complete when it returns. The
    number of lanes is `jax.lax.population_count` of the result; of those before lane i,
    of `result & ((1 << i) - 1)`.

    Args:
      x: bools, whose last axis are the 32 lanes of a warp.

    Returns:
      uint32 without the last axis: bit i is the value of lane i.

    Raises:
      ShapeError: the last axis does not have 32 elements.
      DTypeError: not bools.
    """
    return _bind("ballot", x, (np.bool_,))


@expect.arguments()
def vote(x: values.Array, kind: Literal["any", "all"] = "any") -> jax.Array:
    """Returns whether any or all of the lanes of a warp have a true value.

    PTX: vote.sync.any.pred or vote.sync.all.pred. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp; complete when it returns.

    Args:
      x: bools, whose last axis are the 32 lanes of a warp.
      kind: "any" or "all".

    Returns:
      Bools without the last axis.

    Raises:
      ShapeError: the last axis does not have 32 elements.
      DTypeError: not bools.
      ArgumentError: another kind.
    """
    return _bind("vote", x, (np.bool_,), kind=kind)


@expect.arguments()
def elect(x: values.Array) -> jax.Array:
    """Returns true for one of the lanes of a warp that have a true value, the first.

    PTX: vote.sync.ballot.b32 and comparisons: elect.sync leaves open which lane it is.
    Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp; complete when it returns.

    Args:
      x: bools, whose last axis are the 32 lanes of a warp.

    Returns:
      Bools of the shape of `x`, all false where `x` is.

    Raises:
      ShapeError: the last axis does not have 32 elements.
      DTypeError: not bools.
    """
    votes = _bind("ballot", x, (np.bool_,), who="elect")
    first = votes & (~votes + np.uint32(1))
    lane = lax.broadcasted_iota(np.uint32, x.shape, x.ndim - 1)
    return lax.shift_left(jnp.uint32(1), lane) == first[..., None]


@expect.arguments()
def match_any(x: values.Array) -> jax.Array:
    """Returns which lanes of a warp have the same value as each of them, as bits.

    PTX: match.any.sync.b32, of types of 64 bits match.any.sync.b64. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp; complete when it returns.
    Bits are compared: a NaN equals itself, and -0.0 does not equal 0.0. Its time grows
    with the number of different values: a sort by digits of 8 bits took 929 us on an
    H100, 619 us with a `ballot` of each bit; of 16 different values 574 and 608 us.

    Args:
      x: bools or a type of 8 to 64 bits, whose last axis are the 32 lanes of a warp.

    Returns:
      uint32 of the shape of `x`: bit i is set where lane i has the same value.

    Raises:
      ShapeError: the last axis does not have 32 elements.
      DTypeError: elements of less than 8 bits.

    Example:
      >>> peers = plgpu.match_any(digit)  # warp-aggregated counts
      >>> count = jax.lax.population_count(peers)
    """
    return _bind("match_any", x)


@expect.arguments()
def shfl(x: values.Array, lane: values.Array, mode: Mode = "idx") -> jax.Array:
    """Returns the values of other lanes of a warp.

    PTX: shfl.sync.idx.b32, .up, .down or .bfly, for each 32 bits. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp; complete when it returns.
    Prefix operations of a warp are those of `jax.lax`, such as
    `jax.lax.cumsum(x, axis=-1)`.

    Args:
      x: values whose last axis are the 32 lanes of a warp.
      lane: an integer from 0 to 31, or integers of the shape of `x`, one for each lane,
        of which the low five bits count. "idx": the lane that is read; "up" and
        "down": how far it is below or above; "xor": the bits in which it differs. A
        lane without a partner below or above keeps its value.
      mode: see `lane`.

    Returns:
      Values of the shape and dtype of `x`.

    Raises:
      ShapeError: the last axis does not have 32 elements, or `lane` another shape.
      DTypeError: elements of less than 8 bits, or `lane` is not an integer.
      ArgumentError: another mode, or a static lane that a warp does not have.

    Example:
      >>> below = plgpu.shfl(x, 1, "up")
    """
    is_static = not _jax.is_tracer(lane) and lane.shape == ()
    if is_static and not 0 <= int(lane) < WARP_LANES:
        raise errors.ArgumentError(
            "shfl: a warp does not have this lane",
            expected="0 to 31",
            got=int(lane),
            hint="reduce it modulo 32",
        )
    if not jnp.issubdtype(lane.dtype, jnp.integer):
        raise errors.DTypeError(
            "shfl: lanes are not integers",
            expected="int32",
            got=lane.dtype.name,
            hint="convert it: lane.astype(jnp.int32)",
        )
    if lane.shape not in ((), x.shape):
        raise errors.ShapeError(
            "shfl: the lanes do not have the shape of the values",
            expected=f"a scalar, or {x.shape}",
            got=lane.shape,
            hint="broadcast it with jnp.broadcast_to",
        )
    return _bind("shfl", x, lane=lane.astype(np.int32), mode=mode)


def _bind(
    name: str,
    x: Any,
    wanted: Sequence[Any] = (),
    lane: Any = None,
    who: str = "",
    **kw: Any,
) -> Any:
    who = who or name
    if not x.shape or x.shape[-1] != WARP_LANES:
        raise errors.ShapeError(
            f"{who}: the last axis of the values is not the lanes of a warp",
            expected=f"(..., {WARP_LANES})",
            got=x.shape,
            hint="pad the axis with jnp.pad"
            if x.size % WARP_LANES
            else "reshape it: x.reshape(-1, 32)",
        )
    narrow = types.itemsize_bits(x.dtype) < 8 and x.dtype != np.bool_
    if narrow or (wanted and x.dtype not in wanted):
        raise errors.DTypeError(
            f"{who}: lanes do not exchange elements of this type",
            expected="bool" if wanted else "bool, or a type of 8 to 64 bits",
            got=x.dtype.name,
            hint="compare it: x != 0" if wanted else "convert it with astype",
        )
    operands = {"x": x} if lane is None else {"x": x, "lane": lane}
    return ops.bind(PRIMITIVES[name], operands, **kw)
