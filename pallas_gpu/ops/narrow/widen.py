# SPDX-License-Identifier: Apache-2.0
"""Weights of 8 and 4 bits as 16-bit floats: exact, two elements at a time.

The bits of a small integer are or-ed into the mantissa of a float whose last bit counts
one, and that float is subtracted. Two elements become the halves of a 32-bit register,
as the tensor core's operands in registers hold them.

Neighbours of a row lie in a unit of 16 or 8 bits. The elements of 32 bits at a time
become pairs with fewer instructions, but in another order along the row: tokens are
brought in the same order by `reordered`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.rules import bits

_INT8, _INT4 = jnp.dtype(jnp.int8), jnp.dtype(jnp.int4)
# 16-bit floats whose last bit of the mantissa counts one: 2**7 and 2**10.
_ONES = {jnp.dtype(jnp.bfloat16): 0x4300, jnp.dtype(jnp.float16): 0x6400}
# The array in memory as units of two elements.
_UNITS = {_INT8: jnp.uint16, _INT4: jnp.uint8}
# Bytes of a row of a tile of weights: those of the widest swizzle.
DEPTH_BYTES = 128
# A word for each of the four lanes that hold a row of the tensor core's operand.
_LANES = 4
_WORDS = plgpu.TiledLayout(
    plgpu.Tiling(((64, 4), (16, 4), (8, 4), (1,))),
    warp_dims=(-7,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


def is_integer(dtype: Any) -> bool:
    """Whether the weights are integers, and so are converted by masks."""
    return jnp.dtype(dtype) in _UNITS


def unit_type(dtype: Any) -> jnp.dtype:
    """The type of what two weights are in memory; an 8-bit float's is its own."""
    return jnp.dtype(_UNITS.get(jnp.dtype(dtype), dtype))


def units(dtype: Any, columns: int) -> int:
    return columns * bits(dtype) // 8 // unit_type(dtype).itemsize


def is_split(stored: Any, dtype: Any) -> bool:
    """Whether 8 bits are to fit bfloat16's 7 bits of mantissa.

    Of 128 plus the lower bits, 128 is subtracted, or 256 for a negative number: the
    sign's bit is the last one of the exponent.
    """
    return jnp.dtype(stored) == _INT8 and jnp.dtype(dtype) == jnp.bfloat16


def masks(stored: Any, dtype: Any) -> np.ndarray:
    """Returns the constants of the conversion, an operand of the kernel.

    An instruction combines three registers by any function of bits, but has room for
    one constant; what the compiler does not know to be constant is in a register.
    """
    one = _ONES[jnp.dtype(dtype)]
    if is_split(stored, dtype):
        halves = 0x7F, one, 0x80
    else:
        # The sign's bit flipped is the number plus 8, or 128.
        flipped = 1 << bits(stored) - 1
        offset = (128 if jnp.dtype(dtype) == jnp.bfloat16 else 1024) + flipped
        pattern = int(np.array(offset, jnp.dtype(dtype)).view(np.uint16))
        halves = (1 << bits(stored)) - 1, one ^ flipped, pattern
    return np.array([half * 0x10001 for half in halves], np.uint32)


@dataclasses.dataclass(frozen=True)
class Converter:
    """The conversion of weights in two parts.

    ptxas lets a product that reads registers run on its own only if no instruction that
    runs beside it writes the operand of a product: `load` can run beside one, `finish`
    has to follow it, unless its result is multiplied by scales first.

    Attributes:
      stored: type of the weights: int8, int4 or an 8-bit float.
      dtype: bfloat16 or float16.
      masks: scalars, the elements of `masks` in memory; of integers only.
    """

    stored: Any
    dtype: Any
    masks: Any = None

    def load(self, units: Any) -> Any:
        """Loads (rows, units) of `unit_type` from SMEM: what `finish` takes."""
        if not is_integer(self.stored):
            half = units[...].astype(jnp.float16)
            return (half,)
        found = units[...].astype(jnp.uint32)
        return self._masked(found | found << np.uint32(16 - bits(self.stored)))

    def load_words(self, words: Any) -> jax.Array:
        """Loads (rows, words) of uint32 from SMEM, as they are; see `reordered`."""
        return plgpu.load(words, layout=_WORDS, optimized=False)

    def spread(self, found: jax.Array) -> Any:
        """Returns what `finish` takes, of words or 8-bit floats that were loaded."""
        if not is_integer(self.stored):
            return (found.astype(jnp.float16),)
        rows, count = found.shape
        pairs = 16 // bits(self.stored)
        shifts = (np.uint32(i * bits(self.stored)) for i in range(pairs))
        parts = [self._masked(found >> shift) for shift in shifts]
        shape = rows, count // _LANES, 1, _LANES
        joined = (
            lax.concatenate([x.reshape(shape) for x in same], 2)
            for same in zip(*parts, strict=True)
        )
        return tuple(x.reshape(rows, count * pairs) for x in joined)

    def _masked(self, spread: jax.Array) -> tuple[jax.Array, ...]:
        kept, one, sign = self.masks
        if is_split(self.stored, self.dtype):
            return spread & kept | one, spread & sign | one
        return (spread & kept ^ one,)

    def finish(self, loaded: Any) -> jax.Array:
        """Returns (rows, columns) of `dtype`: the same numbers."""
        if not is_integer(self.stored):
            return loaded[0].astype(self.dtype)
        first, *rest = (lax.bitcast_convert_type(x, self.dtype) for x in loaded)
        if not rest:
            offset = lax.bitcast_convert_type(self.masks[2], self.dtype)
            rest = [lax.broadcast_in_dim(offset, first.shape, (2,))]
        exact = first - rest[0]
        rows, count, _ = exact.shape
        return exact.reshape(rows, 2 * count)


