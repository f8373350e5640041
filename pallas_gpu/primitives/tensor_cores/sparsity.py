# SPDX-License-Identifier: Apache-2.0
"""Metadata of sparse left operands of tcgen05: its copies to TMEM, and its checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_gpu import arch, errors, expect, types
from pallas_gpu.layouts.smem.wgmma_descriptor import WgmmaOperand
from pallas_gpu.layouts.tmem import mma_instruction as instructions
from pallas_gpu.layouts.tmem import sparsity as layouts
from pallas_gpu.layouts.tmem.layout import COLUMNS, TmemKind
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.tensor_cores import pairs
from pallas_gpu.primitives.tensor_cores.scales import require_layout, require_plain

__all__ = ["async_copy_sparse_metadata_to_tmem"]

async_copy_sparse_metadata_to_tmem_p = registry.define(
    "async_copy_sparse_metadata_to_tmem",
    "sparsity",
    reads=("smem",),
    writes=("tmem",),
    asynchronous=True,
    feature=arch.Feature.TCGEN05,
)

_ROWS, _WIDTH = layouts.ROWS, layouts.TILE_INDICES
# Widths of operands: without scales of blocks, and with them.
_PLAIN_BITS, _SCALED_BITS = (8, 16, 32), (4, 8)


@expect.arguments()
def async_copy_sparse_metadata_to_tmem(
    smem_ref: types.Ref, tmem_ref: types.Ref, collective_axis: str | None = None
) -> None:
    """Starts a copy of the metadata of a sparse operand from SMEM to tensor memory.

    PTX: tcgen05.cp.cta_group::1.128x128b, with collective_axis cta_group::2.
    Since: sm_100a.

    Issued and complete as `async_copy_scales_to_tmem`.

    Args:
      smem_ref: (1, indices / 64, 128, 64) contiguous uint2 SMEM reference, as
        `format_tcgen05_sparse_metadata` returns it.
      tmem_ref: (128, indices) uint2 TMEM reference declared with layout
        `layouts.TmemLayout.sparse_metadata()`. The indices of a row are K / 2, of
        4-bit operands K / 4, and of 32-bit ones K. Metadata of 64 rows is of this
        shape too, with each row twice.
      collective_axis: as of `async_copy_scales_to_tmem`.

    Raises:
      MemorySpaceError: an operand is in another space.
      ShapeError, DTypeError: the shapes or types do not correspond.
      LayoutError: the metadata is tiled, swizzled or not contiguous in SMEM, or does
        not have its layout in TMEM.
      ArgumentError, AxisNameError, UnsupportedError: as `async_copy_scales_to_tmem`.

    Example:
      >>> plgpu.async_copy_sparse_metadata_to_tmem(metadata_smem, metadata)
      >>> plgpu.tcgen05_mma(acc, a, b, done, a_sparse_metadata=metadata)
    """
    who = "async_copy_sparse_metadata_to_tmem"
    pairs.require_copy(smem_ref, tmem_ref, collective_axis, who)
    for ref in (smem_ref, tmem_ref):
        _require_indices(ref, who)
    _require_layout(tmem_ref, f"{who}: the destination")
    shape, indices = tuple(smem_ref.shape), tmem_ref.shape[-1]
    if shape != (1, indices // _WIDTH, _ROWS, _WIDTH) or indices % _WIDTH:
        raise errors.ShapeError(
            f"{who}: the shapes do not correspond",
            expected="smem (1, indices / 64, 128, 64) and tmem (128, indices)",
            got=f"smem {shape} and tmem {tuple(tmem_ref.shape)}",
            hint="format the metadata with plgpu.format_tcgen05_sparse_metadata",
        )
    require_plain(smem_ref, who)
    ops.bind(
        async_copy_sparse_metadata_to_tmem_p,
        {"smem": smem_ref, "tmem": tmem_ref},
        collective_axis=collective_axis,
    )


def _require_indices(ref: Any, what: str) -> None:
    if jnp.dtype(ref.dtype) == jnp.uint2:
        return
    raise errors.DTypeError(
        f"{what}: metadata has another type",
        expected="uint2",
        got=jnp.dtype(ref.dtype).name,
        hint="format the metadata with plgpu.format_tcgen05_sparse_metadata",
    )


def _require_layout(ref: Any, what: str) -> None:
    kind = TmemKind.SPARSE_METADATA
    require_layout(ref, what, kind, "metadata", "jnp.uint2", "sparse_metadata")


# --- operands of tcgen05_mma ----------------------------------------------------------


def require(
    acc: Any, a: Any, b: Any, metadata: Any, *, scaled: bool, collective: bool
) -> None:
    """Raises unless an instruction multiplies a sparse a with this metadata.

    The types of acc, a and b are those of a dense instruction.
    """
    who = "tcgen05_mma"
    bits = types.itemsize_bits(a.dtype)
    if bits not in (_SCALED_BITS if scaled else _PLAIN_BITS):
        raise errors.UnsupportedError(
            f"{who}: no sparse instruction has such operands",
            expected="with scales of blocks float4_e2m1fn or 8-bit floats"
            if scaled
            else "operands of 8, 16 or 32 bits",
            got=f"{jnp.dtype(a.dtype).name}{' with scales' if scaled else ''}",
            hint="pass the dense operand",
        )
    ops.require_space(metadata, types.TMEM, who, "a_sparse_metadata")
    _require_indices(metadata, f"{who}: a_sparse_metadata")
    _require_layout(metadata, f"{who}: a_sparse_metadata")
    group = layouts.group_of(bits)
    shapes = tuple(tuple(x.shape) for x in (acc, a, b, metadata))
    two = all(len(shape) == 2 for shape in shapes)
    (m, n), (k, _) = (shapes[0], shapes[2]) if two else ((_ROWS, 0), (0, 0))
    _require_rows(m, scaled=scaled, collective=collective)
    columns, indices = n // 2 if collective else n, layouts.INDICES * k // group
    if not two or shapes != ((m, n), (m, k // 2), (k, columns), (_ROWS, indices)):
        right = "(K, N / 2) of each CTA" if collective else "(K, N)"
        count = {8: "K / 4", 4: "K / 2", 2: "K"}[group]
        raise errors.ShapeError(
            f"{who}: the shapes do not form a sparse product",
            expected=f"acc (M, N), a (M, K / 2), b {right}, a_sparse_metadata "
            f"({_ROWS}, {count})",
            got="acc {}, a {}, b {}, a_sparse_metadata {}".format(*shapes),
            hint=f"a holds {group // 2} of each {group} elements along K",
        )
    integer = jnp.issubdtype(a.dtype, jnp.integer)
    step = layouts.N_STEP * (2 if collective and integer else 1)
    most = instructions.MAX_N if collective or scaled else COLUMNS
    tile_k = layouts.tile_k(bits)
    if not n % step and n <= most and not k % tile_k:
        return
    raise errors.ShapeError(
        f"{who}: no sparse instruction has this shape",
        expected=f"N a multiple of {step} up to {most}, K a multiple of {tile_k}",
        got=f"N = {n}, K = {k}",
        hint="pad the operands, or split N",
    )


def _require_rows(m: int, *, scaled: bool, collective: bool) -> None:
    one = not scaled and not collective
    if m == _ROWS or (m == layouts.HALF_ROWS and one):
        return
    # A pair's 64 rows have an accumulator of their own, "Layout C", which the ISA shows
    # in a figure alone; CUTLASS gives it that of a dense product, which is another one.
    known = m == layouts.HALF_ROWS and not scaled
    raise errors.UnsupportedError(
        f"tcgen05_mma: a sparse product {'with scales ' * scaled}"
        f"{'of a pair ' * collective}cannot have {m} rows in a CTA",
        expected=f"{f'{layouts.HALF_ROWS} or ' if one else ''}{_ROWS} rows",
        got=f"M = {m}" + (": where its accumulator lies is not known" if known else ""),
        hint=f"pad a with zeros to {_ROWS} rows, or multiply the dense operand",
    )


def require_storage(right: Sequence[WgmmaOperand]) -> None:
    """Raises LayoutError if b has rows of K shorter than an instruction reads."""
    fits = [x.major == "MN" or x.swizzle >= layouts.K_BYTES for x in right]
    if any(fits):
        return
    raise errors.LayoutError(
        "tcgen05_mma: a sparse product cannot read b in this storage",
        expected=f"along K a swizzle of at least {layouts.K_BYTES} bytes",
        got=f"{right[0].swizzle} bytes",
        hint="store b with a wider swizzle",
    )
