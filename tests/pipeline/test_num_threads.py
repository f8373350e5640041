# SPDX-License-Identifier: Apache-2.0
"""pallas_call with several warpgroups in a block."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from benchmarks import pipelines
from tests.support import everywhere
from tests.support.entry_kernels import f32, numbers
from tests.support.refusal import refused, refused_by

ROWS = plgpu.BlockSpec((8, 128), lambda i: (i, 0))
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def called(body, out=None, *, threads=2, semantics=("parallel",), depth=2, **options):
    """Returns what `everywhere.check` takes."""

    def make(interpret):
        return plgpu.pallas_call(
            body, out or f32(), num_threads=threads, thread_name="wg",
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(
                dimension_semantics=semantics, max_concurrent_steps=depth
            ),
            **({"grid": 8, "in_specs": [ROWS], "out_specs": ROWS} | options),
        )  # fmt: skip

    return make


def own_rows(threads=2):
    count = 8 // threads
    return plgpu.ds(lax.axis_index("wg") * count, count)


def double(x, o):
    o[own_rows()] = x[own_rows()] * 2


def small(*shape):
    values = np.random.default_rng(0).integers(-4, 5, shape)
    return values.astype(np.float16)


def product(interpret=None, threads=2, depth=3, delay=1, m=256, n=128, k=256, **params):
    """The warpgroups, or the only one, multiply 64 rows each of a block's tile."""
    rows = 64 * (threads or 1)

    def body(a, b, o, acc):
        mine = plgpu.ds(0 if threads is None else lax.axis_index("wg") * 64, 64)
        plgpu.wgmma(acc, a.at[mine], b)
        plgpu.wgmma_wait(delay)

        @plgpu.when(plgpu.program_id(2) == plgpu.num_programs(2) - 1)
        def _():
            o[mine] = acc[...]

    def spec(shape, index_map):
        return plgpu.BlockSpec(
            shape, index_map, transforms=TRANSFORMS, delay_release=delay
        )

    return plgpu.pallas_call(
        body, f32(m, n), grid=(m // rows, n // 64, k // 64), interpret=interpret,
        num_threads=threads, thread_name=threads and "wg",
        in_specs=[
            spec((rows, 64), lambda i, j, ki: (i, ki)),
            spec((64, 64), lambda i, j, ki: (ki, j)),
        ],
        out_specs=plgpu.BlockSpec((rows, 64), lambda i, j, ki: (i, j)),
        scratch_shapes=[plgpu.ACC((64, 64))],
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            max_concurrent_steps=depth, **params,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("semantics", ["parallel", "arbitrary"])
def test_all_warpgroups_run_the_body_at_each_step(semantics):
    make = called(double, semantics=(semantics,))
    everywhere.check(make, [numbers()], numbers() * 2)


@pytest.mark.parametrize(
    ("threads", "depth", "delay"),
    [(2, 1, 0), (2, 2, 1), (2, 5, 1), (None, 1, 0), (None, 4, 0)],
)
def test_a_product_loops_over_k(threads, depth, delay):
    a, b = small(256, 256), small(256, 128)
    everywhere.check(
        lambda interpret: product(interpret, threads, depth, delay),
        [a, b], a.astype(np.float32) @ b.astype(np.float32),
    )  # fmt: skip


def test_a_product_is_right_in_every_order_of_the_warpgroups():
    a, b = small(256, 256), small(256, 128)
    call = product(interpret=plgpu.InterpretParams(schedules=6))
    np.testing.assert_array_equal(
        call(a, b), a.astype(np.float32) @ b.astype(np.float32)
    )


def test_the_memory_warpgroup_is_added_for_a_sequential_axis_and_keeps_few_registers():
    (report,) = plgpu.offline.lower(product(), small(256, 256), small(256, 128))
    assert "setmaxregister decrease 40" in report.mlir
    assert "setmaxregister increase 232" in report.mlir
    (report,) = plgpu.offline.lower(called(double)(None), numbers())
    assert "setmaxregister" not in report.mlir


def test_one_warpgroup_with_a_name_has_a_memory_warpgroup_too():
    def body(x, o):
        o[...] = x[...] + lax.axis_index("wg").astype(jnp.float32)

    make = called(body, threads=1, semantics=("arbitrary",))
    everywhere.check(make, [numbers()], numbers())


def test_scratch_in_smem_is_shared_and_keeps_its_contents():
    """Each warpgroup adds to its half; the other one reads both at the last step."""

    def body(x, o, total, meet):
        wg, i = lax.axis_index("wg"), plgpu.program_id(0)

        @plgpu.when(i == 0)
        def _():
            total[own_rows()] = jnp.zeros((4, 128), jnp.float32)

        total[own_rows()] += x[own_rows()]

        @plgpu.when(i == plgpu.num_programs(0) - 1)
        def _():
            plgpu.barrier_arrive(meet)
            plgpu.barrier_wait(meet)
            theirs = plgpu.ds((1 - wg) * 4, 4)
            o[theirs] = total[theirs]

    make = called(
        body, f32(8, 128), semantics=("arbitrary",),
        out_specs=plgpu.BlockSpec((8, 128), lambda i: (0, 0)),
        scratch_shapes={
            "total": plgpu.SMEM((8, 128), jnp.float32),
            "meet": plgpu.Barrier(num_arrivals=2),
        },
    )  # fmt: skip
    everywhere.check(make, [numbers()], numbers().reshape(8, 8, 128).sum(0))


@pytest.mark.offline
@pytest.mark.parametrize("row", pipelines.THREADED[::3])
def test_products_stay_asynchronous_and_nothing_spills(row):
    """The loop over k waits for a buffer and for the product before, no more."""
    m, n, k = 4096, 8192, 4096
    call = pipelines.threaded_matmul(m, n, k, *row)
    a, b = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, k), (k, n)))
    (report,) = plgpu.offline.compile(call, a, b)
    # ptxas remarks where it has to wait for a product by itself.
    assert report.resources.remarks == ()
    assert report.resources.spill_store_bytes == 0
    assert report.resources.spill_load_bytes == 0
    step = report.ptx.split("wgmma.commit_group")[1]
    step = step.partition("bra.uni")[0]
    waits = re.findall(r"wgmma.wait_group.sync.aligned\s+(\d)", step)
    assert waits == ["1", "0"]
    assert "wgmma.fence" not in step
    assert "cp.async.bulk.wait_group.read" in report.ptx


