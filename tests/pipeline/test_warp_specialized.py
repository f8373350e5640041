# SPDX-License-Identifier: Apache-2.0
"""emit_pipeline_warp_specialized: products, shared outputs, barriers, sequences."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.pipeline.team import compute_registers
from tests.support import everywhere
from tests.support.entry_kernels import f32, numbers
from tests.support.refusal import refused

ROWS = plgpu.BlockSpec((8, 128), lambda i: (i, 0))
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
Specialized = functools.partial(
    plgpu.emit_pipeline_warp_specialized, wg_axis="wg", memory_registers=40
)


def launched(body, out, *, consumers=1, **options):
    """Returns what `everywhere.check` takes."""
    return everywhere.kernel(body, out, threads={"wg": consumers + 1}, **options)


def pipelined(step, *, consumers=1, out=None, **options):
    """A kernel that is one pipeline."""
    pipeline = Specialized(
        step, num_compute_wgs=consumers,
        **({"grid": (8,), "in_specs": [ROWS], "out_specs": [ROWS]} | options),
    )  # fmt: skip
    return launched(lambda *refs: pipeline(*refs), out or f32(), consumers=consumers)


def small(*shape):
    """Small integers, whose products are exact."""
    values = np.random.default_rng(0).integers(-4, 5, shape)
    return values.astype(np.float16)


def copy(_, x, o):  # HERE
    o[...] = x[...]


def own_half(wg):
    return plgpu.ds(wg * 4, 4)


# --- steps ----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3, 11])
def test_one_warpgroup_computes_while_another_copies(depth):
    def step(indices, x, o):
        o[...] = x[...] + indices[0].astype(jnp.float32)

    make = pipelined(step, max_concurrent_steps=depth)
    rows = np.repeat(np.arange(8, dtype=np.float32), 8)[:, None]
    everywhere.check(make, [numbers()], numbers() + rows)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_warpgroups_that_compute_share_the_blocks_of_outputs(depth):
    def step(_, x, o):
        half = own_half(lax.axis_index("wg"))
        o[half] = x[half] * 2

    make = pipelined(step, consumers=2, max_concurrent_steps=depth)
    everywhere.check(make, [numbers()], numbers() * 2)


@pytest.mark.parametrize("memory", [0, 1, 2])
def test_any_warpgroup_can_be_the_one_that_copies(memory):
    def step(_, x, o):
        wg = lax.axis_index("wg")
        half = own_half(wg - (wg > memory).astype(jnp.int32))
        o[half] = x[half] * 2

    make = pipelined(step, consumers=2, memory_thread_idx=memory)
    everywhere.check(make, [numbers()], numbers() * 2)


@pytest.mark.parametrize(("consumers", "memory"), [(1, 40), (2, 48), (4, 40)])
def test_registers_are_divided_so_that_all_warpgroups_start(consumers, memory):
    def step(_, x, o):
        count = 8 // consumers
        part = plgpu.ds(lax.axis_index("wg") * count, count)
        o[part] = x[part] * 2

    make = pipelined(step, consumers=consumers, memory_registers=memory)
    everywhere.check(make, [numbers()], numbers() * 2)


def test_shared_outputs_are_stored_when_their_block_is_complete():
    """One output's block changes every two steps, another's never."""

    def step(indices, x, o, total):
        half = own_half(lax.axis_index("wg"))

        @plgpu.when(indices[1] == 0)
        def _():
            o[half] = jnp.zeros((4, 128), o.dtype)

        @plgpu.when(indices[0] + indices[1] == 0)
        def _():
            total[half] = jnp.zeros((4, 128), o.dtype)

        o[half] += x[half]
        total[half] += x[half]

    make = pipelined(
        step, consumers=2, grid=(4, 2), out=(f32(32, 128), f32(8, 128)),
        in_specs=[plgpu.BlockSpec((8, 128), lambda i, j: (i * 2 + j, 0))],
        out_specs=[
            plgpu.BlockSpec((8, 128), lambda i, j: (i, 0)),
            plgpu.BlockSpec((8, 128), lambda i, j: (0, 0)),
        ],
    )  # fmt: skip
    blocks = numbers().reshape(4, 2, 8, 128)
    expected = blocks.sum(1).reshape(32, 128), blocks.sum((0, 1))
    everywhere.check(make, [numbers()], expected)


def test_inputs_may_be_pytrees_constant_and_in_gmem():
    fixed = plgpu.BlockSpec((8, 128), lambda i: (0, 0))
    whole = plgpu.BlockSpec(memory_space=plgpu.GMEM)

    def step(indices, x, pair, o):
        o[...] = x[...] * pair["fixed"][...] + pair["whole"][plgpu.ds(0, 8)]

    pipeline = Specialized(
        step, grid=(8,), num_compute_wgs=1, out_specs=[ROWS],
        in_specs=[ROWS, {"fixed": fixed, "whole": whole}],
    )  # fmt: skip
    make = launched(lambda x, y, z, o: pipeline(x, {"fixed": y, "whole": z}, o), f32())
    y, z = numbers(8, 128), numbers()
    expected = numbers() * np.tile(y, (8, 1)) + np.tile(z[:8], (8, 1))
    everywhere.check(make, [numbers(), y, z], expected)


def fixed_output(grid):
    """Two pipelines in sequence that write the same buffers of outputs."""

    def step(_, x, o):
        half = own_half(lax.axis_index("wg"))
        o[half] = x[half]

    def pipeline(part):
        return Specialized(
            step, grid=grid, num_compute_wgs=2, in_specs=[ROWS],
            out_specs=[plgpu.BlockSpec((8, 128), lambda i: (part, 0))],
        )  # fmt: skip

    def body(x, o):
        def scoped(allocations):
            for part in range(2):
                pipeline(part)(x, o, allocations=allocations)

        plgpu.run_scoped(
            scoped, pipeline(0).get_allocations(x, o), collective_axes="wg"
        )

    return launched(body, f32(16, 128), consumers=2)


@pytest.mark.parametrize("steps", [1, 3])
def test_buffers_of_shared_outputs_are_free_when_a_pipeline_returns(steps):
    last = numbers()[8 * steps - 8 : 8 * steps]
    make = fixed_output((steps,))
    everywhere.check(make, [numbers()], np.tile(last, (2, 1)))
    kernel = make(plgpu.InterpretParams(schedules=12))
    np.testing.assert_array_equal(kernel(numbers()), np.tile(last, (2, 1)))


@pytest.mark.parametrize("memory", [24, 32, 40, 48, 64])
@pytest.mark.parametrize("consumers", range(1, 6))
def test_warpgroups_share_the_registers_of_their_block(consumers, memory):
    """`setmaxnreg.inc` would wait for ever for more than the launch has."""
    launch = 65536 // (128 * (consumers + 1)) // 8 * 8
    asked = compute_registers("a pipeline", consumers, memory)
    assert memory + consumers * asked <= launch * (consumers + 1)
    assert min(launch, 256) <= asked <= 256


# --- products -------------------------------------------------------------------------


def product(*, consumers=2, delay=0, cluster=None, k=256, **options):
    """Two warpgroups multiply halves of 128 rows; the carry counts the steps."""
    spec = functools.partial(
        plgpu.BlockSpec, transforms=TRANSFORMS, delay_release=delay
    )

    def body(a, b, o):
        wg, column = lax.axis_index("wg"), 0
        rows = plgpu.ds(wg * 64, 64)
        if cluster:
            column = lax.axis_index("c")
        cell = []

        def context(pipeline):
            def scoped(acc):
                cell.append(acc)
                steps = pipeline(jnp.int32(0))
                total = acc[...] + (steps - k // 64).astype(jnp.float32)
                o[rows, plgpu.ds(column * 64, 64)] = total

            plgpu.run_scoped(scoped, plgpu.ACC((64, 64)))

        def step(indices, a_block, b_block, *barriers_and_carry):
            *barriers, carry = barriers_and_carry
            if options.get("manual_produced_barriers"):
                for barrier in barriers[:2]:
                    plgpu.barrier_wait(barrier)
            plgpu.wgmma(cell[0], a_block.at[rows], b_block)
            plgpu.wgmma_wait(delay)
            if options.get("manual_consumed_barriers"):
                for barrier in barriers[-2:]:
                    plgpu.barrier_arrive(barrier, predicate=indices[0] >= delay)
            return carry + 1

        Specialized(
            step, grid=(k // 64,), num_compute_wgs=consumers, max_concurrent_steps=3,
            in_specs=[
                spec((128, 64), lambda k: (0, k), collective_axes=cluster),
                spec((64, 64), lambda k: (k, column)),
            ],
            compute_context=context, **options,
        )(a, b)  # fmt: skip

    return body


def check_product(**options):
    a, b = small(128, 256), small(256, 64)
    make = launched(product(**options), f32(128, 64), consumers=2)
    everywhere.check(make, [a, b], a.astype(np.float32) @ b.astype(np.float32))


@pytest.mark.parametrize("delay", [0, 1])
def test_a_product_carries_through_a_context(delay):
    check_product(delay=delay)


@pytest.mark.parametrize("produced", [False, True])
@pytest.mark.parametrize("consumed", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_a_body_may_wait_and_release_by_itself(produced, consumed, delay):
    check_product(
        manual_produced_barriers=produced, manual_consumed_barriers=consumed,
        delay=delay,
    )  # fmt: skip


RELEASES = {
    "fewer steps than the delay": {"steps": 2, "delays": (3, 3), "depth": 4},
    "one step": {"steps": 1, "delays": (1, 1)},
    "no step": {"steps": 0, "delays": (1, 1)},
    "different delays": {"delays": (0, 2)},
    "a number of steps known at run time only": {"traced": True, "delays": (1, 2)},
    "two warpgroups": {"delays": (1, 1), "consumers": 2},
    "a sequence of pipelines": {"steps": 4, "delays": (1, 2), "parts": 2},
    "a cluster": {"steps": 4, "delays": (1, 2), "parts": 2, "cluster": (2,)},
}


def released(
    *, delays, steps=8, depth=3, consumers=1, parts=1, traced=False, cluster=()
):
    """A body that releases blocks of two inputs; a CTA of a cluster has its result."""

    def body(count, x, y, o):
        o = o.at[lax.axis_index("c")] if cluster else o
        count = count[0] if traced else steps

        def pipeline(part):
            def step(indices, x, y, *consumed):
                row = (part * steps + indices[0]) * 8
                rows = (
                    own_half(lax.axis_index("wg")) if consumers > 1 else plgpu.ds(0, 8)
                )
                o[plgpu.ds(row + rows.start, rows.size)] = x[rows] + y[rows]
                for barrier, delay in zip(consumed, delays, strict=True):
                    plgpu.barrier_arrive(barrier, predicate=indices[0] >= delay)

            specs = [
                plgpu.BlockSpec(
                    (8, 128), lambda i: (part * steps + i, 0), delay_release=delay,
                    collective_axes=("c",) if cluster else None,
                )
                for delay in delays
            ]  # fmt: skip
            return Specialized(
                step, grid=(count,), in_specs=specs, max_concurrent_steps=depth,
                manual_consumed_barriers=True, num_compute_wgs=consumers,
            )  # fmt: skip

        def scoped(allocations):
            for part in range(parts):
                pipeline(part)(x, y, allocations=allocations)

        allocations = pipeline(0).get_allocations(x, y)
        plgpu.run_scoped(scoped, allocations, collective_axes="wg")

    names = {"cluster": cluster, "cluster_names": ("c",)} if cluster else {}
    return launched(body, f32(*cluster, 64, 128), consumers=consumers, **names)


@pytest.mark.parametrize("options", RELEASES.values(), ids=RELEASES)
def test_a_delayed_release_is_that_of_an_earlier_step(options):
    """Those of the last steps are the pipeline's own."""
    rows = 8 * options.get("steps", 8) * options.get("parts", 1)
    args = [np.array([8], np.int32), numbers(), numbers() + 1]
    make = released(**options)
    shape = (*options.get("cluster", ()), rows, 128)
    expected = np.broadcast_to(2 * numbers()[:rows] + 1, shape)
    kernel = make(plgpu.InterpretParams(schedules=6, partial_results=True))
    np.testing.assert_array_equal(kernel(*args)[..., :rows, :], expected)
    if rows == 64:
        everywhere.check(make, args, expected)


