# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel of one warpgroup on the CPU: all 128 threads take each step together.

Every value is the bits that the threads hold: integers of shape [128], or [128, n] for
a vector. Accesses to memory are checked: between a store and another thread's access to
the same byte all must have met. It knows no asynchronous operation, and fails where it
meets an operation that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.mosaic.gmem import GmemView
from pallas_gpu.mosaic.module import KernelBuilder, LaunchSpec
from tests.support.lockstep import assembly, elements
from tests.support.lockstep.memory import THREADS, Meetings, Memory
from tests.support.lockstep.not_modelled import NotModelled

WARPS = THREADS // 32
EVERYBODY = np.ones(128, dtype=bool)
# A pointer is the number of a memory, times 2**40, and a byte in it: that of a buffer,
# or one of these.
_SMEM, _HOST = 1 << 10, 1 << 11
_ENDS = ("gpu.terminator", "func.return", "scf.yield", "scf.condition")
_NOTHING = ("nvvm.fence.proxy", "gpu.wait", "llvm.mlir.global")
_SAME = ("arith.bitcast",)


def run(
    emit: Callable[..., None], operands: Sequence[np.ndarray], results, **spec
) -> list[np.ndarray]:
    """Runs a body; arguments and results are those of the `run_kernel` fixture."""
    types = [*operands, *results]
    launch = LaunchSpec("kernel", num_buffers=len(types), **spec)
    builder = KernelBuilder(launch)
    with builder as kb:
        views = [
            GmemView.whole(kb.buffers[i], i, t.shape, np.dtype(t.dtype))
            for i, t in enumerate(types)
        ]
        emit(kb, *views)
    machine, outputs = _machine(operands, results)
    machine.new_block(spec.get("smem_bytes", 0))
    for i, pointer in enumerate(builder.buffers):
        machine.values[pointer] = np.full(128, i << 40, np.int64)
    with builder.context:
        machine.block(builder.body, EVERYBODY)
    return outputs


def run_module(
    module: ir.Module, operands: Sequence[np.ndarray], results
) -> list[np.ndarray]:
    """Runs a whole kernel's module, its blocks one after the other.

    Args:
      module: as `pallas_gpu.lowering` gives it.
      operands: the arrays of the kernel.
      results: shapes and dtypes of what it returns.
    """
    machine, outputs = _machine(operands, results)
    table = np.arange(len(machine.memories), dtype=np.int64) << 40
    machine.memories[_HOST] = Memory(table.view(np.uint8), machine.meetings)
    with module.context:
        functions = [
            op for op in module.body.operations if op.operation.name == "func.func"
        ]
        if len(functions) > 1:  # the declaration of what initialises TMA descriptors
            raise NotModelled("func.call", str(functions[0]))
        (function,) = functions
        block = function.regions[0].blocks[0]
        machine.values[block.arguments[1]] = np.full(128, _HOST << 40, np.int64)
        machine.block(block, EVERYBODY)
    return outputs


def _machine(operands, results) -> tuple[_Machine, list[np.ndarray]]:
    outputs = [np.zeros(t.shape, t.dtype) for t in results]
    buffers = [*(np.array(x) for x in operands), *outputs]
    return _Machine([x.reshape(-1).view(np.uint8) for x in buffers]), outputs


def _lanes(type_: ir.Type) -> int | None:
    return type_.shape[0] if isinstance(type_, ir.VectorType) else None


