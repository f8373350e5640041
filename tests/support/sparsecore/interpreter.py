# SPDX-License-Identifier: Apache-2.0
"""Executes modules for SparseCores over NumPy: what was emitted, without a TPU.

What each operation does to a subcore, its memories and its copies; see `machine` for
who executes them, and `vector_values` for operations on values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from tests.support.sparsecore.machine import (
    Machine,
    ModuleError,
    Steps,
    Subcore,
    View,
    Waiting,
    address,
    operation,
)
from tests.support.sparsecore.vector_values import dtype_of, poison, shape_of

__all__ = ["ModuleError", "execute", "run"]

# --- control flow ---------------------------------------------------------------------


@operation("scf.for")
def _for(s: Subcore, op: Any, args: list[Any]) -> Steps:
    low, high, step, *carried = args
    body = op.regions[0].blocks[0]
    for i in range(int(low), int(high), int(step)):
        counter = np.asarray(i).astype(np.asarray(low).dtype)
        s.env.update(zip(body.arguments, [counter, *carried], strict=True))
        carried = yield from s.run(body)
    return carried


@operation("scf.if")
def _if(s: Subcore, op: Any, args: list[Any]) -> Steps:
    region = op.regions[0 if args[0] else 1]
    if not len(region.blocks):
        return []
    return (yield from s.run(region.blocks[0]))


@operation("scf.while")
def _while(s: Subcore, op: Any, args: list[Any]) -> Steps:
    before, after = (region.blocks[0] for region in op.regions)
    while True:
        s.env.update(zip(before.arguments, args, strict=True))
        proceeds, *args = yield from s.run(before)
        if not proceeds:
            return args
        s.env.update(zip(after.arguments, args, strict=True))
        args = yield from s.run(after)


@operation("tpu.region", "tpu.trace")
def _region(s: Subcore, op: Any, args: list[Any]) -> Steps:
    block = op.regions[0].blocks[0]
    results = yield from s.run(block)
    for inner in block.operations:
        if inner.operation.name in ("memref.alloca", "tpu.sem_alloc"):
            s.machine.release(inner.results[0], s.core, s.subcore)
    return results


@operation("memref.alloca", "tpu.sem_alloc")
def _alloca(s: Subcore, op: Any, args: list[Any]) -> list[Any]:
    return [s.machine.allocate(op.results[0], s.core, s.subcore)]


# --- references -----------------------------------------------------------------------


@operation("tpu.memref_slice")
def _slice(s: Subcore, op: Any, args: list[Any]) -> list[Any]:
    view, shape = args[0], ir.MemRefType(op.results[0].type).shape
    starts = [int(x) for x in args[1:]]
    where = tuple(slice(i, i + n) for i, n in zip(starts, shape, strict=True))
    for axis in zip(where, view.array.shape, strict=True):
        _require_inside(*axis, op)
    return [view.part(view.array[where])]


def _require_inside(where: slice, size: int, op: Any) -> None:
    if not 0 <= where.start <= where.stop <= size:
        raise ModuleError(f"{where} is outside of {size} elements: {op}")


@operation("tpu.erase_memref_layout")
def _erase(s: Subcore, op: Any, args: list[Any]) -> list[Any]:
    return args


@operation("tpu.memref_squeeze")
def _squeeze(s: Subcore, op: Any, args: list[Any]) -> list[Any]:
    shape = ir.MemRefType(op.results[0].type).shape
    kept = [n for n in args[0].array.shape if n != 1]
    array = args[0].array
    if list(shape) != kept:
        # Some axes of size 1 remain.
        return [args[0].part(array.reshape(shape))]
    return [args[0].part(array.squeeze())]


@operation("tpu.memref_reshape", "tpu.memref_bitcast")
def _reshape(s: Subcore, op: Any, args: list[Any]) -> list[Any]:
    t = ir.MemRefType(op.results[0].type)
    array = args[0].array
    viewed = array.reshape(-1).view(dtype_of(t.element_type)).reshape(t.shape)
    assert np.shares_memory(viewed, array), "a reshape of scattered elements"
    return [args[0].part(viewed)]


# --- loads and stores -----------------------------------------------------------------


def _window(s: Subcore, op: Any, t: Any) -> tuple[View, np.ndarray]:
    """The elements that a vector of a type at an operation's indices has."""
    view, shape = s.env[op.base], shape_of(t)
    starts = [int(s.env[i]) for i in op.indices]
    full = [1] * (len(starts) - len(shape)) + list(shape)
    where = tuple(slice(i, i + n) for i, n in zip(starts, full, strict=True))
    for axis in zip(where, view.array.shape, strict=True):
        _require_inside(*axis, op)
    if view.space != "vmem":
        raise ModuleError(f"a vector access to {view.space}")
    return view, view.array[where].reshape(shape)


@operation("tpu.vector_load")
def _vector_load(s: Subcore, op: Any, args: list[Any]) -> list[Any]:
    mask = s.operand(op, "mask")
    _, part = _window(s, op, op.results[0].type)
    if mask is None:
        return [part.copy()]
    made = poison(part.shape, part.dtype)
    made[mask] = part[: int(mask.sum())]
    return [made]


