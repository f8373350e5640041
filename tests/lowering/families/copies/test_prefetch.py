# SPDX-License-Identifier: Apache-2.0
"""Prefetches to L2: they change no result, and their boxes cover the part."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import layouts
from pallas_gpu.layouts.window import Window
from tests.support import everywhere, tma_copies
from tests.support.features.row import OMISSIONS, Row
from tests.support.refusal import refused_by
from tests.support.semantics import BOTH, under

F32 = jnp.float32
SCRATCH = plgpu.SMEM((16, 32), F32), plgpu.Barrier()


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def kernel(prefetch, **mesh):
    """Each step fetches what the next one copies; each CTA has a result."""
    ctas = 2 if "cluster" in mesh else 1

    def body(x, o, tile, full):
        cta = lax.axis_index("c") if ctas > 1 else 0
        for step in range(3):
            rows = plgpu.ds(16 * step, 16)
            prefetch(x.at[plgpu.ds(16 * (step + 1), 16)])
            plgpu.copy_gmem_to_smem(x.at[rows], tile, full)
            plgpu.barrier_wait(full)
            o[cta, rows] = tile[...] + 1

    return everywhere.kernel(body, numbers(ctas, 48, 32), *SCRATCH, **mesh)


CLUSTER = {"cluster": {"c": 2}}
PARTITIONED = plgpu.CopyPartition.PARTITIONED
CASES = {
    "alone": ({}, {}),
    "predicate": ({"predicate": np.bool_(True)}, {}),
    "skipped": ({"predicate": np.bool_(False)}, {}),
    "shared": ({"collective_axes": "c"}, CLUSTER),
    "halves": ({"collective_axes": "c", "leader_tracked": PARTITIONED(1)}, CLUSTER),
    "replicated": (
        {"collective_axes": "c", "leader_tracked": plgpu.CopyPartition.REPLICATED},
        CLUSTER,
    ),
    "older spelling": ({"collective_axes": "c", "partitioned_axis": 0}, CLUSTER),
}


@pytest.mark.parametrize("case", CASES)
def test_results_do_not_depend_on_it(case):
    options, mesh = CASES[case]
    x = numbers(48, 32)
    make = kernel(lambda part: plgpu.async_prefetch(part, **options), **mesh)
    everywhere.check(make, [x], np.stack([x + 1] * (2 if mesh else 1)))


@everywhere.gives([numbers(48, 32)], lambda x: x[None] + 1, by=kernel)
def test_a_warp_fetches_too(part):
    @plgpu.warp_map
    def _(warp):
        @plgpu.when(warp == 1)
        def _():
            plgpu.async_prefetch(part)


@pytest.mark.parametrize(
    ("array", "sizes"), [((64, 64), (10, 32)), ((3, 700, 64), (1, 700, 64))]
)
def test_the_boxes_cover_the_part(array, sizes):
    window = Window.whole(array).slice((0,) * len(array), sizes)
    plan = layouts.plan_prefetch(window, 32)
    x = np.arange(np.prod(array), dtype=np.float32).reshape(array)
    part = x[tuple(slice(n) for n in sizes)]
    fetched = tma_copies.load(plan, x, window.starts).view(np.float32)
    np.testing.assert_array_equal(np.sort(fetched), np.sort(part.reshape(-1)))


TRACED = [numbers(48, 32)], numbers(48, 32), *SCRATCH


def odd_rows(x, y, o):
    plgpu.async_prefetch(x.at[4, :64])
    plgpu.async_prefetch(y)
    o[...] = x[4, :64] + 1


def test_adjacent_bytes_are_fetched_that_no_tensor_map_describes():
    x = numbers(6, 65)
    everywhere.run(odd_rows, [x, numbers(4, 257)], x[4, :64] + 1)


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_adjacent_bytes_need_no_descriptor(semantics):
    make = everywhere.kernel(odd_rows, numbers(64))
    args = numbers(6, 65), numbers(4, 257)
    (report,) = plgpu.offline.compile(under(semantics, make()), *args)
    assert report.ptx.count("cp.async.bulk.prefetch.L2.global [") == 2


@refused_by(everywhere.emulate, *TRACED, grid={"i": 1})
def test_a_dynamic_start_is_checked_by_the_emulator(x, o, tile, full):
    first = 2 * lax.axis_index("i") + 2
    plgpu.async_prefetch(x.at[:, plgpu.ds(first, 16)])  # HERE


WRONG = {
    "SMEM": lambda x, tile: plgpu.async_prefetch(tile),
    "rows of 12 bytes": lambda x, _: plgpu.async_prefetch(x.at[:, 0:3]),
    "a start at 8 bytes": lambda x, _: plgpu.async_prefetch(x.at[:, 2:18]),
    "axes of no cluster": lambda x, _: plgpu.async_prefetch(x, collective_axes="c"),
}


@pytest.mark.parametrize("name", WRONG)
@refused_by(everywhere.emulate, *TRACED)
def test_what_cannot_be_fetched_is_refused(x, o, tile, full, *, name):
    WRONG[name](x, tile)


@refused_by(everywhere.emulate, *TRACED)
def test_a_transposed_part_is_fetched_untransposed(x, o, tile, full):
    plgpu.async_prefetch(x.T)  # HERE


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize(
    ("case", "target"),
    [("alone", "sm_90a"), ("shared", "sm_100a"), ("halves", "sm_100a")],
)
def test_the_instruction_fetches_to_l2(case, target, semantics):
    options, mesh = CASES[case]
    make = kernel(lambda part: plgpu.async_prefetch(part, **options), **mesh)
    function = under(semantics, make(None))
    (report,) = plgpu.offline.compile(function, numbers(48, 32), target=target)
    assert report.ptx.count("cp.async.bulk.prefetch.tensor.2d.L2.global") == 3
    assert report.resources.spill_store_bytes == 0


GOOD = {"async_prefetch": lambda e: {"ref": e.x}}
EFFECTS = {
    "async_prefetch.collective_axes": "",
    "async_prefetch.leader_tracked": "",
    "async_prefetch.partitioned_axis": "",
    "async_prefetch.predicate": [lambda e: e.i == 0],
}
FEATURES = [
    Row(
        "prefetches to L2",
        upstream=("context: async_prefetch", "primitives: async_prefetch"),
        operations=("async_prefetch",),
        runs="results_do_not_depend_on_it",
        offline="the_instruction_fetches_to_l2",
        instruction="cp.async.bulk.prefetch.tensor.2d.L2.global",
        omissions=dict.fromkeys(OMISSIONS, "(a hint: results do not depend on it)"),
    ),
]