class _Machine:
    def __init__(self, buffers: Sequence[np.ndarray]) -> None:
        self.values: dict[ir.Value, Any] = {}
        self.meetings = Meetings()
        self.memories = {i: Memory(x, self.meetings) for i, x in enumerate(buffers)}

    def new_block(self, smem_bytes: int) -> None:
        """Starts a block of threads, whose SMEM holds anything."""
        data = np.full(smem_bytes, 0xA5, np.uint8)
        self.memories[_SMEM] = Memory(data, self.meetings)

    def block(self, block: Any, active: np.ndarray) -> list[Any]:
        """Runs a block's operations; returns the operands of its terminator."""
        op = None
        for op in block.operations:
            self.step(op.operation, active)
        return [] if op is None else [self.values[v] for v in op.operands]

    def step(self, op: ir.Operation, active: np.ndarray) -> None:
        name = op.name
        method = getattr(self, "_do_" + re.sub(r"\W", "_", name), None)
        if method is not None:
            method(op, [self.values.get(v) for v in op.operands], active)
        elif name not in _ENDS and name not in _NOTHING:
            if not op.results:
                raise NotModelled(name, str(op))
            inputs = [self.values.get(v) for v in op.operands]
            self.values[op.results[0]] = self._result(op, inputs)

    def _result(self, op: ir.Operation, inputs: list[Any]) -> Any:
        type_ = op.results[0].type
        if op.name in _SAME:
            return inputs[0]
        if op.name == "arith.constant":
            return _constant(op.attributes["value"], type_)
        method = getattr(self, "_" + re.sub(r"\W", "_", op.name), None)
        if method is not None:
            return method(op, inputs, type_)
        value = elements.compute(op, inputs)
        if value is None:
            raise NotModelled(op.name, str(op))
        return value

    # --- control ----------------------------------------------------------------------

    def _uniform(self, value: np.ndarray, active: np.ndarray) -> int:
        first = value[active].flat[0]
        if not (value[active] == first).all():
            raise NotModelled("a loop whose threads part")
        return int(first)

    def _do_scf_if(self, op, inputs, active) -> None:
        condition = inputs[0] != 0
        sides = []
        for region, taken in zip(op.regions, (condition, ~condition), strict=True):
            runs = active & taken
            blocks = list(region.blocks)
            sides.append(self.block(blocks[0], runs) if blocks and runs.any() else None)
        for i, result in enumerate(op.results):
            yes, no = (None if side is None else side[i] for side in sides)
            if yes is None or no is None:
                self.values[result] = no if yes is None else yes
                continue
            wide = condition[:, None] if yes.ndim == 2 else condition
            self.values[result] = np.where(wide, yes, no)

    def _do_scf_for(self, op, inputs, active) -> None:
        start, stop, step = (self._uniform(x, active) for x in inputs[:3])
        block = op.regions[0].blocks[0]
        carry = inputs[3:]
        for i in range(start, stop, step):
            now = [np.full(128, i, np.int64), *carry]
            self.values.update(zip(block.arguments, now, strict=True))
            carry = self.block(block, active)
        self.values.update(zip(op.results, carry, strict=True))

    def _do_scf_while(self, op, inputs, active) -> None:
        before, after = (region.blocks[0] for region in op.regions)
        while True:
            self.values.update(zip(before.arguments, inputs, strict=True))
            condition, *passed = self.block(before, active)
            if not self._uniform(condition, active):
                break
            self.values.update(zip(after.arguments, passed, strict=True))
            inputs = self.block(after, active)
        self.values.update(zip(op.results, passed, strict=True))

    def _do_gpu_launch(self, op, inputs, active) -> None:
        grid = [int(x[0]) for x in inputs[1:4]]
        threads = [int(x[0]) for x in inputs[4:7]]
        if len(op.regions[0].blocks[0].arguments) > 12:
            raise NotModelled("a cluster")
        if threads != [128, 1, 1]:
            raise NotModelled("a block of several warpgroups", f"{threads} threads")
        assert grid[1:] == [1, 1]
        block = op.regions[0].blocks[0]
        for i in range(grid[0]):
            self.new_block(int(inputs[-1][0]))
            self.block_number = np.full(128, i, np.int64)
            numbers = [i, 0, 0, None, 0, 0, *grid, *threads]
            for argument, n in zip(block.arguments, numbers, strict=True):
                value = THREADS if n is None else np.full(128, n)
                self.values[argument] = value.astype(np.int64)
            self.block(block, EVERYBODY)
            self.meetings.warpgroup += 1

    def _do_nvvm_barrier(self, op, inputs, active) -> None:
        assert active.all()
        self.meetings.warpgroup += 1
        self.meetings.warp += 1

    def _do_nvvm_bar_warp_sync(self, op, inputs, active) -> None:
        self.meetings.warp += 1

    # --- operations -------------------------------------------------------------------

    def _nvvm_read_ptx_sreg_tid_x(self, op, inputs, type_):
        return THREADS.astype(np.int64)

    def _nvvm_read_ptx_sreg_ctaid_x(self, op, inputs, type_):
        return self.block_number

    def _nvvm_elect_sync(self, op, inputs, type_):
        return (THREADS % 32 == 0).astype(np.int64)

    def _gpu_dynamic_shared_memory(self, op, inputs, type_):
        return None

    _builtin_unrealized_conversion_cast = _gpu_dynamic_shared_memory

    def _llvm_extractvalue(self, op, inputs, type_):
        if "!llvm.struct<(ptr<3>" in str(op.operands[0].type):
            return np.full(128, _SMEM << 40, np.int64)
        (position,) = ir.DenseI64ArrayAttr(op.attributes["position"])
        return inputs[0][position]

    def _llvm_getelementptr(self, op, inputs, type_):
        (static,) = ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"])
        kind = ir.TypeAttr(op.attributes["elem_type"]).value
        bytes_each = elements.width(kind) // 8
        if len(inputs) == 2:
            index = elements.signed(inputs[1], op.operands[1].type)
            return inputs[0] + index * bytes_each
        return inputs[0] + static * bytes_each

    def _arith_select(self, op, inputs, type_):
        chosen = inputs[0] != 0
        wide = chosen[:, None] if _lanes(type_) and chosen.ndim == 1 else chosen
        return np.where(wide, inputs[1], inputs[2])

    def _vector_broadcast(self, op, inputs, type_):
        return np.broadcast_to(inputs[0].reshape(128, -1), (128, _lanes(type_)))

    def _vector_extract(self, op, inputs, type_):
        (lane,) = ir.DenseI64ArrayAttr(op.attributes["static_position"])
        return inputs[0][:, lane]

    def _vector_from_elements(self, op, inputs, type_):
        return np.stack(inputs, axis=1)

    def _vector_bitcast(self, op, inputs, type_):
        width = elements.width(op.operands[0].type)
        bits = inputs[0].reshape(128, -1, 1) >> np.arange(width) & 1
        groups = bits.reshape(128, -1, elements.width(type_))
        weights = np.int64(1) << np.arange(elements.width(type_))
        value = (groups * weights).sum(axis=-1)
        return value if _lanes(type_) else value[:, 0]

    _llvm_bitcast = _vector_bitcast

    def _llvm_call_intrinsic(self, op, inputs, type_):
        if "llvm.nvvm.prmt" not in str(op.attributes["intrin"]):
            return elements.compute(op, inputs)
        both = inputs[0] | inputs[1] << 32
        place = inputs[2][:, None] >> 4 * np.arange(4) & 7
        return ((both[:, None] >> 8 * place & 0xFF) << 8 * np.arange(4)).sum(axis=1)

    def _nvvm_shfl_sync(self, op, inputs, type_):
        kind = str(op.attributes["kind"])
        lane = THREADS % 32 ^ inputs[2] if "bfly" in kind else inputs[2]
        assert ((lane >= 0) & (lane < 32)).all()
        return inputs[1][WARPS * 32 + lane]

    def _llvm_inline_asm(self, op, inputs, type_):
        text = ir.StringAttr(op.attributes["asm_string"]).value
        if not text.strip():
            return inputs if len(inputs) > 1 else inputs[0]
        value = assembly.compute(text, inputs)
        if value is None:
            raise NotModelled(op.name, str(op))
        return value.reshape(128).astype(np.int64)

    # --- memory -----------------------------------------------------------------------

    def _do_llvm_load(self, op, inputs, active) -> None:
        type_ = op.results[0].type
        memory, places = self._places(inputs[0], type_, active)
        data = memory.load(places, active)
        bytes_each = elements.width(type_) // 8
        grouped = data.reshape(128, -1, bytes_each)
        value = (grouped << 8 * np.arange(bytes_each)).sum(axis=-1)
        self.values[op.results[0]] = value if _lanes(type_) else value[:, 0]

    def _do_llvm_store(self, op, inputs, active) -> None:
        value, address = inputs
        type_ = op.operands[0].type
        memory, places = self._places(address, type_, active)
        bytes_each = elements.width(type_) // 8
        wide = value.reshape(128, -1, 1) >> 8 * np.arange(bytes_each) & 0xFF
        memory.store(places, wide.reshape(places.shape), active)

    def _places(self, address, type_, active) -> tuple[Memory, np.ndarray]:
        count = (_lanes(type_) or 1) * elements.width(type_) // 8
        assert (address % count == 0)[active].all(), "an unaligned access"
        return self._memory(address[:, None] + np.arange(count), active)

    def _memory(self, places, active) -> tuple[Memory, np.ndarray]:
        number = self._uniform(places >> 40, active)
        return self.memories[number], places & (1 << 40) - 1

    def _do_nvvm_ldmatrix(self, op, inputs, active) -> None:
        assert active.all()
        memory, places = self._memory(_matrix_places(op, inputs[0]), active)
        words = memory.load(places.reshape(128, -1), active).reshape(128, -1, 4)
        words = (words << 8 * np.arange(4)).sum(axis=-1)
        values = list(words.T)
        self.values[op.results[0]] = values if len(values) > 1 else values[0]

    def _do_nvvm_stmatrix(self, op, inputs, active) -> None:
        assert active.all()
        address, *words = inputs
        memory, places = self._memory(_matrix_places(op, address), active)
        wide = np.stack(words, axis=1)[..., None] >> 8 * np.arange(4) & 0xFF
        memory.store(places.reshape(128, -1), wide.reshape(128, -1), active)