def reordered(x: jax.Array, stored: Any) -> jax.Array:
    """Returns (tokens, K) in the order of `load_words`; K is whole words of lanes."""
    pairs = 16 // bits(stored)
    # Of a word's elements, pair i consists of i and i + pairs; a lane has a word.
    split = x.reshape(x.shape[0], -1, _LANES, 2, pairs)
    return split.transpose(0, 1, 4, 2, 3).reshape(x.shape)


def reorder_tokens(ref: Any, stored: Any) -> None:
    """Brings tokens in SMEM, (tokens, K), in the order of `load_words`, in place.

    A lane loads the tokens that belong to its words of weights: to reorder them is to
    regroup the halves of its registers.
    """
    own = 2 * 16 // bits(stored)
    row = _LANES * own
    found = plgpu.load(
        ref,
        layout=plgpu.TiledLayout(
            plgpu.Tiling(((8, 4 * row), (8, row), (own,), (own // 2,))),
            warp_dims=(-5,),
            lane_dims=(-4, -3),
            vector_dim=-1,
        ),
        optimized=False,
    )
    layout = plgpu.TiledLayout(
        plgpu.Tiling(((8, 4 * row), (8, row), (8, 2 * _LANES), (2,))),
        warp_dims=(-6,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )
    ordered = plgpu.layout_cast(reordered(found, stored), layout)
    # All warps have read theirs.
    plgpu.commit_smem()
    ref[...] = ordered


def factors(scales: Any, dtype: Any) -> tuple[jax.Array, ...]:
    groups, _ = scales.shape
    return tuple(scales[i].astype(dtype) for i in range(groups))


def multiplied(weights: jax.Array, scales: tuple[jax.Array, ...]) -> jax.Array:
    """Multiplies weights by the scales of their groups.

    Args:
      weights: (rows, columns), float16 or bfloat16.
      scales: `factors` of the groups of all columns, in order.
    """
    columns = weights.shape[1] // len(scales)
    parts = []
    for i, scale in enumerate(scales):
        part = weights[:, i * columns : (i + 1) * columns]
        parts.append(part * lax.broadcast_in_dim(scale, part.shape, (0,)))
    return lax.concatenate(parts, 1) if len(parts) > 1 else parts[0]


def scaled(weights: jax.Array, scales: Any) -> jax.Array:
    """Multiplies weights by scales in SMEM, (groups, rows), rounded to their type."""
    return multiplied(weights, factors(scales, weights.dtype))


def groups(p: Problem, columns: int) -> int:
    """Groups that have elements in so many columns of weights, from a group's."""
    assert p.group is not None
    return max(columns // p.group, 1)


def converter(w: Any, x: Any, masks: Any) -> Converter:
    return Converter(w, x, None if masks is None else [masks[i] for i in range(3)])


def finisher(p: Problem, mem: Any, columns: Any) -> Any:
    """Returns the function of sums of some columns: (columns, tokens) of the result."""
    refs = ((mem.get("scale"), lax.mul), (mem.get("bias"), lax.add))
    vectors = [
        (ref[columns].astype(jnp.float32), combine)
        for ref, combine in refs
        if ref is not None
    ]

    def finish(sums: Any) -> Any:
        for vector, combine in vectors:
            sums = combine(sums, lax.broadcast_in_dim(vector, sums.shape, (0,)))
        return p.epilogue.function()(sums).astype(p.out_dtype)

    return finish
