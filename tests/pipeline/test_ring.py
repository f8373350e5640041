# SPDX-License-Identifier: Apache-2.0
"""`Ring`: steps of a static and of a traced number, one CTA and a cluster, products."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.public_calls import top
from tests.support.refusal import refused
from tools.source_tree import ROOT

STEPS = 5
X = np.random.default_rng(0).standard_normal((STEPS, 2, 128)).astype(np.float32)
TILING = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def rows(stages=2):
    return plgpu.SMEM((stages, 2, 128), jnp.float32)


def roles(produce, consume):
    wg = lax.axis_index("wg")
    plgpu.when(wg == 1)(produce)
    plgpu.when(wg == 0)(consume)


def doubled(declared, steps=STEPS, dtype=jnp.int32, **options):
    """One warpgroup copies what another one doubles."""

    def body(n, x, o, ring):
        count = n[0] if steps is None else steps

        def produce():
            @plgpu.loop(0, count)
            def _(i):
                slot = ring.fill(i.astype(dtype))
                plgpu.copy_gmem_to_smem(x.at[i], slot.buffers, slot.full)

        def consume():
            @plgpu.loop(0, count)
            def _(i):
                o[i] = ring.take(i.astype(dtype)).buffers[...] * 2
                ring.release(i.astype(dtype))

        roles(produce, consume)

    return everywhere.kernel(body, X, declared, threads={"wg": 2}, **options)


@pytest.mark.parametrize("steps", [STEPS, None], ids=["static", "traced"])
@pytest.mark.parametrize("stages", [1, 2, 8])
@pytest.mark.parametrize("complete", [False, True])
def test_each_step_has_a_slot(steps, stages, complete):
    ring = plgpu.Ring.of(rows(stages), initially_complete=complete)
    args = np.array([STEPS], np.int32), X
    everywhere.check(doubled(ring, steps), args, X * 2)


def test_a_step_may_be_of_another_integer_type():
    args = np.array([STEPS], np.int32), X
    everywhere.check(doubled(plgpu.Ring.of(rows()), dtype=jnp.uint32), args, X * 2)


def test_one_warpgroup_fills_and_reads_a_ring_without_empty_barriers():
    def body(x, o, ring):
        def copy(i):
            slot = ring.fill(i)
            plgpu.copy_gmem_to_smem(x.at[i], slot.buffers, slot.full)

        copy(0)
        copy(1)

        @plgpu.loop(0, STEPS)
        def _(i):
            o[i] = ring.take(i).buffers[...] * 2
            plgpu.commit_smem()
            plgpu.when(i + 2 < STEPS)(lambda: copy(i + 2))

    ring = plgpu.Ring(rows(), None, plgpu.Barrier(num_barriers=2))
    everywhere.check(everywhere.kernel(body, X, ring), (X,), X * 2)


def shared(x, o, ring):
    """Two CTAs copy a half of each block to both, and store their own half."""
    cta = lax.axis_index("c")

    def produce():
        @plgpu.loop(0, STEPS)
        def _(i):
            slot = ring.fill(i)
            plgpu.copy_gmem_to_smem(
                x.at[i], slot.buffers, slot.full, collective_axes="c"
            )

        ring.drain(STEPS)

    def consume():
        @plgpu.loop(0, STEPS)
        def _(i):
            o[i, cta] = ring.take(i).buffers[cta] * 2
            ring.release(i)

    roles(produce, consume)


def test_a_cluster_fills_the_rings_of_all():
    ring = plgpu.Ring.of(rows(), collective_axes="c")
    make = everywhere.kernel(shared, X, ring, cluster={"c": 2}, threads={"wg": 2})
    everywhere.check(make, (X,), X * 2)


def product(steps, accumulators=1):
    """The products of a left operand with each of the right ones."""

    def tiles(*shape):
        return plgpu.SMEM((2, *shape), jnp.float16, transforms=TILING)

    def body(n, a, b, *refs):
        *out, ring = refs
        count = n[0] if steps is None else steps

        def produce():
            @plgpu.loop(0, count)
            def _(i):
                slot, depth = ring.fill(i), plgpu.ds(i * 64, 64)
                left, *right = slot.buffers
                plgpu.copy_gmem_to_smem(a.at[:, depth], left, slot.full)
                for j, buffer in enumerate(right):
                    plgpu.copy_gmem_to_smem(b.at[j, depth], buffer, slot.full)

        def multiply(i, slot, accs):
            left, *right = slot.buffers
            for acc, buffer in zip(accs, right, strict=True):
                plgpu.wgmma(acc, left, buffer)

        def accumulate(*accs):
            return ring.accumulate(
                accs,
                count,
                lambda i, slot: multiply(i, slot, accs),
                may_be_empty=steps is None,
            )

        def consume():
            acc = plgpu.ACC((64, 64))
            for o, part in zip(
                out, plgpu.run_scoped(accumulate, *[acc] * accumulators), strict=True
            ):
                o[...] = part

        roles(produce, consume)

    declared = plgpu.Ring.of([tiles(64, 64), *[tiles(64, 64)] * accumulators])
    out = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * accumulators
    return everywhere.kernel(body, out, declared, threads={"wg": 2})


def small(*shape):
    """Small integers, whose products are exact."""
    return np.random.default_rng(1).integers(-4, 5, shape).astype(np.float16)


@pytest.mark.parametrize(
    ("steps", "given", "accumulators"),
    [(3, 3, 1), (3, 3, 2), (0, 0, 1), (None, 3, 1), (None, 0, 1)],
)
def test_the_slot_of_a_product_is_released_a_step_later(steps, given, accumulators):
    a, b = small(64, 192), small(accumulators, 192, 64)
    depth = given * 64
    expected = [
        a[:, :depth].astype(np.float32) @ right[:depth].astype(np.float32)
        for right in b
    ]
    args = np.array([given], np.int32), a, b
    everywhere.check(product(steps, accumulators), args, expected)


def test_the_kernel_of_the_page_adds_tiles():
    text = (ROOT / "docs" / "ring.md").read_text(encoding="utf-8")
    block = re.search(r"^```python whole\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    names = {"plgpu": plgpu, "jax": jax, "jnp": jnp}
    exec(block[1], names)
    np.testing.assert_array_equal(names["y"], 5.0)


# --- refused --------------------------------------------------------------------------


@refused
def test_a_declaration_has_no_slots():
    plgpu.Ring.of(rows()).fill(0)  # HERE


@refused
def test_buffers_of_different_numbers_of_slots():
    plgpu.Ring.of((rows(2), rows(3)))


@refused
def test_no_buffers():
    plgpu.Ring.of(())


@pytest.mark.parametrize("step", [1.5, -1])
@refused
def test_a_step_that_is_not_a_number_of_one(step):
    def body(x, o, ring):
        ring.take(step)  # HERE

    jax.eval_shape(everywhere.kernel(body, X, plgpu.Ring.of(rows()))(), X)


def declared(**options):
    return [plgpu.Ring.of(rows(), **o) for o in ({}, options)]


GOOD = {
    "Ring": top(buffers=rows(), empty=plgpu.Barrier(), full=plgpu.Barrier()),
    "Ring.of": top(buffers=rows()),
}
EFFECTS = {
    "Ring.of.copies": lambda: declared(copies=2),
    "Ring.of.consumers": lambda: declared(consumers=2),
    "Ring.of.collective_axes": "test_a_cluster_fills_the_rings_of_all",
    "Ring.of.initially_complete": "test_each_step_has_a_slot",
}
