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


def repeated(x_ref, o_ref):
    """What is written twice is computed once: 64 and 28, as without the repeat."""
    x = x_ref[...]
    total = jnp.sum(jnp.exp(x - jnp.float32(1)))
    o_ref[...] = jnp.exp(x - jnp.float32(1)) / total


def partly_reduced(x_ref, o_ref):
    """Half of an array counts that only a reduction uses: 64 + 32 + 28, 4 blocks."""
    x = x_ref[...]
    o_ref[...] = x - jnp.sum(jnp.exp(x))


def reloaded(x_ref, o_ref):
    """Live across the barrier before the store: 64 and 28; with 64 ptxas spills."""
    total = jnp.sum(jnp.exp(x_ref[...]))
    o_ref[...] = x_ref[...] + total


def in_parts(x_ref, o_ref):
    """A loop may carry a register, and reshape in place."""

    def step(i, total):
        x = x_ref[0, plgpu.ds(i * 2048, 2048)].reshape(-1, 128, 4)
        return total + jnp.sum(jnp.exp(x), axis=(0, 2))

    total = jax.lax.fori_loop(0, 4, step, jnp.zeros(128, jnp.float32))
    o_ref[...] = jnp.full(x_ref.shape, jnp.sum(total))


def in_the_layout_that_it_has(x_ref, o_ref):
    x = plgpu.load(x_ref, layout=plgpu.Layout.WG_STRIDED((1, COLUMNS), 4))
    o_ref[...] = x / jnp.sum(x)


def through_a_loop(x_ref, o_ref):
    """An array is live through the loop that uses it."""
    x = x_ref[...]

    def step(_, total):
        return total + jnp.sum(x * total)

    o_ref[...] = jnp.full(x.shape, jax.lax.fori_loop(0, 4, step, jnp.float32(1)))


def outside_of_a_loop(x_ref, o_ref):
    """Half of 64."""

    def step(_, total):
        return total + jnp.sum(x_ref[...] * total)

    total = jax.lax.fori_loop(0, 4, step, jnp.max(x_ref[...]))
    o_ref[...] = jnp.full(x_ref.shape, total)


def in_a_branch(x_ref, o_ref):
    """64, half of the product's, and 28."""
    x = x_ref[...]
    total = jnp.sum(x)

    @plgpu.when(total > 0)
    def _():
        o_ref[...] = x / jnp.sum(x * total)


# --- bodies of which ptxas decides ----------------------------------------------------


def accumulated(x_ref, o_ref):
    """A loop carries an array."""
    x = x_ref[...]

    def step(_, total):
        return total * jnp.float32(1.5) + jnp.exp(total)

    total = jax.lax.fori_loop(0, 4, step, x)
    o_ref[...] = jnp.full(x.shape, jnp.sum(total * x))


def moved_between_threads(x_ref, o_ref):
    x = plgpu.load(x_ref, layout=plgpu.Layout.WG_STRIDED((1, COLUMNS), 4))
    rows = jnp.sum(plgpu.layout_cast(x.reshape(64, 128), plgpu.Layout.WGMMA), axis=1)
    o_ref[...] = jnp.full(x_ref.shape, jnp.max(rows))


def not_reduced(x_ref, o_ref):
    o_ref[...] = jnp.exp(x_ref[...])


def summed_up(x_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = jnp.cumsum(x, axis=1) / jnp.sum(x)


LIMITS = {
    normalized: 96,  # 64 elements in a thread and 28 others: 5 blocks
    repeated: 96,
    partly_reduced: 128,
    reloaded: 96,
    in_parts: 64,
    in_the_layout_that_it_has: 96,
    through_a_loop: 128,
    outside_of_a_loop: 64,
    in_a_branch: 128,
    accumulated: None,
    moved_between_threads: None,
    not_reduced: None,
    summed_up: None,
}


@pytest.mark.parametrize(("body", "limit"), LIMITS.items())
def test_what_is_live_across_a_barrier_sets_the_limit(body, limit):
    assert limit_of(*on_rows(body)) == limit


@pytest.mark.parametrize(
    ("columns", "limit"),
    [
        (16384, 168),  # 128 elements: 3 blocks
        (4096, 64),  # 32: 8 blocks, as for all smaller ones
        (256, 64),
    ],
)
def test_the_size_of_an_array_sets_the_limit(columns, limit):
    assert limit_of(*on_rows(normalized, columns=columns)) == limit


def test_arrays_of_narrow_types_share_registers():
    def body(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = x - jnp.max(x.astype(jnp.float32)).astype(x.dtype)

    # 32 of pairs, and half of the 64 of the converted ones.
    assert limit_of(*on_rows(body, dtype=jnp.bfloat16)) == 96


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
@pytest.mark.parametrize("body", [normalized, reloaded, accumulated, in_parts])
def test_a_limit_causes_no_spills(body):
    (report,) = plgpu.offline.compile(*on_rows(body), target="sm_90a")
    assert report.resources.spill_store_bytes == 0
    limit = LIMITS[body]
    if limit is not None:
        assert re.search(rf"\.maxnreg\s+{limit}\b", report.ptx)
        assert report.resources.registers_per_thread <= limit


def test_a_kernel_with_a_limit_computes_the_same():
    def make(interpret):
        return on_rows(normalized, rows=2, columns=256, interpret=interpret)[0]

    x = jnp.arange(2.0 * 256).reshape(2, 256)
    expected = x / jnp.sum(x, axis=1, keepdims=True)
    everywhere.check(make, [x], expected, rtol=1e-6)
