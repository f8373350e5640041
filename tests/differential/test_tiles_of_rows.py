# SPDX-License-Identifier: Apache-2.0
"""Several tiles of M: products of one call are upstream's of a call for each tile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from tests.support.differential import tensor_facts as facts
from tests.support.differential import tensor_kernels as kernels

TILES, N, K = 2, 64, 64
# Of each product the column of the accumulator, and the starts of a and b.
GOLDEN = (
    "cta_group::1.kind::f16 0x08110010; sw128 sbo64 lbo-; sw128 sbo64 lbo-; "
    "0:0:0 0:2:80+ 0:4:100+ 0:6:180+ 40:400:0 40:402:80+ 40:404:100+ 40:406:180+"
)


def kernel(rows):
    def make(names, params):
        def body(a, b, a_smem, b_smem, acc, loaded, done):
            names.copy_gmem_to_smem(a, a_smem, loaded)
            names.copy_gmem_to_smem(b, b_smem, loaded)
            names.barrier_wait(loaded)
            if names is plgpu:
                names.tcgen05_mma(acc, a_smem, b_smem, done, accumulate=False)
            else:
                for i in range(TILES):
                    columns, tile = names.ds(i * N, N), names.ds(i * rows, rows)
                    names.tcgen05_mma(
                        acc.at[:, columns], a_smem.at[tile], b_smem, accumulate=False
                    )
                names.tcgen05_commit_arrive(done)
            names.barrier_wait(done)

        transforms = names.TilingTransform((8, 64)), names.SwizzleTransform(128)
        tiles = (TILES, rows, N) if names is plgpu else (rows, TILES * N)
        return names.kernel(
            lambda a, b, out, **scratch: body(a, b, **scratch),
            out_type=jax.ShapeDtypeStruct((rows, N), jnp.float32),
            scratch_types={
                "a_smem": names.SMEM(
                    (TILES * rows, K), jnp.float16, transforms=transforms
                ),
                "b_smem": names.SMEM((K, N), jnp.float16, transforms=transforms),
                "acc": names.TMEM(tiles, jnp.float32),
                "loaded": names.Barrier(num_arrivals=2),
                "done": names.Barrier(orders_tensor_core=True),
            },
            compiler_params=params,
        )

    a = jax.ShapeDtypeStruct((TILES * rows, K), jnp.float16)
    return make, a, jax.ShapeDtypeStruct((K, N), jnp.float16)


@pytest.mark.offline
@kernels.by_each
def test_products_of_one_call_are_upstreams_of_a_call_for_each_tile(compiled):
    assert facts.describe(compiled(*kernel(128)), 2) == GOLDEN
