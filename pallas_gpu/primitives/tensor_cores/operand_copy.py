# SPDX-License-Identifier: Apache-2.0
"""tcgen05.cp of a left operand: from SMEM, as the tensor core reads it, to TMEM."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_gpu import arch, errors, expect, types
from pallas_gpu.layouts.smem import tcgen05_descriptor as descriptors
from pallas_gpu.layouts.tmem.layout import LANES
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.tensor_cores import pairs, products

__all__ = ["async_copy_smem_to_tmem"]

async_copy_smem_to_tmem_p = registry.define(
    "async_copy_smem_to_tmem",
    "operand_copy",
    reads=("smem",),
    writes=("tmem",),
    asynchronous=True,
    feature=arch.Feature.TCGEN05,
)
_WHO = "async_copy_smem_to_tmem"
_BITS = (4, 8, 16, 32)


@expect.arguments()
def async_copy_smem_to_tmem(
    smem_ref: types.Ref, tmem_ref: types.Ref, collective_axis: str | None = None
) -> None:
    """Starts a copy of a left operand of `tcgen05_mma` from SMEM to tensor memory.

    PTX: tcgen05.cp.cta_group::1.128x256b, with collective_axis cta_group::2; without a
    swizzle 128x128b. Since: sm_100a.

    Issued and complete as `async_copy_scales_to_tmem`.
    Values that threads stored to SMEM need a `commit_smem()` before.

    Args:
      smem_ref: (128, K) SMEM reference with TilingTransform((8, swizzle width)) and a
        SwizzleTransform of 32, 64 or 128 bytes, or with TilingTransform((8, 16 bytes))
        alone; Warpgroup semantics infers them for arrays declared without. K occupies a
        multiple of 32 bytes.
      tmem_ref: (128, K) TMEM reference of the same dtype, of 4, 8, 16 or 32 bits;
        declared with packed=True if elements are narrower than 32 bits.
      collective_axis: as of `async_copy_scales_to_tmem`.

    Raises:
      MemorySpaceError: an operand is in another space.
      ShapeError, DTypeError: the shapes or types differ, or are not those of operands.
      LayoutError: an operand is not stored as the tensor core reads it.
      ArgumentError, AxisNameError, UnsupportedError: as `async_copy_scales_to_tmem`.

    Example:
      >>> plgpu.async_copy_smem_to_tmem(a_smem, a_tmem)
      >>> plgpu.tcgen05_mma(acc, a_tmem, b_smem, done)
    """
    pairs.require_copy(smem_ref, tmem_ref, collective_axis, _WHO)
    _require_equal(smem_ref, tmem_ref)
    products.require_packed(tmem_ref, f"{_WHO}: the destination")
    # The tensor core reads a left operand along K in the same tiles.
    products.readable(smem_ref, descriptors.plan_copy, f"{_WHO}: the source")
    ops.bind(
        async_copy_smem_to_tmem_p,
        {"smem": smem_ref, "tmem": tmem_ref},
        collective_axis=collective_axis,
    )


def _require_equal(source: Any, target: Any) -> None:
    names = jnp.dtype(source.dtype).name, jnp.dtype(target.dtype).name
    if names[0] != names[1] or types.itemsize_bits(source.dtype) not in _BITS:
        raise errors.DTypeError(
            f"{_WHO}: the element types are not those of one operand",
            expected="the same dtype in SMEM and TMEM, of 4, 8, 16 or 32 bits",
            got=f"{names[0]} to {names[1]}",
            hint="declare both with the dtype of the operand",
        )
    shapes = tuple(source.shape), tuple(target.shape)
    if shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][0] != LANES:
        raise errors.ShapeError(
            f"{_WHO}: the shapes are not those of one left operand",
            expected=f"({LANES}, K) in SMEM and TMEM",
            got="smem {}, tmem {}".format(*shapes),
            hint=f"copy parts of {LANES} rows",
        )