def test_a_cluster_shares_a_block_by_multicast():
    a, b = small(128, 256), small(256, 128)
    make = launched(
        product(cluster=("c",)), f32(128, 128), consumers=2,
        cluster=(2,), cluster_names=("c",),
    )  # fmt: skip
    everywhere.check(make, [a, b], a.astype(np.float32) @ b.astype(np.float32))


@refused
def test_a_deadlock_of_a_pipeline_has_a_line():
    """A body that never releases its buffers."""
    make = pipelined(
        lambda _, x, o, free: o.__setitem__(..., x[...]), manual_consumed_barriers=True
    )
    make(plgpu.InterpretParams())(numbers())


# --- sequences ------------------------------------------------------------------------

START, STEADY, STOP = plgpu.PipelinePipeline


def sequence(states, *, depth=2, rows=8, cluster=(), **of_spec):
    """Pipelines over consecutive quarters of the rows, with the same buffers.

    Each CTA of a cluster receives the blocks by multicast and has an own result.
    """
    steps = 16 // rows

    def body(x, parts, o):
        o = o.at[lax.axis_index("c")] if cluster else o

        def pipeline(state, part):
            def step(indices, x_block, parts):
                row = (part * steps + indices[0]) * rows
                o[plgpu.ds(row, rows)] = x_block[...] + parts[...]

            spec = plgpu.BlockSpec(
                (rows, 128), lambda i: (part * steps + i, 0),
                collective_axes=("c",) if cluster else (), **of_spec,
            )  # fmt: skip
            constant = plgpu.BlockSpec((rows, 128), lambda i: (part * steps, 0))
            return Specialized(
                step, grid=(steps,), num_compute_wgs=1, in_specs=[spec, constant],
                max_concurrent_steps=depth, pipeline_state=state,
            )  # fmt: skip

        def scoped(allocations):
            for part, state in enumerate(states):
                pipeline(state, part)(x, parts, allocations=allocations)

        allocations = pipeline(None, 0).get_allocations(x, parts)
        plgpu.run_scoped(scoped, allocations, collective_axes="wg")

    if not cluster:
        return launched(body, f32())
    out = f32(*cluster, 64, 128)
    return launched(body, out, cluster=cluster, cluster_names=("c",))