def _matrix_places(op: ir.Operation, address: np.ndarray) -> np.ndarray:
    """The addresses of the four bytes that each thread has of each 8x8 matrix.

    Lane 8 m + r names row r of matrix m (PTX ISA, ldmatrix).
    """
    loads = op.name == "nvvm.ldmatrix"
    count = ir.IntegerAttr(op.attributes["num"]).value if loads else 0
    count = count or len(op.operands) - 1
    rows = address.reshape(4, 32)[:, : 8 * count].reshape(4, count, 8)
    assert (rows % 16 == 0).all(), "an unaligned row of a matrix"
    lane = THREADS % 32
    if "col" in str(op.attributes["layout"]):
        first = rows[WARPS, :, 2 * (lane % 4)] + 2 * (lane // 4)[:, None]
        second = rows[WARPS, :, 2 * (lane % 4) + 1] + 2 * (lane // 4)[:, None]
        return np.stack([first, first + 1, second, second + 1], axis=-1)
    start = rows[WARPS, :, lane // 4] + 4 * (lane % 4)[:, None]
    return start[..., None] + np.arange(4)


def _constant(attribute: ir.Attribute, type_: ir.Type) -> np.ndarray:
    if isinstance(type_, ir.VectorType):
        dense, count = ir.DenseElementsAttr(attribute), type_.shape[0]
        if dense.is_splat:
            parts = [dense.get_splat_value()] * count
        else:
            listed = str(attribute).split("[")[1].split("]")[0].split(",")
            kind = type_.element_type
            parts = [ir.Attribute.parse(f"{x.strip()} : {kind}") for x in listed]
        columns = [_constant(x, type_.element_type) for x in parts]
        return np.stack(columns, axis=1)
    if isinstance(attribute, ir.FloatAttr):
        return elements.bits(np.full(128, attribute.value), type_)
    number = int(attribute.value)
    return elements.masked(np.full(128, number, np.int64), type_)
