# SPDX-License-Identifier: Apache-2.0
"""Loops and spills of disassembled code, on small texts; test_explain has kernels."""

from __future__ import annotations

from types import SimpleNamespace

from pallas_gpu.runtime import stages
from pallas_gpu.runtime.machine_code import spilled

# A loop in a loop; code that ptxas has moved behind the end returns with a branch.
CODE = """\
kernel:
	//## File "operations", line 1
        /*0000*/                   STL.64 [R1+0x8], R2
.L_x_0:
	//## File "operations", line 2
        /*0010*/                   LDL.LU R4, [R1+0x4]
.L_x_1:
	//## File "operations", line 3
        /*0020*/              @!P0 STL.128 [R1], R8
        /*0030*/                   LDL R9, [R1+0xc]
        /*0040*/                   LDL R9, [R20+0xc]
        /*0050*/               @P0 BRA `(.L_x_1)
        /*0060*/               @P1 BRA `(.L_x_0)
.L_x_2:
        /*0070*/                   LDL.64 R2, [R1+0x8]
        /*0080*/                   EXIT
        /*0090*/                   BRA `(.L_x_2)
"""


def test_spills_belong_to_the_innermost_loop():
    inner, outer, rest = spilled(CODE)
    assert (inner.in_loop, inner.stored_bytes, inner.loaded_bytes) == (True, 16, 4)
    assert inner.lines == {3: 20}
    assert (outer.in_loop, outer.stored_bytes, outer.loaded_bytes) == (True, 0, 4)
    assert not rest.in_loop
    assert rest.lines == {1: 8, 3: 8}


def test_code_without_spills_has_none():
    assert spilled("") == spilled(CODE.replace("[R1", "[R3")) == []


def test_code_with_numbers_of_operations_may_not_spill(monkeypatch):
    worst, *_ = spilled(CODE)
    compiled = SimpleNamespace(sass_with_control=CODE.replace("[R1", "[R3"))
    monkeypatch.setattr(stages, "lowered_with_notes", lambda build: (build, None))
    monkeypatch.setattr(stages, "compiled_module", lambda build: compiled)
    assert stages._in_loop(None, worst) == (worst, None)
