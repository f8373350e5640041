# SPDX-License-Identifier: Apache-2.0
"""Rows that indices name, four at a time: instructions and addresses are upstream's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.support.differential import tensor_kernels as kernels

GATHER = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4"
    ".mbarrier::complete_tx::bytes"
)
SCATTER = "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
# Rows, columns, dtype, swizzle; of each instruction of the first warp the address in
# SMEM after the first one's, and the column.
CASES = {
    "f32": (16, 32, jnp.float32, 128, "0:0"),
    "several tiles": (16, 256, jnp.bfloat16, 128, "0:0 400:40 800:80 c00:c0"),
    "64-byte swizzle": (32, 64, jnp.bfloat16, 64, "0:0 200:20 800:0 a00:20"),
    "more rows": (64, 64, jnp.bfloat16, 128, "0:0 800:0 1000:0 1800:0"),
}


def kernel(rows, columns, dtype, swizzle, scatters):
    def make(names, params):
        def body(x, index, out, tile, full):
            layout = names.Layout.TMA_INDICES
            chosen = names.load(index, layout=layout, optimized=False)
            if scatters:
                names.copy_smem_to_gmem(tile, out.at[chosen])
                names.wait_smem_to_gmem(0)
                return
            names.copy_gmem_to_smem(x.at[chosen], tile, full)
            names.barrier_wait(full)

        width = swizzle // jnp.dtype(dtype).itemsize
        transforms = names.TilingTransform((8, width)), names.SwizzleTransform(swizzle)
        return names.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((128, columns), dtype),
            scratch_types=[
                names.SMEM((rows, columns), dtype, transforms=transforms),
                names.Barrier(),
            ],
            compiler_params=params,
        )

    x = jax.ShapeDtypeStruct((128, columns), dtype)
    return make, x, jax.ShapeDtypeStruct((rows,), jnp.uint32)


def described(stream, scatters):
    """The copies of the first warp's elected thread."""
    wanted = SCATTER if scatters else GATHER
    chosen = [x.operands for x in stream if x.opcode == wanted]
    if scatters:
        copies = [(smem, coordinates[1]) for coordinates, (smem,) in chosen]
    else:
        copies = [(smem, coordinates[1]) for (smem,), coordinates, _ in chosen]
    first = copies[0][0]
    return " ".join(f"{smem - first:x}:{column:x}" for smem, column in copies)


@pytest.mark.offline
@kernels.by_each
@pytest.mark.parametrize("scatters", [False, True], ids=["from GMEM", "to GMEM"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_copies_of_four_rows(case, scatters, compiled):
    *sizes, expected = case
    assert described(compiled(*kernel(*sizes, scatters)), scatters) == expected