@pytest.mark.parametrize("shape", [(64, 128), (64, 3)])
def test_results_may_be_pytrees_and_blocks_in_gmem(shape):
    """Rows of three elements: 12 bytes, which TMA does not address."""

    def body(pair, o, p):
        mine = own_rows()
        o[mine] = pair["x"][mine] + pair["y"][mine]
        p[mine] = pair["x"][mine] - pair["y"][mine]

    spec = plgpu.BlockSpec((8, shape[1]), lambda i: (i, 0))
    make = called(
        body, (f32(*shape), f32(*shape)), semantics=("arbitrary",),
        in_specs=[{"x": spec, "y": spec}], out_specs=(spec, spec),
    )  # fmt: skip
    x, y = numbers(*shape), numbers(*shape) * 2
    got = make(None)({"x": x, "y": y})
    np.testing.assert_array_equal(got[0], x + y)
    np.testing.assert_array_equal(got[1], x - y)


def test_an_array_that_index_maps_read_is_read_by_the_memory_warpgroup():
    order = np.array([3, 0, 7, 1, 2, 6, 5, 4], np.int32)
    spec = plgpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(8,),
        in_specs=[plgpu.BlockSpec((8, 128), lambda i, order: (order[i], 0))],
        out_specs=plgpu.BlockSpec((8, 128), lambda i, _: (i, 0)),
    )  # fmt: skip

    def make(interpret):
        return plgpu.pallas_call(
            lambda _, x, o: double(x, o), f32(), grid_spec=spec,
            num_threads=2, thread_name="wg", interpret=interpret,
            compiler_params=plgpu.CompilerParams(
                dimension_semantics=["arbitrary"], max_concurrent_steps=2
            ),
        )  # fmt: skip

    expected = numbers().reshape(8, 8, 128)[order].reshape(64, 128) * 2
    everywhere.check(make, [order, numbers()], expected)


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threads", "axis"), [(2, None), (None, "wg"), (0, "wg"), (8, "wg")]
)
@refused
def test_the_warpgroups_have_a_name_and_room_for_the_memory_warpgroup(threads, axis):
    plgpu.pallas_call(double, f32(), num_threads=threads, thread_name=axis)  # HERE


@refused_by(lambda body: called(body, semantics=("arbitrary",))(None)(numbers()))
def test_two_warpgroups_that_store_the_same_elements_are_a_race(x, o):
    """A store of the whole block by both warpgroups is a race."""

    o[...] = x[...] + lax.axis_index("wg").astype(jnp.float32)