@operation("tpu.vector_store")
def _vector_store(s: Subcore, op: Any, args: list[Any]) -> list[Any]:
    mask, value = s.operand(op, "mask"), s.env[op.operands[0]]
    _, part = _window(s, op, op.operands[0].type)
    assert np.shares_memory(part, s.env[op.base].array), "scattered elements"
    if mask is not None:
        value = value[mask]
        part = part[: len(value)]
    adds = ir.BoolAttr(op.attributes["add"]).value if "add" in op.attributes else False
    part[...] = part + value if adds else value
    return []


@operation("tpu.vector_load_idx")
def _load_idx(s: Subcore, op: Any, args: list[Any]) -> list[Any]:
    view, mask = s.env[op.base], s.operand(op, "mask")
    indices = [s.env[i] for i in op.indices]
    lanes = range(len(indices[0]))
    made = poison((len(indices[0]),), view.array.dtype)
    for lane in lanes:
        if mask is None or mask[lane]:
            made[lane] = view.array[_element(view, indices, lane, op)]
    return [made]


@operation("tpu.vector_store_idx")
def _store_idx(s: Subcore, op: Any, args: list[Any]) -> list[Any]:
    view, mask = s.env[op.base], s.operand(op, "mask")
    value, indices = s.env[op.operands[0]], [s.env[i] for i in op.indices]
    adds = ir.BoolAttr(op.attributes["add"]).value if "add" in op.attributes else False
    for lane in range(len(value)):
        if mask is None or mask[lane]:
            at = _element(view, indices, lane, op)
            view.array[at] = view.array[at] + value[lane] if adds else value[lane]
    return []


def _element(view: View, indices: list[Any], lane: int, op: Any) -> tuple[int, ...]:
    at = tuple(int(i[lane]) for i in indices)
    for i, n in zip(at, view.array.shape, strict=True):
        _require_inside(slice(i, i + 1), n, op)
    return at


@operation("memref.load", "memref.store")
def _scalar_access(s: Subcore, op: Any, args: list[Any]) -> list[Any]:
    stores = op.operation.name == "memref.store"
    view, *indices = args[1:] if stores else args
    if view.space != "smem":
        raise ModuleError(f"a scalar access to {view.space}")
    at = tuple(int(i) for i in indices)
    for i, n in zip(at, view.array.shape, strict=True):
        _require_inside(slice(i, i + 1), n, op)
    if stores:
        view.array[at] = args[0]
        return []
    return [view.array[at].copy()]


# --- copies ---------------------------------------------------------------------------

_STREAMS = ({"hbm", "vmem"}, {"vmem_shared", "vmem"})


