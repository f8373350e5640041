# SPDX-License-Identifier: Apache-2.0
"""The bytes of tensor maps: those that the host encodes, and those that threads make.

They are opaque. Here the first word is the address of the tensor, as tensormap.replace
may change it, and the second one the number of the map that has the other fields. What
threads write is for the tensormap proxy: the thread that made it releases it, and each
thread that copies through it acquires it before (PTX ISA, fence.proxy.tensormap).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep.accesses import BUFFER_SHIFT, memory_of
from pallas_gpu.lockstep.assembly import parse
from pallas_gpu.lockstep.copies.tensor_map import TensorMap
from pallas_gpu.lockstep.engine import LANES
from pallas_gpu.lockstep.memory import Memory
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program, Step, runs
from pallas_gpu.lockstep.registers import assembles

BYTES = 128
_WORDS = BYTES // 8
# The third word of a descriptor.
_MARK = 0x7E4507


def encoded(base: int, number: int) -> np.ndarray:
    """The bytes of a descriptor, by the number of its map."""
    words = [base, number, _MARK, *[0] * (_WORDS - 3)]
    return np.array(words, np.int64).view(np.uint8)


@dataclasses.dataclass
class Made:
    """A descriptor in GMEM whose address a thread has replaced.

    Attributes:
      maker: the thread: the row of its warp, and the lane.
      is_released: whether it has executed a fence since.
      acquired: the threads that have acquired it.
    """

    maker: tuple[int, int]
    is_released: bool = False
    acquired: set[tuple[int, int]] = dataclasses.field(default_factory=set)


def described(strand: Any, address: int, lane: int) -> TensorMap:
    """The map at an address, for a thread that copies through it.

    Raises:
      PtxError: there is none, or the thread has not acquired it.
    """
    launch = strand.cta.cluster.launch
    number, offset = divmod(address, 1 << BUFFER_SHIFT)
    memory: Memory | None = launch.buffer(number) if number else None
    if memory is None or offset + BYTES > memory.data.size:
        raise PtxError("a tensor copy through something that is no tensor map")
    words = memory.data[offset : offset + BYTES].view(np.int64)
    base, known, mark = map(int, words[:3])
    if mark != _MARK or words[3:].any() or offset % 64:
        raise PtxError("a tensor copy through something that is no tensor map")
    if memory.clocks is not None:
        thread = int(strand.row_of_lane[lane]), lane % LANES
        made = memory.descriptors.get(offset)
        if made is None or thread not in made.acquired:
            raise PtxError(
                f"a tensor copy of {strand.name} through a tensor map that it has not "
                "acquired (PTX ISA, fence.proxy.tensormap)"
            )
    return dataclasses.replace(launch.tensor_maps[known], base=base)


def _threads(strand: Any) -> list[tuple[int, int]]:
    lanes = np.flatnonzero(strand.active())
    return [(int(strand.row_of_lane[i]), int(i) % LANES) for i in lanes]


@assembles("tensormap.replace.")
def _replace(program: Program, op: ir.Operation, text: str) -> Step:
    (statement,) = parse(text)
    if statement.opcode != "tensormap.replace.tile.global_address.global.b1024.b64":
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    place, address = program.inputs(op)

    def replace(strand: Any) -> None:
        threads = _threads(strand)
        if not threads:
            return
        memory, offsets = memory_of(strand, 1, strand.env[place])
        new = strand.per_lane(strand.env[address])[strand.active()].astype(np.int64)
        data = new[:, None].view(np.uint8)
        if (offsets % BYTES).any():
            raise PtxError("tensormap.replace at an address that is not aligned")
        memory.store(strand, offsets[:, None] + np.arange(8), data)
        for thread, offset in zip(threads, offsets.tolist(), strict=True):
            memory.descriptors[offset] = Made(thread)

    return replace


@assembles("fence.proxy.tensormap")
def _fence(program: Program, op: ir.Operation, text: str) -> Step:
    (statement,) = parse(text)
    if statement.opcode == "fence.proxy.tensormap::generic.release.gpu":
        return _release
    if statement.opcode != "fence.proxy.tensormap::generic.acquire.gpu":
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    if statement.operands != ("[$0]", str(BYTES)):
        raise NotModelled(f"llvm.inline_asm {text[:80]}")
    (place,) = program.inputs(op)

    def acquire(strand: Any) -> None:
        threads = _threads(strand)
        if not threads:
            return
        memory, offsets = memory_of(strand, 1, strand.env[place])
        memory.load(strand, offsets[:, None] + np.arange(BYTES))
        for thread, offset in zip(threads, offsets.tolist(), strict=True):
            made = memory.descriptors.get(offset)
            if made is None or not made.is_released:
                raise PtxError(
                    f"{strand.name} acquires a tensor map that nobody has released"
                )
            made.acquired.add(thread)

    return acquire


def _release(strand: Any) -> None:
    threads = set(_threads(strand))
    for memory in strand.cta.cluster.launch.memories:
        for made in memory.descriptors.values():
            made.is_released |= made.maker in threads


@runs("llvm.mlir.addressof")
def _address_of(program: Program, op: ir.Operation) -> Step:
    """The address of the device's memory of a name of the module."""
    (out,) = program.outputs(op)
    name = ir.FlatSymbolRefAttr(op.attributes["global_name"]).value

    def address(strand: Any) -> None:
        launch = strand.cta.cluster.launch
        strand.env[out] = np.array([launch.globals[name]], np.int64)

    return address


def parameters(
    descriptors: dict[int, int], maps: Sequence[TensorMap], start: int, size: int
) -> np.ndarray:
    """The bytes of the kernel's parameter that is an array of descriptors.

    Args:
      descriptors: the number of the map that the host has encoded at a place.
      maps: the maps.
      start, size: where the host has the array.
    """
    data = np.full(size, 0xA5, np.uint8)
    for place, number in descriptors.items():
        if start <= place < start + size:
            at = place - start
            data[at : at + BYTES] = encoded(maps[number].base, number)
    return data
