# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel of one warpgroup on the CPU: all 128 threads take each step together.

It knows the operations that move data. Every value is the bits that the threads hold:
integers of shape [128], or [128, n] for a vector. Accesses to SMEM are checked: between
a store and another thread's access to the same byte all must have met.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.mosaic.gmem import GmemView
from pallas_gpu.mosaic.module import KernelBuilder, LaunchSpec

THREADS = np.arange(128)
WARPS = THREADS // 32
NOBODY = -1
# A pointer is the number of a memory, times 2**40, and a byte in it: that of a buffer,
# or this one.
_SMEM = 1 << 10
_COMPARE = {0: np.equal, 1: np.not_equal, 6: np.less, 8: np.greater}
_BINARY: dict[str, Callable] = {
    "arith.addi": np.add,
    "arith.muli": np.multiply,
    "arith.xori": np.bitwise_xor,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.shli": np.left_shift,
    "arith.shrui": np.right_shift,
}
_ENDS = ("gpu.terminator", "scf.yield")
_SAME = ("arith.extui", "arith.bitcast", "llvm.bitcast", "arith.extsi")


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
    outputs = [np.zeros(t.shape, t.dtype) for t in results]
    buffers = [np.array(x) for x in operands] + outputs
    machine = _Machine(spec.get("smem_bytes", 0))
    for i, (pointer, buffer) in enumerate(zip(builder.buffers, buffers, strict=True)):
        flat = buffer.reshape(-1).view(np.uint8)
        machine.memories[i] = flat
        machine.values[pointer] = np.full(128, i << 40, np.int64)
    with builder.context:
        machine.block(builder.body, np.ones(128, dtype=bool))
    return outputs


def _width(type_: ir.Type) -> int:
    element = type_.element_type if isinstance(type_, ir.VectorType) else type_
    return 64 if str(element).startswith(("!llvm.ptr", "index")) else element.width


def _lanes(type_: ir.Type) -> int | None:
    return type_.shape[0] if isinstance(type_, ir.VectorType) else None