PARTS = np.repeat(np.arange(4, dtype=np.float32), 16 * 128).reshape(64, 128)


@pytest.mark.parametrize("cluster", [(), (2,)])
@pytest.mark.parametrize(
    "states", [(None,) * 4, (START, STEADY, STEADY, STOP), (START, STOP, START, STOP)]
)
def test_pipelines_follow_each_other_with_the_same_buffers(states, cluster):
    expected = np.broadcast_to(numbers() + PARTS, (*cluster, 64, 128))
    everywhere.check(sequence(states, cluster=cluster), [numbers(), PARTS], expected)


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 3},
        {"depth": 1},
        {"depth": 3, "delay_release": 1},
        {"depth": 3, "rows": 4, "cluster": (2,)},
        {"depth": 3, "rows": 4, "cluster": (2,), "delay_release": 1},
    ],
)
def test_their_steps_need_not_fill_the_buffers(options):
    make = sequence((START, STEADY, STEADY, STOP), **options)
    cluster = options.get("cluster", ())
    expected = np.broadcast_to(numbers() + PARTS, (*cluster, 64, 128))
    everywhere.check(make, [numbers(), PARTS], expected)


def test_a_state_may_be_known_at_run_time_only():
    def body(x, o):
        def pipeline(state, part):
            def step(indices, x_block):
                row = (part * 2 + indices[0]) * 8
                o[plgpu.ds(row, 8)] = x_block[...] * 2

            spec = plgpu.BlockSpec((8, 128), lambda i: (part * 2 + i, 0))
            return Specialized(
                step, grid=(2,), num_compute_wgs=1, in_specs=[spec],
                pipeline_state=state,
            )  # fmt: skip

        def scoped(allocations):
            @plgpu.loop(0, 4)
            def _(part):
                state = jnp.where(part == 0, START, jnp.where(part == 3, STOP, STEADY))
                pipeline(state, part)(x, allocations=allocations)

        plgpu.run_scoped(
            scoped, pipeline(None, 0).get_allocations(x), collective_axes="wg"
        )

    everywhere.check(launched(body, f32()), [numbers()], numbers() * 2)


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [None, 0])
@refused
def test_a_sequence_with_multicasts_needs_steps_that_use_all_buffers(steps):
    def body(x, o):
        count = x[0, 0].astype(jnp.int32) if steps is None else steps
        spec = plgpu.BlockSpec((8, 128), lambda i: (i, 0), collective_axes=("c",))
        pipeline = Specialized(
            lambda *_: None, grid=(count,), num_compute_wgs=1, in_specs=[spec],
            pipeline_state=START,
        )  # fmt: skip
        plgpu.run_scoped(
            lambda allocations: pipeline(x, allocations=allocations),
            pipeline.get_allocations(x), collective_axes="wg",
        )  # fmt: skip

    make = launched(body, f32(), cluster=(2,), cluster_names=("c",))
    jax.eval_shape(make(None), numbers())


