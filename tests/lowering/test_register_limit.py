# SPDX-License-Identifier: Apache-2.0
"""The most registers of a thread: for which kernels there is a limit, and which one."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.semantics import Lane, under

COLUMNS = 8192


def on_rows(body, rows=4096, columns=COLUMNS, dtype=jnp.float32, **options):
    """A kernel with a block for each row."""
    spec = plgpu.BlockSpec((1, columns), lambda i: (i, 0), memory_space=plgpu.GMEM)
    call = plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((rows, columns), dtype),
        grid=(rows,),
        in_specs=[spec],
        out_specs=spec,
        **options,
    )
    return call, jax.ShapeDtypeStruct((rows, columns), dtype)


def limit_of(call, x):
    """The limit in the module; None without one."""
    (report,) = plgpu.offline.lower(call, x)
    found = re.search(r"pallas_gpu\.register_limit = (\d+)", report.mlir)
    return None if found is None else int(found.group(1))


def normalized(x_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = x / jnp.sum(x)


def test_the_arrays_that_are_live_across_a_reduction_set_the_limit():
    # 64 elements in a thread and 28 others: 5 blocks.
    assert limit_of(*on_rows(normalized)) == 96
    # 128: 3 blocks.
    assert limit_of(*on_rows(normalized, columns=16384)) == 168
    # 32: 8 blocks, as for all smaller ones.
    assert limit_of(*on_rows(normalized, columns=4096)) == 64
    assert limit_of(*on_rows(normalized, columns=256)) == 64


def test_half_of_an_array_that_only_a_reduction_uses_counts():
    def body(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = x - jnp.sum(jnp.exp(x))

    # 64 + 32 + 28: 4 blocks.
    assert limit_of(*on_rows(body)) == 128


def reloaded(x_ref, o_ref):
    total = jnp.sum(jnp.exp(x_ref[...]))
    o_ref[...] = x_ref[...] + total


def test_what_is_live_across_the_barrier_before_a_store_counts():
    # 64 and 28 others. With 64 registers ptxas spills.
    assert limit_of(*on_rows(reloaded)) == 96


def accumulated(x_ref, o_ref):
    x = x_ref[...]

    def step(_, total):
        return total * jnp.float32(1.5) + jnp.exp(total)

    total = jax.lax.fori_loop(0, 4, step, x)
    o_ref[...] = jnp.full(x.shape, jnp.sum(total * x))


def test_where_a_loop_carries_an_array_ptxas_decides():
    assert limit_of(*on_rows(accumulated)) is None


def in_parts(x_ref, o_ref):
    def step(i, total):
        x = x_ref[0, plgpu.ds(i * 2048, 2048)].reshape(-1, 128, 4)
        return total + jnp.sum(jnp.exp(x), axis=(0, 2))

    total = jax.lax.fori_loop(0, 4, step, jnp.zeros(128, jnp.float32))
    o_ref[...] = jnp.full(x_ref.shape, jnp.sum(total))


def test_a_loop_may_carry_a_register_and_reshape_in_place():
    assert limit_of(*on_rows(in_parts)) == 64


def test_where_elements_move_between_threads_ptxas_decides():
    def body(x_ref, o_ref):
        x = plgpu.load(x_ref, layout=plgpu.Layout.WG_STRIDED((1, COLUMNS), 4))
        x = x.reshape(64, 128)
        rows = jnp.sum(plgpu.layout_cast(x, plgpu.Layout.WGMMA), axis=1)
        o_ref[...] = jnp.full(x_ref.shape, jnp.max(rows))

    assert limit_of(*on_rows(body)) is None


def test_a_layout_that_an_array_has_changes_nothing():
    def body(x_ref, o_ref):
        strided = plgpu.Layout.WG_STRIDED((1, COLUMNS), 4)
        x = plgpu.load(x_ref, layout=strided)
        o_ref[...] = x / jnp.sum(x)

    assert limit_of(*on_rows(body)) == limit_of(*on_rows(normalized))


def test_arrays_of_narrow_types_share_registers():
    def body(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = x - jnp.max(x.astype(jnp.float32)).astype(x.dtype)

    # 32 of pairs, and half of the 64 of the converted ones.
    assert limit_of(*on_rows(body, dtype=jnp.bfloat16)) == 96


def test_an_array_is_live_through_the_loop_that_uses_it():
    def body(x_ref, o_ref):
        x = x_ref[...]

        def step(_, total):
            return total + jnp.sum(x * total)

        o_ref[...] = jnp.full(x.shape, jax.lax.fori_loop(0, 4, step, jnp.float32(1)))

    assert limit_of(*on_rows(body)) == 128

    def outside(x_ref, o_ref):
        x = x_ref[...]

        def step(_, total):
            return total + jnp.sum(x_ref[...] * total)

        total = jax.lax.fori_loop(0, 4, step, jnp.max(x))
        o_ref[...] = jnp.full(x.shape, total)

    # Half of 64.
    assert limit_of(*on_rows(outside)) == 64


def test_branches_count():
    def body(x_ref, o_ref):
        x = x_ref[...]
        total = jnp.sum(x)

        @plgpu.when(total > 0)
        def _():
            o_ref[...] = x / jnp.sum(x * total)

    # 64, half of the product's, and 28.
    assert limit_of(*on_rows(body)) == 128


def test_without_a_reduction_ptxas_decides():
    def body(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...])

    assert limit_of(*on_rows(body)) is None


def test_with_other_moves_of_arrays_ptxas_decides():
    def body(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = jnp.cumsum(x, axis=1) / jnp.sum(x)

    assert limit_of(*on_rows(body)) is None


def test_under_lane_semantics_ptxas_decides():
    call, x = on_rows(normalized)
    assert limit_of(under(Lane, call), x) is None


def test_few_blocks_may_have_all_registers():
    # 132 SMs: one block on each, or two.
    assert limit_of(*on_rows(normalized, rows=132)) is None
    assert limit_of(*on_rows(normalized, columns=256, rows=264)) is None
    assert limit_of(*on_rows(normalized, columns=256, rows=132 * 3)) == 168


def test_smem_counts_for_the_blocks_that_share_an_sm():
    def body(x_ref, o_ref, scratch):
        scratch[0] = jnp.float32(0)
        normalized(x_ref, o_ref)

    scratch = [plgpu.SMEM((10000,), jnp.float32)]
    call, x = on_rows(body, columns=4096, scratch_shapes=scratch)
    # 5 blocks of 42 KB; there are registers for 8.
    assert limit_of(call, x) == 96


@pytest.mark.offline
@pytest.mark.parametrize("body", [reloaded, accumulated, in_parts])
def test_a_limit_causes_no_spills(body):
    (report,) = plgpu.offline.compile(*on_rows(body), target="sm_90a")
    assert report.resources.spill_store_bytes == 0


@pytest.mark.offline
def test_ptxas_keeps_to_the_limit():
    (report,) = plgpu.offline.compile(*on_rows(normalized), target="sm_90a")
    assert re.search(r"\.maxnreg\s+96\b", report.ptx)
    assert report.resources.registers_per_thread <= 96
    assert report.resources.spill_store_bytes == 0


def test_a_kernel_with_a_limit_computes_the_same():
    x = jnp.arange(2.0 * 256).reshape(2, 256)
    everywhere.check(
        lambda interpret: on_rows(normalized, rows=2, columns=256, interpret=interpret)[
            0
        ],
        [x],
        x / jnp.sum(x, axis=1, keepdims=True),
        rtol=1e-6,
    )
