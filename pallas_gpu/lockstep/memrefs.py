# SPDX-License-Identifier: Apache-2.0
"""Memrefs: what code of users makes of pointers, and their loads and stores.

A memref is the pointer to its first element; shape and strides are in its type, as
numbers. What `memref.alloca` makes is memory of each thread alone. The descriptor of a
memref is a structure, a dict of values by position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lockstep import accesses, values
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program, Step, runs

_DYNAMIC = ir.ShapedType.get_dynamic_stride_or_offset()


class _Own:
    """Memory of each thread of a strand: [lanes, elements]."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data


def _strides(type_: ir.MemRefType) -> list[int]:
    strides, _ = type_.get_strides_and_offset()
    if _DYNAMIC in strides:
        raise NotModelled(f"a memref with dynamic strides: {type_}")
    return strides


def _bytes(type_: ir.MemRefType) -> int:
    return values.dtype(type_.element_type).itemsize


def _space(type_: ir.MemRefType) -> int:
    space = type_.memory_space
    if isinstance(space, ir.IntegerAttr):
        return space.value
    return 3 if "workgroup" in str(space) else 0


# --- memrefs of memrefs ---------------------------------------------------------------


@runs(
    "memref.transpose",
    "memref.expand_shape",
    "memref.collapse_shape",
    "memref.cast",
)
def _same(program: Program, op: ir.Operation) -> Step:
    source, out = program.inputs(op)[0], program.outputs(op)[0]

    def same(strand: Any) -> None:
        strand.env[out] = strand.env[source]

    return same


@runs("memref.subview")
def _subview(program: Program, op: ir.Operation) -> Step:
    source, *dynamic = program.inputs(op)
    (out,) = program.outputs(op)
    type_ = op.operands[0].type
    static = list(ir.DenseI64ArrayAttr(op.attributes["static_offsets"]))
    if type_.element_type == ir.IntegerType.get_signless(4):
        raise NotModelled("a part of a memref of 4-bit elements")
    rest = iter(dynamic)
    known, terms = 0, []
    for offset, stride in zip(static, _strides(type_), strict=True):
        if offset == _DYNAMIC:
            terms.append((next(rest), stride * _bytes(type_)))
        else:
            known += offset * stride * _bytes(type_)

    def subview(strand: Any) -> None:
        env = strand.env
        steps = [values.signed(env[slot]) * step for slot, step in terms]
        strand.env[out] = sum(steps, env[source] + np.int64(known))

    return subview


# --- descriptors ----------------------------------------------------------------------


@runs("llvm.mlir.undef")
def _undef(program: Program, op: ir.Operation) -> None:
    (out,), type_ = program.outputs(op), op.results[0].type
    if str(type_).startswith("!llvm.struct"):
        program.constants[out] = {}
        return
    shape = (1, type_.shape[0]) if isinstance(type_, ir.VectorType) else (1,)
    program.constants[out] = np.zeros(shape, values.dtype(type_))


@runs("llvm.insertvalue")
def _insertvalue(program: Program, op: ir.Operation) -> Step:
    (container, value), (out,) = program.inputs(op), program.outputs(op)
    position = tuple(ir.DenseI64ArrayAttr(op.attributes["position"]))

    def insert(strand: Any) -> None:
        strand.env[out] = {**strand.env[container], position: strand.env[value]}

    return insert


@runs("builtin.unrealized_conversion_cast")
def _cast(program: Program, op: ir.Operation) -> Step:
    (source,), (out,) = program.inputs(op), program.outputs(op)
    to = op.results[0].type

    def cast(strand: Any) -> None:
        held = strand.env[source]
        if isinstance(held, dict):
            moved = held.get((2,), np.zeros(1, np.uint64))
            held = held[1,] + values.signed(moved) * _bytes(to)
        strand.env[out] = held

    return cast


# --- loads and stores -----------------------------------------------------------------


@runs("memref.alloca")
def _alloca(program: Program, op: ir.Operation) -> Step:
    (out,), type_ = program.outputs(op), op.results[0].type
    kind, size = values.dtype(type_.element_type), math.prod(type_.shape)

    def allocate(strand: Any) -> None:
        strand.env[out] = _Own(np.zeros((strand.lanes, size), kind))

    return allocate


def _place(
    program: Program, type_: ir.MemRefType, indices: list[int]
) -> Callable[[Any], Any]:
    """A function that returns the number of the indexed element."""
    steps = list(zip(indices, _strides(type_), strict=True))

    def place(strand: Any) -> Any:
        terms = [values.signed(strand.env[slot]) * step for slot, step in steps]
        return sum(terms, np.zeros(1, np.int64))

    return place


@runs("memref.load", "vector.load")
def _load(program: Program, op: ir.Operation) -> Step:
    source, *indices = program.inputs(op)
    (out,), type_ = program.outputs(op), op.operands[0].type
    place, result = _place(program, type_, indices), op.results[0].type
    from_memory = accesses.loading(out, result, _space(type_))
    size = _bytes(type_)

    def load(strand: Any) -> None:
        held, at = strand.env[source], place(strand)
        if isinstance(held, _Own):
            strand.env[out] = held.data[np.arange(strand.lanes), strand.per_lane(at)]
        else:
            from_memory(strand, held + at * size)

    return load


@runs("memref.store", "vector.store")
def _store(program: Program, op: ir.Operation) -> Step:
    value, target, *indices = program.inputs(op)
    type_, stored = op.operands[1].type, op.operands[0].type
    place, size = _place(program, type_, indices), _bytes(type_)
    to_memory = accesses.storing(value, stored, _space(type_))

    def store(strand: Any) -> None:
        held, at = strand.env[target], place(strand)
        if isinstance(held, _Own):
            active = strand.active()
            lanes, at = np.flatnonzero(active), strand.per_lane(at)[active]
            held.data[lanes, at] = strand.per_lane(strand.env[value])[active]
        else:
            to_memory(strand, held + at * size)

    return store
