# SPDX-License-Identifier: Apache-2.0
"""Products read SMEM where it is only if nothing may have changed since the load.

Each kernel changes, or lets another thread change, what a load has read before the
product of it. A product that read the array itself would give another result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.composites import in_place
from tests.support import everywhere, host
from tests.support.value_products import float64, kernel, numbers

F32, BF16 = jnp.float32, jnp.bfloat16
SHAPE = (64, 64)
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
TILE = plgpu.SMEM(SHAPE, BF16, transforms=TILED)
PLAIN = plgpu.SMEM(SHAPE, BF16)


def dot(a, b):
    return jnp.dot(a, b, preferred_element_type=F32)


def by_a_store_to_a_part(a):
    a[8:16] = jnp.zeros((8, 64), BF16)


def by_a_store_to_a_view(a):
    a.reshape(32, 128)[...] = jnp.zeros((32, 128), BF16)


def by_a_branch(a):
    @plgpu.when(jnp.sum(a[...].astype(F32)) < 1e9)
    def _():
        a[...] = jnp.zeros(SHAPE, BF16)


def by_a_loop(a):
    def step(_, carry):
        a[...] = a[...] * 2
        return carry

    jax.lax.fori_loop(0, 2, step, 0)


def by_a_jitted_function(a):
    @jax.jit
    def clear():
        a[...] = jnp.zeros(SHAPE, BF16)

    clear()


def by_an_inner_scope(a):
    def clear(zeros):
        zeros[...] = jnp.zeros(SHAPE, BF16)
        a[...] = zeros[...]

    plgpu.run_scoped(clear, TILE)


def by_addupdate(a):
    jax.ref.addupdate(a, (slice(None), slice(None)), jnp.ones(SHAPE, BF16))


CHANGES = {
    change.__name__: change
    for change in (
        by_a_store_to_a_part,
        by_a_store_to_a_view,
        by_a_branch,
        by_a_loop,
        by_a_jitted_function,
        by_an_inner_scope,
        by_addupdate,
    )
}


def changed(change):
    """Returns a kernel that multiplies what it has loaded before a change."""

    def body(x_ref, y_ref, o_ref, a, b):
        a[...] = x_ref[...]
        b[...] = y_ref[...]
        before = a[...]
        change(a)
        o_ref[...] = dot(before, b[...])

    tile = PLAIN if change is by_a_store_to_a_view else TILE
    return kernel(body, SHAPE, scratch_types=[tile, TILE])


@pytest.fixture
def pair(rng):
    return [numbers(rng, "bfloat16", *SHAPE) for _ in range(2)]


@pytest.mark.parametrize("name", CHANGES)
def test_a_load_is_not_moved_past_a_change(pair, name):
    x, y = pair
    everywhere.check(changed(CHANGES[name]), pair, float64(x) @ float64(y), atol=2e-3)


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - {"by_a_store_to_a_view"}))
def test_these_kernels_show_a_load_that_is_moved(pair, name, monkeypatch):
    monkeypatch.setattr(in_place._Body, "_is_quiet", lambda *_: True)
    expected = float64(pair[0]) @ float64(pair[1])
    with pytest.raises(AssertionError):
        everywhere.check(changed(CHANGES[name]), pair, expected, atol=2e-3)


def check(body, x, y, expected, *scratch, atol=2e-3, **options):
    make = kernel(body, SHAPE, scratch_types=[TILE, TILE, *scratch], **options)
    everywhere.check(make, [x, y], expected, atol=atol)


def overwritten_by_tma(x_gmem, y_gmem, o_ref, a, b, barrier):
    plgpu.copy_gmem_to_smem(x_gmem, a, barrier)
    plgpu.barrier_wait(barrier)
    b[...] = y_gmem[...]
    before = a[...]
    plgpu.copy_gmem_to_smem(y_gmem, a, barrier)
    plgpu.barrier_wait(barrier)
    o_ref[...] = dot(before, b[...])


def overwritten_by_another(x_ref, y_ref, o_ref, a, b, released):
    @plgpu.when(jax.lax.axis_index("wg") == 0)
    def _():
        a[...] = x_ref[...]
        b[...] = y_ref[...]
        before = a[...]
        plgpu.barrier_arrive(released)
        o_ref[...] = dot(before, b[...])

    @plgpu.when(jax.lax.axis_index("wg") == 1)
    def _():
        plgpu.barrier_wait(released)
        a[...] = jnp.zeros(SHAPE, BF16)


@pytest.mark.parametrize(
    ("body", "options"),
    [(overwritten_by_tma, {}), (overwritten_by_another, {"threads": {"wg": 2}})],
)
def test_a_load_is_not_moved_past_what_lets_another_write(pair, body, options):
    x, y = pair
    check(body, x, y, float64(x) @ float64(y), plgpu.Barrier(), **options)


def ring(releases_first):
    """Returns a product of blocks that another warpgroup copies one by one."""

    def body(x_gmem, y_gmem, o_ref, a, b, full, empty):
        def copy(i, carry):
            @plgpu.when(i > 0)
            def _():
                plgpu.barrier_wait(empty)

            part = plgpu.ds(i * 64, 64)
            plgpu.copy_gmem_to_smem(x_gmem.at[:, part], a, full)
            plgpu.copy_gmem_to_smem(y_gmem.at[part], b, full)
            return carry

        def multiply(_, total):
            plgpu.barrier_wait(full)
            left, right = a[...], b[...]
            if releases_first:
                plgpu.barrier_arrive(empty)
                return total + dot(left, right)
            total = total + dot(left, right)
            plgpu.barrier_arrive(empty)
            return total

        @plgpu.when(jax.lax.axis_index("wg") == 1)
        def _():
            jax.lax.fori_loop(0, 4, copy, 0)

        @plgpu.when(jax.lax.axis_index("wg") == 0)
        def _():
            o_ref[...] = jax.lax.fori_loop(0, 4, multiply, jnp.zeros(SHAPE, F32))

    scratch = [TILE, TILE, plgpu.Barrier(num_arrivals=2), plgpu.Barrier()]
    return kernel(body, SHAPE, scratch_types=scratch, threads={"wg": 2})


@pytest.mark.parametrize("releases_first", [True, False])
def test_an_operand_is_released_after_the_product_that_reads_it(rng, releases_first):
    """The product is complete when the warpgroup that copies may overwrite it."""
    x, y = numbers(rng, "bfloat16", 64, 256), numbers(rng, "bfloat16", 256, 64)
    expected = float64(x) @ float64(y)
    everywhere.check(ring(releases_first), [x, y], expected, atol=5e-3)


def test_a_load_of_the_last_step_is_not_one_of_this_step(pair):
    """A loop carries what was loaded, not the array."""
    x, y = pair

    def body(x_ref, y_ref, o_ref, a, b):
        a[...] = x_ref[...]
        b[...] = y_ref[...]

        def step(_, carry):
            left, total = carry
            total = total + dot(left, b[...])
            loaded = a[...]
            a[...] = a[...] * 2
            return loaded, total

        _, total = jax.lax.fori_loop(0, 3, step, (a[...], jnp.zeros(SHAPE, F32)))
        o_ref[...] = total

    check(body, x, y, 4 * float64(x) @ float64(y), atol=5e-3)


def test_a_product_is_not_moved_to_its_sum_past_a_store(pair):
    """It is fused with a later sum only if its operands are still there."""
    x, y = pair

    def body(x_ref, y_ref, o_ref, a, b):
        a[...] = x_ref[...]
        b[...] = y_ref[...]
        first = dot(a[...], b[...])
        a[...] = jnp.zeros(SHAPE, BF16)
        o_ref[...] = dot(y_ref[...], b[...]) + first

    expected = float64(x) @ float64(y) + float64(y) @ float64(y)
    check(body, x, y, expected, atol=5e-3)


def test_an_accumulator_that_is_written_before_the_sum_is_stored(pair):
    x, y = pair

    def body(x_ref, y_ref, o_ref, a, b):
        a[...] = x_ref[...]
        b[...] = y_ref[...]

        def run(acc):
            acc[...] = jnp.ones(SHAPE, F32)
            total = acc[...] + dot(a[...], b[...])
            acc[...] = acc[...] * 2
            twice = acc[...]
            acc[...] = total
            return acc[...] + twice

        o_ref[...] = plgpu.run_scoped(run, plgpu.ACC(SHAPE, F32))

    check(body, x, y, float64(x) @ float64(y) + 3)


@pytest.mark.parametrize("columns", [64, 32])
def test_scratch_of_a_scope_is_reused_for_copies_by_tma(rng, columns):
    """Products of either kind: by wgmma, and term by term."""
    x = host.array(rng.integers(-4, 4, (columns, columns)), jnp.int32)

    def body(x_ref, o_ref, barrier):
        def copied(tile):
            plgpu.copy_gmem_to_smem(x_ref, tile, barrier)
            plgpu.barrier_wait(barrier)
            return tile[...].astype(F32)

        def step(_, total):
            dtype, out = (jnp.int32, jnp.int32) if columns == 32 else (BF16, F32)
            v = x_ref[...].astype(dtype)
            product = jnp.dot(v, v, preferred_element_type=out).astype(F32)
            return total + product + plgpu.run_scoped(copied, tile)

        start = jnp.zeros((columns, columns), F32)
        o_ref[...] = jax.lax.fori_loop(0, 2, step, start)

    tile = plgpu.SMEM((columns, columns), jnp.int32)
    make = kernel(body, (columns, columns), scratch_types=[plgpu.Barrier()])
    a = np.asarray(x)
    everywhere.check(make, [x], 2 * (a @ a + a))
