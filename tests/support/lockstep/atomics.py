# SPDX-License-Identifier: Apache-2.0
"""Atomic operations on GMEM, and stores to the SMEM of another block of the cluster."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir

from tests.support.lockstep import values
from tests.support.lockstep.accesses import BUFFER_SHIFT, SMEM_BASE, cluster_address
from tests.support.lockstep.assembly import parse
from tests.support.lockstep.engine import KernelError
from tests.support.lockstep.not_modelled import NotModelled
from tests.support.lockstep.program import Program, Step
from tests.support.lockstep.registers import ASSEMBLY, AssemblyUnit

_ADD = "atom.relaxed.gpu.global.add.u32"
_STORE = "st.shared::cluster.b32"


def _atom(program: Program, op: ir.Operation, text: str) -> Step:
    """PTX ISA, atom: the old value of each thread, whose updates are one by one."""
    (statement,) = parse(text)
    if statement.opcode != _ADD or statement.operands != ("$0", "[$1]", "$2"):
        raise NotModelled(f"llvm.inline_asm {text[:60]}")
    (pointer, amount), (out,) = program.inputs(op), program.outputs(op)

    def add(strand: Any) -> None:
        result = np.zeros(strand.lanes, np.uint32)
        addresses = strand.per_lane(strand.env[pointer])
        amounts = strand.per_lane(values.forced(strand.env[amount]))
        for lane in np.flatnonzero(strand.active()):
            number, offset = divmod(int(addresses[lane]), 1 << BUFFER_SHIFT)
            if offset % 4:
                raise KernelError("an atomic operation at an unaligned address")
            # Atomic accesses do not race with each other: no access is recorded.
            data = strand.cta.cluster.launch.buffer(number).data
            word = data[offset : offset + 4].view(np.uint32)
            result[lane] = word[0]
            word += np.uint32(amounts[lane])
        strand.env[out] = result

    return add


def _store_remote(program: Program, op: ir.Operation, text: str) -> Step:
    """PTX ISA, st: to an address in the window of the cluster's SMEM."""
    (statement,) = parse(text)
    if statement.opcode != _STORE or statement.operands != ("[$0]", "$1"):
        raise NotModelled(f"llvm.inline_asm {text[:60]}")
    pointer, value = program.inputs(op)

    def store(strand: Any) -> None:
        active = strand.active()
        if not active.any():
            return
        addresses = strand.per_lane(strand.env[pointer])[active]
        targets = [cluster_address(strand, int(address)) for address in addresses]
        cta = targets[0][0]
        if any(other is not cta for other, _ in targets):
            raise NotModelled("a store to the SMEM of several blocks")
        offsets = np.array([offset for _, offset in targets])
        if (offsets % 4).any():
            raise KernelError("a store of 4 bytes to an unaligned address")
        data = strand.per_lane(values.forced(strand.env[value]))[active]
        raw = np.ascontiguousarray(data, np.uint32).view(np.uint8).reshape(-1, 4)
        places = offsets[:, None] - SMEM_BASE + np.arange(4)
        cta.smem.store(strand, places, raw)

    return store


ASSEMBLY.append(AssemblyUnit("atom.", _atom))
ASSEMBLY.append(AssemblyUnit("st.shared::cluster", _store_remote))