@pytest.mark.parametrize(
    "other",
    [
        {"grid": (2,)},
        {"max_concurrent_steps": 2},
        {"in_specs": [plgpu.BlockSpec((16, 128), lambda i: (i, 0))]},
    ],
)
@refused
def test_allocations_of_another_pipeline_are_refused(other):
    def make(**options):
        defaults = {"grid": (8,), "in_specs": [ROWS], "max_concurrent_steps": 4}
        defaults["num_compute_wgs"] = 1
        return Specialized(lambda _, x: None, **(defaults | options))

    def body(x, o):
        plgpu.run_scoped(
            lambda allocations: make()(x, allocations=allocations),
            make(**other).get_allocations(x), collective_axes="wg",
        )  # fmt: skip

    jax.eval_shape(launched(body, f32())(None), numbers())


def fixed(**options):
    return [plgpu.BlockSpec((8, 128), lambda i: (0, 0), **options)]  # HERE


# Options of a pipeline whose one compute warpgroup copies blocks of rows.
MISTAKES = {
    "a sequence without allocations": {"pipeline_state": START},
    "an unknown state": {"pipeline_state": 7},
    "more warpgroups than the kernel has": {"num_compute_wgs": 2},
    "more registers than the share of a warpgroup": {"memory_registers": 264},
    "a memory warpgroup outside of the block": {"memory_thread_idx": 3},
    "a result that is released late": {"out_specs": fixed(delay_release=1)},
    "a result of a cluster": {"out_specs": fixed(collective_axes=("c",))},
    "an argument of no cluster": {"in_specs": fixed(collective_axes=("c",))},
    "a context that runs nothing": {"compute_context": lambda pipeline: None},  # HERE
}


