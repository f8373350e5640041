# SPDX-License-Identifier: Apache-2.0
"""Inline code in the emulator: what its author says of it, or the emitted code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu import mosaic as mgpu
from tests.support import everywhere

SHAPE = (64, 128)
F32 = jnp.float32
STRIDED = plgpu.Layout.WG_STRIDED(SHAPE, vec_size=2)
X = (np.arange(64 * 128) % 251 - 125).astype(np.float32).reshape(SHAPE)
REF, SPLAT = plgpu.RefType(), plgpu.Layout.WG_SPLAT
OUT = jax.ShapeDtypeStruct(SHAPE, F32)


def doubling(emulate):
    @plgpu.inline_mgpu(
        arg_types=(STRIDED,),
        return_type=plgpu.ShapeDtypeStruct(SHAPE, F32, STRIDED),
        emulate=emulate,
    )
    def double(ctx, x):
        return x + x

    def body(x, o):
        o[...] = double(plgpu.load(x, layout=STRIDED, optimized=False))

    return everywhere.kernel(body, OUT)


def read_all(emulate, transforms=()):
    """Inline code that reads a reference, and stores nothing."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms),), emulate=emulate)
    def read(ctx, ref):
        mgpu.warpgroup_barrier()

    return read


def test_a_missing_wait_shows_where_code_reads():
    def emulate(ref):
        ref[0, :4].sum()

    def body(x, o, smem, barrier):
        plgpu.copy_gmem_to_smem(x, smem, barrier)
        read_all(emulate)(smem)
        plgpu.barrier_wait(barrier)
        o[...] = smem[...]

    scratch = plgpu.SMEM(SHAPE, F32), plgpu.Barrier()
    found = plgpu.check(everywhere.kernel(body, OUT, *scratch)())(X)
    assert all(f.at.function.endswith("body") for f in found.findings)
    with pytest.raises(errors.KernelError, match="missing-wait"):
        found.raise_if_not_clean()


@pytest.mark.parametrize("disjoint", [True, False])
def test_accesses_of_code_by_two_warpgroups_race(disjoint):
    def body(x, o):
        i = lax.axis_index("w")

        def emulate(o, i):
            rows = slice(32 * int(i), 32 * int(i) + 32) if disjoint else slice(64)
            o[rows] = np.float32(int(i))

        @plgpu.inline_mgpu(arg_types=(REF, SPLAT), emulate=emulate)
        def fill(ctx, o, i):
            pass

        fill(o, i)

    run = everywhere.kernel(body, OUT, threads={"w": 2})()
    found = {f.rule.id for f in plgpu.check(run)(X).findings}
    assert found == (set() if disjoint else {"race"})


def test_a_check_says_that_the_code_was_run():
    (kernel,) = plgpu.check(doubling(None)(), orders=2)(X).coverage
    assert kernel.emitted and "the code that it is lowered to" in str(kernel)
    found = plgpu.check(doubling(None)(), orders="all")(X)
    (row,) = found.not_modelled
    assert row.at.function.endswith("body") and "emulate" in row.hint


def test_a_check_of_all_orders_runs_what_emulate_does():
    found = plgpu.check(doubling(lambda x: x + x)(), orders="all")(X)
    assert found.clean and found.coverage[0].complete
    np.testing.assert_array_equal(found.results, 2 * X)


def test_code_without_results_may_be_ignored():
    def body(x, o):
        read_all(None)(x)
        o[...] = x[...]

    ignoring = plgpu.InterpretParams(inline_mgpu="ignore")
    run = everywhere.kernel(body, OUT)
    assert plgpu.check(run(ignoring))(X).coverage[0].emitted is False
    np.testing.assert_array_equal(run(ignoring)(X), X)
