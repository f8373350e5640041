# SPDX-License-Identifier: Apache-2.0
"""TMA descriptors of other devices' buffers, which each block makes when it starts.

The host does not encode them. XLA may record a launch in a CUDA graph with all its
parameters, and records it again only if a buffer of the device itself has moved. The
words in the device's memory (`peers.py`) are written for each execution: a block takes
the addresses from them, and the rest from the descriptor of the device's own buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm, scf

from pallas_gpu.emitters import module, operations
from pallas_gpu.emitters.devices import peers
from pallas_gpu.emitters.elements import arith
from pallas_gpu.emitters.grids import griddepcontrol

# CUtensorMap is an opaque struct of 128 bytes (CUDA driver API).
BYTES = 128
_GLOBAL = "descriptors_of_devices"
_REPLACE = "tensormap.replace.tile.global_address.global.b1024.b64 [$0], $1;"
_RELEASE = "fence.proxy.tensormap::generic.release.gpu;"
_ACQUIRE = f"fence.proxy.tensormap::generic.acquire.gpu [$0], {BYTES};"


def make(
    kernel: ir.Module,
    launch: ir.Operation,
    prologue: ir.Operation,
    pointers: Sequence[ir.Value],
    wanted: Sequence[tuple[Any, ir.Value]],
) -> list[ir.Value]:
    """Emits code that makes descriptors in memory of the module, those of each block.

    PTX: `tensormap.replace`, `fence.proxy.tensormap`. Since: sm_90a. A lane of the
    block's first warp makes a descriptor; behind a barrier all threads acquire it.
    Launches of one kernel on one device do not overlap.

    Args:
      kernel: receives the memory.
      launch: the `gpu.launch`.
      prologue: its tagged operation, before which the code is inserted.
      pointers: the kernel's buffers, and behind them those of `peers.py`.
      wanted: tensor maps of other devices' buffers; for each the address of the
        descriptor of the device's own buffer.

    Returns:
      `!llvm.ptr` of each tensor map's first descriptor.
    """
    grid, total = _grid(launch), sum(x.count for x, _ in wanted)
    _declare(kernel, grid[0] * grid[1] * grid[2] * total * BYTES)
    _, lane, warp, warpgroup, x, y, z, *_ = prologue.operands
    firsts = []
    with ir.InsertionPoint(prologue):
        if "mosaic_gpu.uses_pdl" in kernel.operation.attributes:
            # The grid before may be of this kernel, and still read its descriptors.
            griddepcontrol.wait()
        row = arith.addi(y, arith.muli(z, _i32(grid[1])))
        block = arith.addi(x, arith.muli(row, _i32(grid[0])))
        place = llvm.mlir_addressof(module.pointer_type(1), _GLOBAL)
        place = operations.offset(place, arith.muli(block, _i32(total * BYTES)))
        others = arith.ori(warp, warpgroup)
        for tensor_map, own in wanted:
            firsts.append(llvm.addrspacecast(module.pointer_type(), place))
            for start in range(0, tensor_map.count, module.WARP_THREADS):
                # Lanes of other warps get numbers of no device.
                number = arith.ori(
                    arith.addi(lane, _i32(start)), arith.shli(others, _i32(16))
                )
                exists = arith.cmpi(
                    arith.CmpIPredicate.ult, number, _i32(tensor_map.count)
                )
                with ir.InsertionPoint(scf.IfOp(exists).then_block):
                    _make_one(tensor_map, own, place, number, pointers)
                    scf.yield_([])
            place = operations.offset(place, tensor_map.count * BYTES)
        nvvm.barrier()
        for (tensor_map, _), first in zip(wanted, firsts, strict=True):
            for i in range(tensor_map.count):
                _assembly(_ACQUIRE, "l", operations.offset(first, i * BYTES))
    return firsts


def _make_one(
    tensor_map: Any,
    own: ir.Value,
    first: ir.Value,
    number: ir.Value,
    pointers: Sequence[ir.Value],
) -> None:
    """Emits the code of the thread that makes one descriptor, that of a number."""
    place = operations.offset(first, arith.muli(number, _i32(BYTES)))
    vector = ir.VectorType.get([4], ir.IntegerType.get_signless(32))
    for i in range(0, BYTES, 16):
        loaded = llvm.load(vector, operations.offset(own, i), alignment=16)
        llvm.store(loaded, operations.offset(place, i), alignment=16)
    *buffers, words, _ = pointers
    index, devices = tensor_map.buffer_index, tensor_map.devices
    if tensor_map.owner == "peers":
        address = peers.load_word(words, peers.word_of(devices, index), number)
    else:
        word = peers.multimem_word_of(devices, len(buffers), index)
        address = peers.load_word(words, word)
    i64 = ir.IntegerType.get_signless(64)
    address = arith.addi(address, operations.constant(i64, tensor_map.offset_bytes))
    _assembly(_REPLACE, "l,l", place, address)
    _assembly(_RELEASE, "")


def _grid(launch: ir.Operation) -> list[int]:
    """The numbers of blocks of a launch."""
    (dependencies, *_) = ir.DenseI32ArrayAttr(launch.attributes["operandSegmentSizes"])
    extents = launch.operands[dependencies : dependencies + 3]
    return [ir.IntegerAttr(x.owner.attributes["value"]).value for x in extents]


def _declare(kernel: ir.Module, size_bytes: int) -> None:
    array = ir.Type.parse(f"!llvm.array<{size_bytes} x i8>")
    internal = ir.Attribute.parse("#llvm.linkage<internal>")
    with ir.InsertionPoint.at_block_begin(kernel.body):
        memory = llvm.GlobalOp(array, _GLOBAL, internal, addr_space=1, alignment=BYTES)
    with ir.InsertionPoint(memory.regions[0].blocks.append()):
        llvm.return_(arg=llvm.mlir_zero(array))


def _i32(value: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _assembly(text: str, constraints: str, *operands: ir.Value) -> None:
    llvm.inline_asm(None, operands, text, constraints, has_side_effects=True)
