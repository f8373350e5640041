# SPDX-License-Identifier: Apache-2.0
"""Clusters: ranks, arrivals at neighbours, multicast copies."""

from __future__ import annotations

import re

import numpy as np
import pytest
from jaxlib.mlir.dialects import arith

from pallas_gpu.emitters import (
    addressing,
    cluster,
    control,
    gmem,
    mbarrier,
    registers,
    tma,
)
from pallas_gpu.layouts import WGStridedLayout
from pallas_gpu.layouts.registers.placement import place
from tests.support import everywhere
from tests.support.finished import emitted, smem_view
from tests.support.refusal import refused_by

I32 = np.dtype(np.int32)


def write_row(kb, out, row, value) -> None:
    """Fills a row of 128 with one i32."""
    layout = place(WGStridedLayout((128,), 1), (128,))
    array = registers.splat(value, I32, (128,)).materialize(layout)
    gmem.store(out.slice((row, 0), (None, 128)), array)


def block_number(kb, grid):
    x, y, z = kb.threads.block_id
    row = arith.addi(arith.muli(z, kb.i32(grid[1])), y)
    return arith.addi(arith.muli(row, kb.i32(grid[0])), x)


def test_a_block_knows_its_rank_and_its_groups(run_kernel, typed):
    grid, shape = (4, 4, 1), (2, 2, 1)  # x first

    def body(kb, rank, index, mask, last):
        row = block_number(kb, grid)
        along_y = cluster.group((2, 2), (0,))
        write_row(kb, rank, row, cluster.rank())
        write_row(kb, index, row, along_y.index)
        wide = arith.extui(kb.i32(0).type, along_y.mask)
        write_row(kb, mask, row, wide)
        write_row(kb, last, row, along_y.ranks[1])
        kb.sync_before_exit()

    results = [typed((16, 128), np.int32)] * 4
    outs = run_kernel(body, [], results, grid=grid, cluster=shape)
    rank, index, mask, last = (out[:, 0].reshape(4, 4) for out in outs)
    y, x = np.mgrid[:4, :4] % 2
    assert (rank == 2 * y + x).all()
    assert (index == y).all()
    assert (mask == (1 << x | 1 << (2 + x))).all()
    assert (last == 2 + x).all()


TILE = (128, 64)


def multicast_copy(sizes, axes):
    """Each block gets its group's tile by multicast and stores it to its own place."""

    def body(kb, x, out):
        view = smem_view(kb, 1024, TILE, "float16", (8, 64))
        barrier = kb.smem_pointer(0)
        mbarrier.init(barrier, 1)
        kb.sync_after_init()
        block = kb.threads.block_id[0]
        blocks = cluster.group(sizes, axes)
        # Blocks of a group copy the tile that has the number of the group's first.
        cluster_start = arith.subi(block, cluster.rank())
        number = arith.addi(cluster_start, blocks.ranks[0])
        source = x.slice((number, 0, 0), (None, *TILE))
        tma.copy_gmem_to_smem(kb, source, view, barrier, multicast=blocks)
        mbarrier.wait(barrier, kb.i32(0))
        tma.copy_smem_to_gmem(kb, view, out.slice((block, 0, 0), (None, *TILE)))
        tma.wait_group(0)
        kb.sync_before_exit()

    return body


@pytest.mark.offline
def test_a_multicast_copy_names_its_blocks(compile_kernel, typed):
    x = typed((4, 128, 64), np.float16)
    body = multicast_copy((2,), (0,))
    spec = {"grid": (4, 1, 1), "cluster": (2, 1, 1), "smem_bytes": 1 << 16}
    ptx = compile_kernel(body, [x], [x], **spec).ptx
    copies = ptx.count("complete_tx::bytes.multicast::cluster")
    assert copies == 1
    assert ptx.count("shared::cluster.global") == copies
    # The fence has released the mbarriers; nothing has, what a block did by its end.
    assert ptx.count("barrier.cluster.arrive.relaxed") == 1
    assert ptx.count("barrier.cluster.arrive.aligned") == 1


@pytest.mark.offline
def test_a_remote_arrival_is_released_to_the_cluster(compile_kernel):
    def body(kb):
        blocks = cluster.group((2,), (0,))
        mbarrier.init(kb.smem_pointer(0), 2)
        kb.sync_after_init()
        cluster.arrive(kb.smem_pointer(0), blocks)
        mbarrier.wait(kb.smem_pointer(0), kb.i32(0), "cluster")
        kb.sync_before_exit()

    spec = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "smem_bytes": 1024}
    ptx = compile_kernel(body, **spec).ptx
    # One instruction, in a lane for each block: its fence is expensive.
    assert ptx.count("mapa.shared::cluster") == 1
    assert ptx.count("mbarrier.arrive.release.cluster.shared::cluster.b64") == 1
    # Its lanes do not branch: a branch takes what is uniform in a loop out of uniform
    # registers.
    assert re.search(r"@%p\d+ mbarrier\.arrive\.", ptx)
    assert "mbarrier.try_wait.parity.acquire.cluster" in ptx


def test_without_a_cluster_the_rank_is_zero(build):
    def body(kb):
        assert cluster.rank() == kb.i32(0)
        blocks = cluster.group((1,), (0,))
        assert blocks.count == 1
        kb.sync_before_exit()

    assert "cluster" not in str(build(body))


def test_a_group_of_one_copies_without_multicast(build, typed):
    x = typed((8, 128, 64), np.float16)
    body = multicast_copy((2, 1), (1,))
    spec = {"grid": (8, 1, 1), "cluster": (2, 1, 1), "smem_bytes": 1 << 16}
    assert "multicast_mask" not in str(build(body, [x], [x], **spec))


@pytest.mark.parametrize(("sizes", "axes"), [((4,), (0,)), ((2,), (1,))], ids=str)
@refused_by(emitted, grid=(2, 1, 1), cluster=(2, 1, 1))
def test_the_axes_are_those_of_the_launch(kb, *, sizes, axes):
    cluster.group(sizes, axes)


@everywhere.tests(emitted, grid=(2, 1, 1), cluster=(2, 1, 1), smem_bytes=1024)
def test_smem_of_a_neighbour_has_the_cluster_address_space(kb):
    remote = addressing.map_shared(kb.smem_pointer(0), kb.i32(1))
    assert str(remote.type) == "!llvm.ptr<7>"
    with control.predicated(kb.threads.elected):
        cluster.emit_arrive_remote(remote)