def _units(src: View, dst: View) -> int:
    """What a copy adds to its semaphore: words of a stream, 32 bytes of a DMA."""
    side = src if src.space == "vmem" else dst
    unit = 4 if {src.space, dst.space} in _STREAMS else 32
    return -(-side.array.nbytes // unit)


def _require_aligned(view: View, op: Any) -> None:
    """Copies start at multiples of 32 bytes in HBM."""
    if view.space != "hbm" or not view.array.size:
        return
    at = address(view.array) - address(view.root)
    row = view.root.shape[-1] * view.root.itemsize if view.root.ndim else 0
    if (at % row if view.root.ndim > 1 else at) % 32:
        raise ModuleError(f"byte {at} of HBM is not a multiple of 32: {op}")


@operation("tpu.enqueue_dma")
def _enqueue_dma(s: Subcore, op: Any, args: list[Any]) -> Steps:
    src, dst = s.operand(op, "source"), s.operand(op, "target")
    if src.array.shape != dst.array.shape or src.array.dtype != dst.array.dtype:
        raise ModuleError(f"a copy of different arrays: {op}")
    if src.space == dst.space == "vmem":
        raise ModuleError(f"a copy from VMEM to VMEM: {op}")
    for view in (src, dst):
        _require_aligned(view, op)

    def move() -> None:
        dst.array[...] = src.array

    s.copy([move], _units(src, dst), s.operand(op, "target_semaphore"))
    yield Waiting(lambda: True, "")
    return []


@operation("tpu.wait_dma2")
def _wait_dma(s: Subcore, op: Any, args: list[Any]) -> Steps:
    src, dst = s.operand(op, "src"), s.operand(op, "dst")
    yield from s.wait(s.operand(op, "semaphore"), _units(src, dst), f"wait: {op}")
    return []


@operation("tpu.enqueue_indirect_dma")
def _enqueue_indirect(s: Subcore, op: Any, args: list[Any]) -> Steps:
    src, dst = s.operand(op, "source"), s.operand(op, "target")
    offsets, ignored = s.operand(op, "offsets"), s.operand(op, "offset_filter")
    gather = dst.space == "vmem"
    adds = "add" in op.attributes and ir.BoolAttr(op.attributes["add"]).value
    if adds and dst.space == "hbm":
        raise ModuleError("an indirect stream cannot add to HBM")
    table, rows = (src, dst) if gather else (dst, src)
    # A table can have one axis of size 1 in front.
    array = table.array
    if array.ndim == rows.array.ndim + 1:
        array = array[0]
    if array.shape[1:] != rows.array.shape[1:]:
        raise ModuleError(f"rows of different shapes: {op}")

    def part(k: int) -> Callable[[], None]:
        def move() -> None:
            # Indices in memory are read when the row is moved.
            i = int(offsets.array[k] if isinstance(offsets, View) else offsets[k])
            if ignored is not None and i == int(ignored):
                return
            _require_inside(slice(i, i + 1), len(array), op)
            to, read = (rows.array, array) if gather else (array, rows.array)
            at, of = (k, i) if gather else (i, k)
            to[at] = to[at] + read[of] if adds else read[of]

        return move

    count = len(offsets.array if isinstance(offsets, View) else offsets)
    if count != len(rows.array):
        raise ModuleError(f"{count} indices for {len(rows.array)} rows: {op}")
    units = -(-rows.array.nbytes // 4)
    s.copy([part(k) for k in range(count)], units, s.operand(op, "semaphore"))
    yield Waiting(lambda: True, "")
    return []


@operation("tpu.wait_indirect_dma")
def _wait_indirect(s: Subcore, op: Any, args: list[Any]) -> Steps:
    src, dst = s.operand(op, "src"), s.operand(op, "dst")
    rows = dst if dst.space == "vmem" else src
    units = -(-rows.array.nbytes // 4)
    yield from s.wait(s.operand(op, "semaphore"), units, f"wait: {op}")
    return []


# --- synchronization ------------------------------------------------------------------


def _chosen(s: Subcore, op: Any, core: str, subcore: str) -> tuple[int, int]:
    given = [s.operand(op, name) if name else None for name in (core, subcore)]
    own = (s.core, s.subcore)
    first, second = (
        mine if x is None else int(x) for x, mine in zip(given, own, strict=True)
    )
    return first, second


@operation("tpu.barrier")
def _barrier(s: Subcore, op: Any, args: list[Any]) -> Steps:
    yield Waiting(None, "barrier")
    return []


@operation("tpu.sem_signal")
def _signal(s: Subcore, op: Any, args: list[Any]) -> Steps:
    view = s.operand(op, "semaphore")
    other = _chosen(s, op, "core_id", "subcore_id")
    if other != (s.core, s.subcore):
        view = s.machine.of_other(view, *other)
    view.array[...] += int(s.operand(op, "amount"))
    yield Waiting(lambda: True, "")
    return []


@operation("tpu.sem_wait")
def _sem_wait(s: Subcore, op: Any, args: list[Any]) -> Steps:
    view, amount = s.operand(op, "semaphore"), int(s.operand(op, "amount"))
    yield from s.wait(view, amount, f"wait: {op}")
    return []


@operation("tpu.sem_read")
def _sem_read(s: Subcore, op: Any, args: list[Any]) -> Steps:
    yield Waiting(lambda: True, "")
    return [np.int32(s.operand(op, "semaphore").array)]


@operation("tpu.fetch_and_add_sync")
def _fetch_and_add(s: Subcore, op: Any, args: list[Any]) -> Steps:
    yield Waiting(lambda: True, "")
    # The operand that MLIR calls core_id names a subcore of the core.
    other = (s.core, int(s.operand(op, "core_id")))
    view = s.machine.of_other(s.operand(op, "base"), *other)
    at = tuple(int(s.env[i]) for i in op.indices)
    old = view.array[at].copy()
    view.array[at] = old + s.operand(op, "value")
    return [old]


@operation("tpu.delay")
def _delay(s: Subcore, op: Any, args: list[Any]) -> Steps:
    yield Waiting(lambda: True, "")
    return []


@operation("tpu.log", "tpu.log_buffer")
def _log(s: Subcore, op: Any, args: list[Any]) -> list[Any]:
    shown = [x.array.copy() if isinstance(x, View) else x for x in args]
    tag = ir.StringAttr(op.attributes["tag"]).value
    s.machine.log.append(((s.core, s.subcore), tag, shown))
    return []


def execute(module: ir.Module, *inputs: Any, seed: int = 0) -> list[np.ndarray]:
    """Runs a module on all its cores and subcores; returns the outputs.

    Args:
      inputs: the arrays of its first operands; the others are outputs.
      seed: decides the order of subcores and when copies move: 0 at once, 1 late.

    Raises:
      ModuleError: the module hangs, leaves its arrays, or ends with work in flight.
    """
    return run(module, *inputs, seed=seed)[0]


def run(
    module: ir.Module, *inputs: Any, seed: int = 0
) -> tuple[list[np.ndarray], list[Any]]:
    """As `execute`; returns the outputs and what was logged."""
    with module.context:
        machine = Machine(module, inputs, seed)
        machine.run()
        return [view.array for view in machine.arrays[len(inputs) :]], machine.log
