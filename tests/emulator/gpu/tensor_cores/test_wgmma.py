# SPDX-License-Identifier: Apache-2.0
"""wgmma in the emulator: what it reports. Its arithmetic is in test_tensor_core.py."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.entry_kernels import f32
from tests.support.products import tiles
from tests.support.reports import Reports

F16, F32 = jnp.float16, jnp.float32
A, B = (
    np.random.default_rng(i).standard_normal((64, 64)).astype(np.float16)
    for i in (0, 1)
)
ACC = plgpu.ACC((64, 64))


def load_both(a, b, sa, sb, barrier):
    plgpu.copy_gmem_to_smem(a, sa, barrier)
    plgpu.copy_gmem_to_smem(b, sb, barrier)
    plgpu.barrier_wait(barrier)


def run(body, **options):
    """Runs `body(a, b, o, sa, sb, barrier, acc)` in the emulator."""
    scratch = tiles(), tiles(), plgpu.Barrier(num_arrivals=2), ACC
    return everywhere.emulate(body, [A, B], f32(64, 64), *scratch, **options)


def test_a_register_operand_is_taken_when_the_product_is_issued():
    def body(a, b, o, sa, sb, barrier, acc):
        load_both(a, b, sa, sb, barrier)
        x = plgpu.load(sa, layout=plgpu.Layout.WGMMA)
        plgpu.wgmma(acc, x * 2, sb.T)
        sa[...] = jnp.zeros((64, 64), F16)
        o[...] = acc[...]

    expected = 2 * A.astype(np.float64) @ B.astype(np.float64).T
    np.testing.assert_allclose(run(body, asynchrony="late"), expected, atol=4e-5)


reported = Reports()
RACE = errors.RaceError


def of_operands(body):
    """A body that has both operands in SMEM."""

    def full(a, b, o, sa, sb, barrier, acc):
        load_both(a, b, sa, sb, barrier)
        body(acc, sa, sb, o)

    full.__name__ = body.__name__
    return full


@reported(
    RACE, "is written while the wgmma may still read it", "wgmma_wait", "test_wgmma.py"
)
@of_operands
def an_operand_overwritten_before_the_wait(acc, sa, sb, o):
    plgpu.wgmma(acc, sa, sb.T)
    sb[...] = jnp.zeros((64, 64), F16)
    o[...] = acc[...]


@reported(RACE, "the wgmma may still read it")
def an_operand_copied_over_before_the_wait(a, b, o, sa, sb, barrier, acc):
    load_both(a, b, sa, sb, barrier)
    plgpu.wgmma(acc, sa, sb.T)
    load_both(a, b, sa, sb, barrier)
    o[...] = acc[...]


@reported(RACE, "[32:64, 0:64]", "may still read it")
@of_operands
def an_operand_of_the_group_that_a_wait_leaves(acc, sa, sb, o):
    upper, lower = (plgpu.ds(n, 32) for n in (0, 32))
    plgpu.wgmma(acc.at[:, 0:32], sa, sb.at[upper].T)
    plgpu.wgmma(acc.at[:, 32:64], sa, sb.at[lower].T)
    plgpu.wgmma_wait(1)
    sb[upper] = jnp.zeros((32, 64), F16)
    sb[lower] = jnp.zeros((32, 64), F16)


@reported(RACE, "the wgmma reads SMEM float16[64, 64]", "call commit_smem()")
@of_operands
def an_operand_that_threads_wrote_without_commit_smem(acc, sa, sb, o):
    sa[...] = sa[...] * 2
    plgpu.wgmma(acc, sa, sb.T)


@reported(RACE, "read before the copy from input 0")
def an_operand_whose_copy_nobody_waited_for(a, b, o, sa, sb, barrier, acc):
    plgpu.copy_gmem_to_smem(a, sa, barrier)
    plgpu.copy_gmem_to_smem(b, sb, barrier)
    plgpu.wgmma(acc, sa, sb.T)


@reported(errors.UninitializedReadError, "nothing has been written")
def an_operand_that_nobody_wrote(a, b, o, sa, sb, barrier, acc):
    plgpu.wgmma(acc, sa, sa)


@reported(
    RACE, "is read while a wgmma may still add to it", "wgmma_wait(0)", "test_wgmma.py"
)
@of_operands
def an_accumulator_read_in_flight(acc, sa, sb, o):
    plgpu.wgmma(acc, sa, sb.T)
    o[...] = plgpu.wgmma_accumulator_load(acc, wait_n=None)


@reported(errors.KernelError, "freed while the wgmma may still read it", "wgmma_wait")
@of_operands
def a_product_that_nobody_waited_for_at_the_end(acc, sa, sb, o):
    plgpu.wgmma(acc, sa, sb.T)


@reported(errors.LayoutError, "from inside a tile", "starts (4, 0)")
@of_operands
def a_dynamic_start_inside_of_a_tile(acc, sa, sb, o):
    @plgpu.loop(0, 2)
    def _(k):
        part = plgpu.ds(k * 4, 32)
        plgpu.wgmma(acc.at[:, 0:32], sa, sb.at[part].T)
        plgpu.wgmma_wait(0)


@pytest.mark.parametrize("asynchrony", ["eager", "late", "random"])
@pytest.mark.parametrize("name", reported)
def test_a_mistake_is_reported(name, asynchrony):
    reported.check(name, run, asynchrony=asynchrony)


# --- register counts ------------------------------------------------------------------


def with_registers(*counts):
    def body(o):
        for i, (n, action) in enumerate(counts):

            @plgpu.when(lax.axis_index("wg") == i)
            def _(n=n, action=action):
                plgpu.set_max_registers(n, action=action)
                o[...] = jnp.zeros(4)

    everywhere.emulate(body, (), f32(4), threads={"wg": len(counts)})


def test_registers_that_fit_have_no_effect():
    with_registers((40, "decrease"), (232, "increase"), (232, "increase"))


def test_registers_of_all_warpgroups_have_to_fit_the_file():
    with pytest.raises(errors.OutOfResources, match="more registers than") as caught:
        with_registers((56, "decrease"), (240, "increase"), (240, "increase"))
    assert caught.value.resource == "registers"
    assert "at most 504" in str(caught.value)