@pytest.mark.parametrize("options", MISTAKES.values(), ids=MISTAKES)
@refused
def test_a_pipeline_that_does_not_fit_its_kernel_is_refused(options):
    options = {"num_compute_wgs": 1, "in_specs": [ROWS], "out_specs": [ROWS]} | options

    def body(*refs):  # HERE
        Specialized(copy, grid=(8,), max_concurrent_steps=2, **options)(*refs)  # HERE

    jax.eval_shape(launched(body, f32())(None), numbers())


@refused
def test_a_wait_in_a_pipeline_has_the_line_of_what_runs_the_pipeline():
    def context(pipeline):
        pipeline(jnp.int32(0))  # HERE

    def never_released(_, x, o, barrier, carry):
        o[...] = x[...]
        return carry

    body = pipelined(
        never_released, compute_context=context, manual_consumed_barriers=True,
        max_concurrent_steps=2,
    )  # fmt: skip
    body(None)(numbers())


EFFECTS = {
    f"emit_pipeline_warp_specialized.{name}": test
    for name, test in {
        "in_specs": "test_one_warpgroup_computes_while_another_copies",
        "out_specs": "test_warpgroups_that_compute_share_the_blocks_of_outputs",
        "max_concurrent_steps": "test_one_warpgroup_computes_while_another_copies",
        "pipeline_state": "test_pipelines_follow_each_other_with_the_same_buffers",
        "manual_produced_barriers": "test_a_body_may_wait_and_release_by_itself",
        "manual_consumed_barriers": "test_a_body_may_wait_and_release_by_itself",
        "compute_context": "test_a_product_carries_through_a_context",
        "memory_thread_idx": "test_any_warpgroup_can_be_the_one_that_copies",
    }.items()
}
