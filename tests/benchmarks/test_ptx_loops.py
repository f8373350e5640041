# SPDX-License-Identifier: Apache-2.0
"""Counts of a persistent kernel's instructions per tile, in short PTX."""

from __future__ import annotations

import pytest

from benchmarks import ptx_loops

COPY = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1];"
)
EXPECT = "mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r1], %r7;"
MMA = "tcgen05.mma.cta_group::1.kind::f16 [d], a, b, %r1, p;"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1];"
WAIT = """// begin inline asm
{
LAB_WAIT:
mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2;
@P1 bra.uni DONE;
bra.uni LAB_WAIT;
DONE:
}
// end inline asm"""


def kernel(*lines: str) -> ptx_loops.Program:
    text = "\n".join(lines)
    return ptx_loops.Program(
        f".visible .entry k()\n{{\nmov.b32 %r7, 64;\n{text}\nret;\n}}"
    )


def executed(program: ptx_loops.Program, role: str, markers: int) -> dict[str, int]:
    return dict(program.counts(program.per_tile(role, markers)))


# A role in a loop over tiles of its own; in it a step along K, and a conditional wait.
SEPARATE = [
    "@%p1 bra $L__BB0_9;",
    "$L__BB0_1:",
    "add.s32 %r3, %r3, 1;",
    "$L__BB0_2:",
    "@%p2 bra $L__BB0_3;",
    WAIT,
    "$L__BB0_3:",
    EXPECT,
    COPY,
    "@%p3 bra $L__BB0_2;",
    "@%p4 bra $L__BB0_1;",
    "$L__BB0_9:",
]


def test_the_steps_of_an_inner_loop_count_as_often_as_their_marker_is_needed():
    program = kernel(*SEPARATE)
    counts = executed(program, "load", 5)
    assert counts.pop("add.s32") == 1
    assert counts.pop("bra") == 2 * 5 + 1
    waits = [times for name, times in counts.items() if "try_wait" in name]
    assert waits == [5]
    assert [n for name, n in counts.items() if "complete_tx" in name] == [5]
    assert program.bytes_expected(program.per_tile("load", 5)) == 5 * 64


def test_an_amount_that_is_not_constant_is_unknown():
    program = kernel(*[x.replace("%r7", "%r8") for x in SEPARATE])
    assert program.bytes_expected(program.per_tile("load", 5)) is None


# All roles in one loop over tiles; the last step along K is peeled.
COMMON = [
    "$L__BB0_1:",
    "sub.s32 %r3, %r3, 1;",
    "@%p1 bra $L__BB0_4;",
    "$L__BB0_2:",
    MMA,
    MMA,
    "@%p2 bra $L__BB0_2;",
    MMA,
    "mul.lo.s32 %r4, %r4, 3;",
    "bra.uni $L__BB0_5;",
    "$L__BB0_4:",
    LOAD,
    "shl.b32 %r5, %r5, 1;",
    "$L__BB0_5:",
    "@%p3 bra $L__BB0_1;",
]


def test_peeled_steps_and_common_instructions_count_once():
    counts = executed(kernel(*COMMON), "multiply", 7)
    assert counts["tcgen05.mma.cta_group::1.kind::f16"] == 7
    assert counts["mul.lo.s32"] == counts["sub.s32"] == 1
    # Of three iterations, to the other role, and to the next tile.
    assert counts["bra"] == 3 + 2
    assert counts["bra.uni"] == 1


def test_a_role_does_not_execute_what_another_does():
    counts = executed(kernel(*COMMON), "store", 1)
    assert "mul.lo.s32" not in counts
    assert counts["shl.b32"] == counts["sub.s32"] == 1


def test_markers_that_do_not_fit_the_loops_are_an_error():
    with pytest.raises(ValueError, match="1 and 2 markers do not make 6"):
        kernel(*COMMON).per_tile("multiply", 6)
