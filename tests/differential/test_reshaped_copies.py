# SPDX-License-Identifier: Apache-2.0
"""Copies to reshaped arrays in SMEM: addresses and coordinates are upstream's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.support.differential import tensor_kernels as kernels

# Shape of the array, shape of SMEM, and the part of which another shape is copied.
CASES = {
    "dimensions are merged": (
        (64, 32),
        (6, 8, 32),
        lambda s: s.at[1:5].reshape(32, 32),
    ),
    "a dimension is split": ((40, 8, 32), (64, 32), lambda s: s.reshape(8, 8, 32)),
    "flat": ((32, 32), (3, 512), lambda s: s.at[2].reshape(16, 32)),
}  # fmt: skip


def loads(compile_, case, semantics):
    """Address in SMEM, coordinates and barrier of each tensor copy to SMEM."""
    shape, tile, part = case

    def make(names, params):
        def body(x, out, smem, full):
            dst = part(smem)
            names.copy_gmem_to_smem(x.at[8 : 8 + dst.shape[0]], dst, full)
            names.barrier_wait(full)

        return names.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
            scratch_types=[names.SMEM(tile, jnp.float32), names.Barrier()],
            compiler_params=params,
        )

    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    stream = compile_(make, x, semantics=semantics)
    opcode = "cp.async.bulk.tensor.{}d.shared::cluster.global"
    wanted = opcode.format(len(shape))
    return [x.operands for x in stream if x.opcode.startswith(wanted)]


@pytest.mark.offline
@kernels.beside_upstream
@pytest.mark.parametrize("semantics", ["Lane", "Warpgroup"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_copies_to_reshaped_smem_are_upstreams(case, semantics):
    own = loads(kernels.ours, case, semantics)
    assert own
    assert own == loads(kernels.upstreams, case, semantics)
