# SPDX-License-Identifier: Apache-2.0
"""What the scratch of a kernel occupies, and the budgets of its chip.

VMEM of all subcores of a core and its VMEM_SHARED come from one pool.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax.numpy as jnp

from pallas_gpu import _jax, errors
from pallas_gpu.primitives.scoped import run_scoped_p
from pallas_gpu.program.build import region_of
from pallas_gpu.program.nodes import Region
from pallas_gpu.sparsecore.check.kernel import Kernel
from pallas_gpu.sparsecore.types import SMEM, VMEM, VMEM_SHARED, WORD_BYTES, Space

# Tiles of (8, 128) under compact tiling, units of 8 words under SparseCore's.
_COMPACT_TILE, _SPARSECORE_WORDS = (8, 128), 8


def words(shape: tuple[int, ...], dtype: Any, space: Space, tiling: str) -> int:
    """Returns the words that an array occupies, rounded up as libtpu does."""
    itemsize = jnp.dtype(dtype).itemsize
    if space is SMEM:
        return math.prod(shape)
    if tiling == "sparsecore":
        unit = _SPARSECORE_WORDS * WORD_BYTES // itemsize
        *rows, last = shape or (1,)
        return math.prod(rows) * _up(last, unit) * itemsize // WORD_BYTES
    *outer, last = shape or (1,)
    last = _up(last, _COMPACT_TILE[1] * (1 if outer else WORD_BYTES // itemsize))
    if outer:
        outer[-1] = _up(outer[-1], _COMPACT_TILE[0] * WORD_BYTES // itemsize)
    return math.prod(outer) * last * itemsize // WORD_BYTES


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def used(jaxpr: _jax.Jaxpr, tiling: str) -> Counter[Space]:
    """Returns the words that the scratch of a kernel occupies at most, by memory."""
    return _used(region_of(jaxpr), tiling)


def _used(region: Region, tiling: str) -> Counter[Space]:
    most: Counter[Space] = Counter()
    for op in region.ops:
        own: Counter[Space] = Counter()
        if op.primitive is run_scoped_p:
            for ref in op.made:
                space = ref.aval.memory_space
                if isinstance(space, Space):
                    own_tiling = ref.aval.tiling or tiling
                    own[space] += words(ref.shape, ref.dtype, space, own_tiling)
        inner: Counter[Space] = Counter()
        for body in op.regions:
            inner |= _used(body, tiling)
        found = own + inner
        # An argument of the function: those of all scopes are there at once.
        shared = most[VMEM_SHARED] + found[VMEM_SHARED]
        most |= found
        if shared:
            most[VMEM_SHARED] = shared
    return most


def require(jaxpr: _jax.Jaxpr, kernel: Kernel) -> None:
    """Raises OutOfResources for a kernel that its chip has too little memory for."""
    chip, found = kernel.chip, used(jaxpr, kernel.params.tiling)
    smem = chip.smem_words if kernel.is_vector else chip.scalar_smem_words
    pool = chip.subcores * found[VMEM] + found[VMEM_SHARED]
    rows = (
        ("VMEM of a subcore", found[VMEM], chip.vmem_words),
        ("SMEM of a subcore", found[SMEM], smem),
        ("VMEM_SHARED of a core", found[VMEM_SHARED], chip.pool_words),
        (
            f"VMEM of {chip.subcores} subcores and VMEM_SHARED of a core",
            pool,
            chip.pool_words,
        ),
    )
    for what, count, most in rows:
        if count > most:
            shown = ", ".join(sorted(f"{space.name} {n}" for space, n in found.items()))
            raise errors.OutOfResources(
                f"kernel {kernel.name} does not fit {chip.name}: {what}",
                expected=f"at most {most} words",
                got=f"{count} words ({shown}; {kernel.params.tiling} tiling)",
                hint="use smaller buffers in a loop"
                if kernel.params.tiling == "sparsecore"
                else "use smaller buffers in a loop, or last dimensions that are "
                "multiples of 128",
                resource=what,
                limit_bytes=most * WORD_BYTES,
                used_bytes=count * WORD_BYTES,
            )