class _Machine:
    def __init__(self, smem_bytes: int) -> None:
        self.values: dict[ir.Value, np.ndarray] = {}
        self.memories: dict[int, np.ndarray] = {}
        self.smem = np.full(smem_bytes, 0xA5, np.uint8)
        # Who last stored and loaded each byte of SMEM, and after how many meetings.
        self.stored_by = np.full(smem_bytes, NOBODY)
        self.loaded_by = np.full(smem_bytes, NOBODY)
        self.stored_at = np.zeros((smem_bytes, 2), int)
        self.loaded_at = np.zeros((smem_bytes, 2), int)
        self.meetings = np.zeros(2, int)  # of the warpgroup, of each warp

    def block(self, block: Any, active: np.ndarray) -> None:
        for op in block.operations:
            self.step(op.operation, active)

    def step(self, op: ir.Operation, active: np.ndarray) -> None:
        name = op.name
        inputs = [self.values.get(v) for v in op.operands]
        if name == "scf.if":
            self.block(op.regions[0].blocks[0], active & (inputs[0] != 0))
        elif name == "nvvm.barrier":
            assert active.all()
            self.meetings += 1
        elif name == "nvvm.bar.warp.sync":
            self.meetings[1] += 1
        elif name == "llvm.store":
            self._store(inputs[0], inputs[1], op.operands[0].type, active)
        elif name not in _ENDS:
            result = self._result(op, name, inputs, active)
            self.values[op.results[0]] = result

    def _result(self, op, name, inputs, active) -> Any:
        type_ = op.results[0].type
        if name in _BINARY:
            value = _BINARY[name](*inputs)
        elif name in _SAME:
            value = inputs[0]
        elif name == "llvm.load":
            return self._load(inputs[0], type_, active)
        elif name == "arith.constant":
            return _constant(op.attributes["value"], type_)
        elif hasattr(self, method := "_" + re.sub(r"\W", "_", name)):
            return getattr(self, method)(op, inputs, type_)
        else:
            raise NotImplementedError(str(op))
        width = _width(type_)
        return value & ((1 << width) - 1) if width < 64 else value

    # --- operations -------------------------------------------------------------------

    def _nvvm_read_ptx_sreg_tid_x(self, op, inputs, type_):
        return THREADS.astype(np.int64)

    def _nvvm_elect_sync(self, op, inputs, type_):
        return (THREADS % 32 == 0).astype(np.int64)

    def _gpu_dynamic_shared_memory(self, op, inputs, type_):
        return None

    _builtin_unrealized_conversion_cast = _gpu_dynamic_shared_memory

    def _llvm_extractvalue(self, op, inputs, type_):
        return np.full(128, _SMEM << 40, np.int64)

    def _llvm_getelementptr(self, op, inputs, type_):
        (static,) = ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"])
        if len(inputs) == 2:
            return inputs[0] + inputs[1]
        return inputs[0] + static

    def _arith_trunci(self, op, inputs, type_):
        return inputs[0] & ((1 << _width(type_)) - 1)

    def _arith_cmpi(self, op, inputs, type_):
        predicate = ir.IntegerAttr(op.attributes["predicate"]).value
        return _COMPARE[predicate](*inputs).astype(np.int64)

    def _arith_select(self, op, inputs, type_):
        chosen = inputs[0] != 0
        wide = chosen[:, None] if _lanes(type_) else chosen
        return np.where(wide, inputs[1], inputs[2])

    def _vector_broadcast(self, op, inputs, type_):
        return np.repeat(inputs[0][:, None], _lanes(type_), axis=1)

    def _vector_extract(self, op, inputs, type_):
        (lane,) = ir.DenseI64ArrayAttr(op.attributes["static_position"])
        return inputs[0][:, lane]

    def _vector_from_elements(self, op, inputs, type_):
        return np.stack(inputs, axis=1)

    def _vector_bitcast(self, op, inputs, type_):
        width = _width(op.operands[0].type)
        bits = inputs[0][..., None] >> np.arange(width) & 1
        groups = bits.reshape(128, _lanes(type_), _width(type_))
        weights = np.int64(1) << np.arange(_width(type_))
        return (groups * weights).sum(axis=-1)

    def _llvm_call_intrinsic(self, op, inputs, type_):
        assert "llvm.nvvm.prmt" in str(op.attributes["intrin"])
        both = inputs[0] | inputs[1] << 32
        place = inputs[2][:, None] >> 4 * np.arange(4) & 7
        return ((both[:, None] >> 8 * place & 0xFF) << 8 * np.arange(4)).sum(axis=1)

    def _nvvm_shfl_sync(self, op, inputs, type_):
        kind = str(op.attributes["kind"])
        lane = THREADS % 32 ^ inputs[2] if "bfly" in kind else inputs[2]
        assert ((lane >= 0) & (lane < 32)).all()
        return inputs[1][WARPS * 32 + lane]

    # --- memory -----------------------------------------------------------------------

    def _places(self, address, type_) -> np.ndarray:
        count = (_lanes(type_) or 1) * _width(type_) // 8
        return address[:, None] + np.arange(count)

    def _load(self, address, type_, active) -> np.ndarray:
        places = self._places(address, type_)
        space, places = places >> 40, places & (1 << 40) - 1
        assert (address % places.shape[1] == 0)[active].all(), "an unaligned load"
        memory = self._memory(space)
        data = np.zeros(places.shape, np.int64)
        data[active] = memory[places[active]]
        if memory is self.smem:
            self._meet(places, active, self.stored_by, self.stored_at, "loaded")
            self._mark(places, active, self.loaded_by, self.loaded_at)
        lanes = _lanes(type_)
        bytes_each = _width(type_) // 8
        grouped = data.reshape(128, lanes or 1, bytes_each)
        value = (grouped << 8 * np.arange(bytes_each)).sum(axis=-1)
        return value if lanes else value[:, 0]

    def _store(self, value, address, type_, active) -> None:
        places = self._places(address, type_)
        space, places = places >> 40, places & (1 << 40) - 1
        assert (address % places.shape[1] == 0)[active].all(), "an unaligned store"
        bytes_each = _width(type_) // 8
        wide = value.reshape(128, -1, 1) >> 8 * np.arange(bytes_each) & 0xFF
        memory = self._memory(space)
        if memory is self.smem:
            self._meet(places, active, self.stored_by, self.stored_at, "stored")
            self._meet(places, active, self.loaded_by, self.loaded_at, "stored")
            self._mark(places, active, self.stored_by, self.stored_at)
        memory[places[active]] = wide.reshape(places.shape)[active]

    def _memory(self, space: np.ndarray) -> np.ndarray:
        number = int(space.flat[0])
        assert (space == number).all()
        return self.smem if number == _SMEM else self.memories[number]

    def _meet(self, places, active, by, at, what) -> None:
        """Raises unless the threads have met since others had these bytes."""
        threads = np.broadcast_to(THREADS[:, None], places.shape)[active]
        others, when = by[places[active]], at[places[active]]
        met = when[..., 0] < self.meetings[0]
        met |= (others // 32 == threads // 32) & (when[..., 1] < self.meetings[1])
        met |= (others == NOBODY) | (others == threads)
        assert met.all(), f"bytes of SMEM are {what} before the threads have met"

    def _mark(self, places, active, by, at) -> None:
        threads = np.broadcast_to(THREADS[:, None], places.shape)[active]
        by[places[active]] = threads
        at[places[active]] = self.meetings


def _constant(attribute: ir.Attribute, type_: ir.Type) -> np.ndarray:
    if isinstance(type_, ir.VectorType):
        splat = ir.DenseElementsAttr(attribute).get_splat_value()
        one = _constant(splat, type_.element_type)
        return np.repeat(one[:, None], type_.shape[0], axis=1)
    return np.full(128, int(attribute.value) & ((1 << _width(type_)) - 1), np.int64)
