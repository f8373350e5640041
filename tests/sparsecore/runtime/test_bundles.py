# SPDX-License-Identifier: Apache-2.0
"""libtpu's assembly, as read."""

from __future__ import annotations

import pytest

from pallas_gpu.sparsecore.runtime import bundles

# In libtpu's form: a loop of two bundles and the two behind its branch, in another one.
TEXT = """\
called_computation_lowered:
0x0:  { s0 = sld [smem:$0x1] }
0x1:  { [smem:s0], [sflag:s1] =\tdma.local [hbm:s2], $0x10 }
execute0_lowered:
.Lfunc:
0x0:  { s1 = simm.s32 $0x0;  v0 = vimm.f32 $0.0e+00;
      _ =\tsnop }
0x1:  { [tilespmem:s6], [sflag:$0x1] =\tstream.linear.gather [hbm4b:s5+s6],
      $0x20, $0x38 }
.LBB2_1:
0x2:  { s3 = sadd.s32 $0x1, s3 }
.LBB2_2:
0x3:  { v1 = vld [tilespmem:s2+$0x0]; p0 = sne.s32 s2, $0x70 }
.Ltmp0:
0x4:  { (pc) =\tsbr.rel @p0 .LBB2_2-.Ltmp0, $2 }
0x5:  { v1 = vadd.f32 v1, v1; v2 = vld [tilespmem:s2+$0x10] }
0x6:  { [tilespmem:s2+$0x0] = vst v1 }
.Ltmp1:
0x7:  { (pc) =\tsbr.rel @p1 .LBB2_1-.Ltmp1, $2 }
0x8:  { [hbm4b:s3+s31] =\tstream.linear.scatter [tilespmem:s6],
      [sflag:$0x2], $0x1000, $0x38 }
0x9:  { _ =\tswait.eq [sflag:s30], $0x0 }
0xa:  { [bflag:$0x0] =\tsbarrier.arrive $0xFFFF }
"""


@pytest.fixture
def program():
    return bundles.parse(TEXT, 4)


def test_functions_are_found_by_what_executes_them(program):
    assert len(program.vector.bundles) == 11
    assert len(program.scalar.bundles) == 2
    assert program.vector.bundles[0].instructions == (
        "s1 = simm.s32 $0x0",
        "v0 = vimm.f32 $0.0e+00",
    )


def test_streams_have_memories_and_bytes(program):
    (dma,) = program.scalar.streams
    assert dma == bundles.Stream("dma.local", "hbm", "smem", 512)
    assert program.vector.streams == (
        bundles.Stream("stream.linear.gather", "hbm4b", "tilespmem", 128),
        bundles.Stream("stream.linear.scatter", "tilespmem", "hbm4b", 4 * 4096),
    )


def test_a_loop_has_the_bundles_behind_its_branch_and_encloses_none(program):
    (loop,) = program.vector.loops
    assert loop.label == ".LBB2_2"
    assert len(loop.bundles) == 4
    assert (loop.loads, loop.stores, loop.bundles_per_vector) == (2, 1, 2)


def test_the_branch_delay_of_the_chip_counts_where_the_branch_says_nothing():
    text = TEXT.replace(".Ltmp0, $2", ".Ltmp0")
    (loop,) = bundles.parse(text, 1).vector.loops
    assert len(loop.bundles) == 3


def test_waits_and_barriers_are_counted(program):
    code = program.vector
    assert len(code.waits) == len(code.barriers) == 1
