# SPDX-License-Identifier: Apache-2.0
"""Accumulators and operands of wgmma: parts, layouts of SMEM arrays."""

from __future__ import annotations

from pallas_gpu import _jax, errors, types
from pallas_gpu.layouts.window import Window
from pallas_gpu.primitives.tensor_cores.tcgen05 import tcgen05_mma_p
from pallas_gpu.primitives.tensor_cores.wgmma import storage_error, wgmma_p
from pallas_gpu.program.walk import walk

_GRANULE = (types.WGMMA_ROWS, types.WGMMA_COLUMNS)


def check_part(window: Window, *, stored: bool) -> None:
    """Raises unless the part consists of registers known at compile time.

    Args:
      window: the part.
      stored: whether threads store to it.

    Raises:
      UnsupportedError: a transpose, a dynamic index, a store to a part.
      LayoutError: the part does not consist of whole tiles.
    """
    if window.dynamic or window.axes != (0, 1):
        raise errors.UnsupportedError(
            "an accumulator is transposed or indexed dynamically",
            expected="static ranges, e.g. of columns: acc.at[:, 0:64]",
            got=_describe(window),
            hint="registers have no addresses: read it with acc[...], and store the "
            "value to SMEM to index or transpose it",
        )
    if stored and not window.is_whole:
        raise errors.UnsupportedError(
            "a store to a part of an accumulator",
            expected="a store of the whole accumulator: acc[...] = value",
            got=f"a part of shape {window.shape} of {window.array_shape}",
            hint="declare one accumulator for each part",
        )
    whole = all(
        start % granule == 0 and size % granule == 0
        for start, size, granule in zip(
            window.starts, window.sizes, _GRANULE, strict=True
        )
    )
    if not whole:
        raise errors.LayoutError(
            "a part of an accumulator does not consist of whole tiles",
            expected=f"starts and sizes that are multiples of {_GRANULE}",
            got=_describe(window),
            hint="read the whole accumulator and select with jnp.where, or store it to "
            "SMEM and slice that",
        )


def _describe(window: Window) -> str:
    parts = []
    for axis, (start, size) in enumerate(zip(window.starts, window.sizes, strict=True)):
        if not isinstance(start, int):
            parts.append("a value")
        elif axis in window.axes:
            parts.append(f"{start} to {start + size}")
        else:
            parts.append(f"{start}")
    turned = ", transposed" if window.is_transposed else ""
    return f"[{', '.join(parts)}] of {window.array_shape}{turned}"


def require_transforms(jaxpr: _jax.Jaxpr) -> None:
    """Raises LayoutError for a product of SMEM arrays without tiling and swizzle."""
    for site in walk(jaxpr):
        if site.op.primitive not in (wgmma_p, tcgen05_mma_p):
            continue
        for access in site.op.accesses:
            aval = access.buffer.aval
            of_product = access.name in ("a", "b") and access.space is types.SMEM
            if of_product and not aval.transforms:
                error = storage_error(aval, access.name, site.op.name)
                raise error.with_location(site.where)
