# SPDX-License-Identifier: Apache-2.0
"""warp_map in the compiled kernel: who issues, and who meets whom."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support.semantics import BOTH, Lane, Warpgroup, under

F32 = jnp.float32
OUT = jax.ShapeDtypeStruct((64, 128), F32)
TILE = plgpu.SMEM((64, 128), F32)


def kernel(body, *scratch, **options):
    return plgpu.kernel(body, out_type=OUT, scratch_types=list(scratch), **options)


def mlir(semantics, body, *scratch, **options):
    function = under(semantics, kernel(body, *scratch, **options))
    (report,) = plgpu.offline.lower(function, OUT)
    return report.mlir


def ptx(semantics, body, *scratch, **options):
    function = under(semantics, kernel(body, *scratch, **options))
    (report,) = plgpu.offline.compile(function, OUT)
    return report.ptx


def everything(x, o, tile, full, done):
    """All that a warp can issue, each once."""

    @plgpu.warp_map
    def _(warp_id):
        @plgpu.when(warp_id == 1)
        def _():
            plgpu.copy_gmem_to_smem(x, tile, full)

        plgpu.barrier_wait(full)
        tile[warp_id, 3] = tile[warp_id, 3] + 1
        plgpu.commit_smem()
        plgpu.barrier_arrive(done)

        @plgpu.when(warp_id == 2)
        def _():
            plgpu.barrier_wait(done)
            plgpu.copy_smem_to_gmem(tile, o, commit_group=False)
            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(0)


SCRATCH = (TILE, plgpu.Barrier(), plgpu.Barrier(num_arrivals=4))


@pytest.mark.offline
@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("semantics", BOTH)
def test_the_warpgroup_meets_before_and_after_and_nowhere_inside(semantics, warpgroups):
    def body(*refs):
        if warpgroups == 1:
            everything(*refs)
            return
        plgpu.when(lax.axis_index("wg") == 0)(lambda: everything(*refs))

    threads = {"num_threads": 2, "thread_name": "wg"} if warpgroups == 2 else {}
    text = ptx(semantics, body, *SCRATCH, **threads)
    meetings = re.findall(r"bar(?:rier)?\.sync\S*\s+\S+,\s*128;", text)
    assert len(meetings) == 2
    first, last = (m.start() for m in re.finditer(r"bar\.sync\s+\S+, 128;", text))
    issued = ("cp.async.bulk.tensor", "mbarrier.try_wait", "fence.proxy.async",
              "cp.async.bulk.commit_group", "cp.async.bulk.wait_group",
              "st.shared", "bar.warp.sync")  # fmt: skip
    for instruction in issued:
        places = [m.start() for m in re.finditer(re.escape(instruction), text)]
        assert places, instruction
        assert all(first < place < last for place in places), instruction


@pytest.mark.parametrize("semantics", BOTH)
def test_one_lane_of_each_warp_issues(semantics):
    """Its election, not that of the warpgroup, which is in warp 0 alone."""

    def body(x, o, done):
        @plgpu.warp_map
        def _(warp_id):
            plgpu.barrier_arrive(done)

    text = mlir(semantics, body, plgpu.Barrier(num_arrivals=4))
    elected = re.search(r"(%\S+) = nvvm\.elect\.sync", text)[1]
    conditions = re.findall(r"scf\.if (%\S+) \{\s*llvm\.inline_asm", text)
    assert conditions == [elected]


@pytest.mark.parametrize("semantics", BOTH)
def test_the_warpgroup_still_issues_in_warp_0(semantics):
    def body(x, o, done):
        @plgpu.warp_map
        def _(warp_id):
            o[warp_id, 0] = F32(1)

        plgpu.barrier_arrive(done)

    text = mlir(semantics, body, plgpu.Barrier())
    elected = re.search(r"(%\S+) = nvvm\.elect\.sync", text)[1]
    leader = re.search(rf"(%\S+) = arith\.andi {elected}, %\S+ : i1", text)[1]
    assert re.search(rf"scf\.if {elected} {{\s*llvm\.store", text)
    assert re.search(rf"scf\.if {leader} {{\s*llvm\.inline_asm", text)


@pytest.mark.parametrize("semantics", BOTH)
def test_a_store_of_an_element_meets_the_warp_before_and_after(semantics):
    def body(x, o):
        @plgpu.warp_map
        def _(warp_id):
            o[warp_id, 0] = F32(1)

    text = mlir(semantics, body)
    order = re.findall(r"nvvm\.bar\.warp\.sync|scf\.if|llvm\.store|nvvm\.barrier", text)
    meet, meet_warp = "nvvm.barrier", "nvvm.bar.warp.sync"
    assert order == [meet, meet_warp, "scf.if", "llvm.store", meet_warp, meet]

    params = plgpu.CompilerParams(unsafe_no_auto_barriers=True)
    assert "bar.warp.sync" not in mlir(semantics, body, compiler_params=params)


def test_branches_give_each_warp_a_parity_of_its_own():
    """A loop carries the bits that a wait of one warp flips."""

    def body(x, o, full):
        @plgpu.loop(0, 5)
        def _(i):
            @plgpu.warp_map
            def _(warp_id):
                @plgpu.when(warp_id == 1)
                def _():
                    plgpu.barrier_wait(full)

    for semantics in BOTH:
        text = mlir(semantics, body, plgpu.Barrier())
        carried = re.search(r"scf\.for .* iter_args\((%\S+) = ", text)[1]
        branch = re.search(r"(%\S+) = scf\.if %\S+ -> \(i32\) \{(.*?)\} else \{(.*?)\}",
                           text, re.DOTALL)  # fmt: skip
        assert f"scf.yield {carried}" in branch[3]
        assert "try_wait" in branch[2] and f"scf.yield {branch[1]}" in text


def test_an_array_that_warps_index_stays_row_major():
    def body(x, o, tile, full):
        plgpu.copy_gmem_to_smem(x, tile, full)
        plgpu.barrier_wait(full)

        @plgpu.warp_map
        def _(warp_id):
            tile[warp_id, 1] = tile[warp_id + 4, 2]

        o[...] = tile[...]

    lane, inferred = (
        mlir(semantics, body, TILE, plgpu.Barrier()) for semantics in (Lane, Warpgroup)
    )
    # The two differ in where constants stand.
    assert sorted(lane.splitlines()) == sorted(inferred.splitlines())


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_a_warp_copies_to_a_tiled_array_in_its_transforms(semantics):
    tiles = plgpu.SMEM((64, 128), F32, transforms=(
        plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128),
    ))  # fmt: skip

    def body(x, o, tile, full):
        @plgpu.warp_map
        def _(warp_id):
            @plgpu.when(warp_id == 3)
            def _():
                plgpu.copy_gmem_to_smem(x, tile, full)

        plgpu.barrier_wait(full)
        o[...] = tile[...]

    # One instruction carries the tiles: its tensor map has an axis for them.
    text = ptx(semantics, body, tiles, plgpu.Barrier())
    (dimensions,) = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d", text)
    assert int(dimensions) > 2


# --- arrays ---------------------------------------------------------------------------


def arrays(x, o, tile):
    """A reduction, a transpose, a relayout through scratch, a sort."""

    @plgpu.warp_map
    def _(warp_id):
        rows = plgpu.ds(16 * warp_id, 16)
        tile[rows] = x[rows].T.reshape(16, 128)
        o[rows] = tile[rows] - tile[rows].sum(1, keepdims=True)
        o[16 * warp_id] = jnp.sort(tile[16 * warp_id])


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_arrays_of_a_warp_do_not_make_the_warpgroup_meet(semantics):
    text = ptx(semantics, arrays, TILE)
    meetings = [
        m.start() for m in re.finditer(r"bar(?:rier)?\.sync\S*\s+\S+, 128;", text)
    ]
    assert len(meetings) == 2
    for instruction in ("shfl.sync.bfly", "bar.warp.sync", "st.shared.v4", "ld.global"):
        places = [m.start() for m in re.finditer(re.escape(instruction), text)]
        assert places, instruction
        assert all(meetings[0] < place < meetings[1] for place in places), instruction


@pytest.mark.parametrize("semantics", BOTH)
def test_nothing_marks_the_code_of_a_warp_after_its_expansion(semantics):
    assert "pallas_gpu." not in mlir(semantics, arrays, TILE)


@pytest.mark.parametrize("semantics", BOTH)
def test_scratch_is_divided_among_the_warps(semantics):
    """The warps of two warpgroups: eight equal parts, none of which overlap."""

    def body(x, o):
        half = 32 * lax.axis_index("wg")

        @plgpu.warp_map
        def _(warp_id):
            rows = plgpu.ds(half + 8 * warp_id, 8)
            o[rows] = jnp.flip(x[rows], 1)

    function = under(semantics, kernel(body, num_threads=2, thread_name="wg"))
    (report,) = plgpu.offline.lower(function, OUT)
    smem = int(re.search(r"dynamic_shared_memory_size %(\S+)", report.mlir) is not None)
    constants = set(map(int, re.findall(r"arith\.constant (\d+) : i32", report.mlir)))
    each = 8 * 128 * 4
    assert {each, 4 * each} <= constants and smem
