# SPDX-License-Identifier: Apache-2.0
"""The check of budgets and libtpu agree to the last row of an array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu import sparsecore as plsc
from pallas_gpu.arch import tpu
from pallas_gpu.sparsecore.check import budgets
from tests.support import tiers
from tests.support.sparsecore import emitted
from tests.support.sparsecore.kernels import kernel
from tests.support.sparsecore.modules import needs_libtpu

# Shapes that fill the VMEM of a subcore of tpu7x.
FULL = [
    ((1024, 100), "float32", "compact"),
    ((2048, 128), "bfloat16", "compact"),
    ((4096, 128), "int8", "compact"),
    ((131072,), "float32", "compact"),
    ((16384, 5), "float32", "sparsecore"),
    ((16384, 16), "bfloat16", "sparsecore"),
]


def _through(shape, dtype, tiling):
    """A kernel whose copies go through an array of the shape."""

    def body(x, o, large):
        few = large.at[plsc.ds(0, x.shape[0])]
        plsc.sync_copy(x, few)
        plsc.sync_copy(few, o)

    few = jax.ShapeDtypeStruct((1024, *shape[1:])[: len(shape)], dtype)
    run = kernel(body, few, plsc.VMEM(shape, jnp.dtype(dtype)), tiling=tiling)
    return run, jnp.zeros(few.shape, dtype)


@pytest.mark.parametrize("shape, dtype, tiling", FULL, ids=str)
def test_a_row_more_does_not_fit(shape, dtype, tiling):
    found = budgets.words(shape, jnp.dtype(dtype), plsc.VMEM, tiling)
    assert found == tpu.TPU7X.vmem_words
    run, x = _through((shape[0] + 1, *shape[1:]), dtype, tiling)
    with pytest.raises(errors.OutOfResources):
        run(x)


@needs_libtpu
@pytest.mark.parametrize("row", range(len(FULL)))
def test_libtpu_refuses_that_row_too(monkeypatch, row):
    if not tiers.runs_everything() and row != 1:
        pytest.skip("one row stands for all")
    shape, dtype, tiling = FULL[row]
    run, x = _through(shape, dtype, tiling)
    emitted.compiled(run, x)
    monkeypatch.setattr(budgets, "require", lambda *_: None)
    run, x = _through((shape[0] + 1, *shape[1:]), dtype, tiling)
    with pytest.raises(errors.CompilationError, match="AllocationFailure"):
        emitted.compiled(run, x)


def test_scopes_that_follow_each_other_share_memory():
    def body(x, o):
        for _ in range(2):
            plsc.run_scoped(
                lambda large: plsc.sync_copy(x, large.at[plsc.ds(0, 1024)]),
                plsc.VMEM((100_000,), jnp.float32),
            )

    run = kernel(body, jax.ShapeDtypeStruct((1024,), np.float32), subcores=1)
    assert jax.make_jaxpr(run)(np.zeros(1024, np.float32)).eqns
