# SPDX-License-Identifier: Apache-2.0
"""Pointers, loads and stores of threads, and the matrices of ldmatrix and stmatrix.

A pointer into GMEM is the number of a buffer, from 1, times 2**40, and a byte in it. A
pointer into SMEM is a byte of the block's window; one into the cluster's SMEM has the
block's rank, from 1, times 2**24 on top.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep import elements, values, variables
from pallas_gpu.lockstep.engine import LANES
from pallas_gpu.lockstep.memory import Memory
from pallas_gpu.lockstep.not_modelled import NotModelled
from pallas_gpu.lockstep.program import Program, Step, runs

BUFFER_SHIFT = 40
RANK_SHIFT = 24
# Where the dynamic SMEM starts in the block's window.
SMEM_BASE = 1024


def cluster_address(strand: Any, address: int) -> tuple[Any, int]:
    """The block that an address in the cluster's SMEM belongs to, and its window's."""
    rank = address >> RANK_SHIFT
    offset = address & (1 << RANK_SHIFT) - 1
    if not rank:
        return strand.cta, offset
    return strand.cta.cluster.ctas[rank - 1], offset


def _address_space(type_: ir.Type) -> int:
    text = str(type_)
    return int(text.split("<")[1].rstrip(">")) if "<" in text else 0


def memory_of(strand: Any, space: int, pointer: Any) -> tuple[Memory, np.ndarray]:
    """What the active threads access, and the byte in it, [threads]."""
    address = strand.per_lane(pointer)
    if strand.mask is not None:
        address = address[strand.mask]
    if space == 3:
        return strand.cta.smem, address - SMEM_BASE
    if space in (0, 1):
        number = address >> BUFFER_SHIFT
        if not (number == number[0]).all():
            raise NotModelled("an access to several buffers")
        memory = strand.cta.cluster.launch.buffer(int(number[0]))
        return memory, address & (1 << BUFFER_SHIFT) - 1
    if space == 7:
        return shared_of_cluster(strand, address)
    raise NotModelled(f"an access to address space {space}")


def shared_of_cluster(strand: Any, address: np.ndarray) -> tuple[Memory, np.ndarray]:
    """The SMEM of the block to whose window in the cluster's addresses belong.

    PTX ISA, Cluster-level shared memory: a block's SMEM exists while the block runs, so
    all blocks have to meet before the first access and after the last one.
    """
    ranks = address >> RANK_SHIFT
    if not (ranks == ranks[0]).all():
        raise NotModelled("an access to the SMEM of several blocks")
    cta, _ = cluster_address(strand, int(address[0]))
    if cta is not strand.cta:
        if not cta.cluster.barrier.generation:
            raise PtxError(
                "an access to the SMEM of another block, which may not have started"
            )
        if not cta.running:
            raise PtxError("an access to the SMEM of a block that has exited")
    return cta.smem, (address & (1 << RANK_SHIFT) - 1) - SMEM_BASE


def places_of(address: np.ndarray, size: int) -> np.ndarray:
    """[threads, bytes]: what each thread accesses, from its address."""
    if address.size and (address % size).any():
        raise PtxError(f"an access of {size} bytes to an unaligned address")
    return address[:, None] + np.arange(size)


def loading(out: int, type_: ir.Type, space: int) -> Callable[[Any, Any], None]:
    """A function that loads a value of a type from where a pointer points."""
    kind, length = values.dtype(type_), values.length(type_)
    size = kind.itemsize * (length or 1)

    def load(strand: Any, pointer: Any) -> None:
        memory, offset = memory_of(strand, space, pointer)
        places = places_of(offset, size)
        data = memory.load(strand, places).view(kind)
        if strand.mask is not None:
            full = np.zeros((strand.lanes, data.shape[1]), kind)
            full[strand.mask] = data
            data = full
        strand.env[out] = data if length is not None else data[:, 0]

    return load


def storing(value: int, type_: ir.Type, space: int) -> Callable[[Any, Any], None]:
    """A function that stores a value of a type to where a pointer points."""
    kind, length = values.dtype(type_), values.length(type_)
    size = kind.itemsize * (length or 1)

    def store(strand: Any, pointer: Any) -> None:
        memory, offset = memory_of(strand, space, pointer)
        places = places_of(offset, size)
        data = strand.per_lane(strand.env[value]).reshape(strand.lanes, -1)
        if strand.mask is not None:
            data = data[strand.mask]
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(places.shape)
        memory.store(strand, places, raw)

    return store


@runs("llvm.load")
def _load(program: Program, op: ir.Operation) -> Step:
    if variables.is_variable(op.operands[0]):
        return variables.load(program, op)
    (pointer,), (out,) = program.inputs(op), program.outputs(op)
    load = loading(out, op.results[0].type, _address_space(op.operands[0].type))
    return lambda strand: load(strand, strand.env[pointer])


@runs("llvm.store")
def _store(program: Program, op: ir.Operation) -> Step:
    if variables.is_variable(op.operands[1]):
        return variables.store(program, op)
    value, pointer = program.inputs(op)
    store = storing(value, op.operands[0].type, _address_space(op.operands[1].type))
    return lambda strand: store(strand, strand.env[pointer])


@runs("llvm.getelementptr")
def _getelementptr(program: Program, op: ir.Operation) -> Step:
    (out,) = program.outputs(op)
    base, *dynamic = program.inputs(op)
    static = list(ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"]))
    kind = ir.TypeAttr(op.attributes["elem_type"]).value
    each = 8 if str(kind).startswith("!llvm.ptr") else values.dtype(kind).itemsize
    each *= values.length(kind) or 1
    if len(static) != 1:
        raise NotModelled("llvm.getelementptr of several indices")
    if not dynamic:
        offset = np.int64(static[0] * each)

        def by_constant(strand: Any) -> None:
            strand.env[out] = strand.env[base] + offset

        return by_constant
    (index,) = dynamic

    def by_value(strand: Any) -> None:
        env = strand.env
        steps = values.signed(values.forced(env[index])).astype(np.int64)
        env[out] = env[base] + steps * each

    return by_value


@runs("llvm.addrspacecast")
def _addrspacecast(program: Program, op: ir.Operation) -> Step:
    spaces = _address_space(op.operands[0].type), _address_space(op.results[0].type)
    # GMEM is in the generic address space at its own addresses.
    if spaces not in ((3, 7), (0, 1), (1, 0)):
        raise NotModelled(f"llvm.addrspacecast {spaces}")
    # A block's own window is part of the cluster's.
    return elements.applied(program, op, lambda x: x)


@runs("llvm.ptrtoint", "llvm.inttoptr")
def _converted(program: Program, op: ir.Operation) -> Step:
    kind = values.dtype(op.results[0].type)
    return elements.applied(program, op, lambda x: x.astype(kind))


@runs("nvvm.mapa")
def _mapa(program: Program, op: ir.Operation) -> Step:
    (pointer, rank), (out,) = program.inputs(op), program.outputs(op)

    def mapa(strand: Any) -> None:
        number = strand.env[rank].astype(np.int64)
        active = strand.per_lane(number)[strand.active()]
        if not (active < len(strand.cta.cluster.ctas)).all():
            raise PtxError("mapa of a rank that the cluster does not have")
        strand.env[out] = strand.env[pointer] | (number + 1) << RANK_SHIFT

    return mapa


@runs("gpu.dynamic_shared_memory")
def _dynamic_smem(program: Program, op: ir.Operation) -> None:
    program.constants[program.outputs(op)[0]] = np.array([SMEM_BASE], np.int64)


# --- matrices -------------------------------------------------------------------------


@runs("nvvm.ldmatrix")
def _ldmatrix(program: Program, op: ir.Operation) -> Step:
    (pointer,), (out,) = program.inputs(op), program.outputs(op)
    matrices = ir.IntegerAttr(op.attributes["num"]).value
    places_of_words = _fragments(op)

    def load(strand: Any) -> None:
        strand.whole_warps("ldmatrix")
        address = strand.per_lane(strand.env[pointer]) - SMEM_BASE
        places = places_of_words(address, matrices)
        count = places.shape[1]
        if strand.mask is not None:
            places = places[strand.mask]
        data = strand.cta.smem.load(strand, places.reshape(-1, 4 * count))
        words = data.view(np.uint32)
        if strand.mask is not None:
            full = np.zeros((strand.lanes, count), np.uint32)
            full[strand.mask] = words
            words = full
        columns = tuple(words[:, i] for i in range(count))
        strand.env[out] = columns if count > 1 else columns[0]

    return load


@runs("nvvm.stmatrix")
def _stmatrix(program: Program, op: ir.Operation) -> Step:
    pointer, *sources = program.inputs(op)
    places_of_words = _fragments(op)

    def store(strand: Any) -> None:
        strand.whole_warps("stmatrix")
        address = strand.per_lane(strand.env[pointer]) - SMEM_BASE
        words = [strand.per_lane(strand.env[i]) for i in sources]
        data = np.ascontiguousarray(np.stack(words, axis=1)).view(np.uint8)
        places = places_of_words(address, len(sources))
        places = places.reshape(strand.lanes, -1)
        if strand.mask is not None:
            places, data = places[strand.mask], data[strand.mask]
        strand.cta.smem.store(strand, places, data)

    return store


# The bytes of each register, [lanes, registers, 4], by the rows' addresses and the
# number of matrices.
_Fragments = Callable[[np.ndarray, int], np.ndarray]


def _fragments(op: ir.Operation) -> _Fragments:
    """PTX ISA, ldmatrix and stmatrix: shape, .trans and type of the matrices."""
    attributes = op.attributes
    shape = str(attributes["shape"]) if "shape" in attributes else "m = 8, n = 8"
    m, n = (int(x) for x in re.findall(r"[mn] = (\d+)", shape))
    bits = int(re.findall(r"<b(\d+)>", str(attributes["eltType"]))[0])
    transposed = "col" in str(attributes["layout"])
    match op.name, (m, n), bits, transposed:
        case _, (8, 8), 16, False:
            return _straight
        case _, (8, 8), 16, True:
            return _transposed
        case "nvvm.ldmatrix", (16, 16), 8, True:
            return _transposed_bytes
        case "nvvm.stmatrix", (16, 8), 8, True:
            return _stored_bytes
    raise NotModelled(f"{op.name} of {shape}, {bits} bits")


def _rows(address: np.ndarray, count: int, rows: int) -> tuple[np.ndarray, ...]:
    """[warps, matrices, rows]: where rows start; warp and lane of each thread.

    Lane `rows` m + r names row r of matrix m (PTX ISA, ldmatrix).
    """
    warps = len(address) // LANES
    if rows * count > LANES:
        raise PtxError(f"{count} matrices of {rows} rows need more than {LANES} lanes")
    named = address.reshape(warps, LANES)[:, : rows * count].reshape(warps, count, rows)
    if (named % 16).any():
        raise PtxError("a row of ldmatrix or stmatrix is not aligned to 16 bytes")
    return (named, *np.divmod(np.arange(len(address)), LANES))


def _straight(address: np.ndarray, count: int) -> np.ndarray:
    """Elements 2t and 2t + 1 of row g, for g = lane / 4 and t = lane % 4."""
    rows, warp, lane = _rows(address, count, 8)
    start = rows[warp, :, lane // 4] + 4 * (lane % 4)[:, None]
    return start[..., None] + np.arange(4)


def _transposed(address: np.ndarray, count: int) -> np.ndarray:
    """Element g of rows 2t and 2t + 1."""
    rows, warp, lane = _rows(address, count, 8)
    first = rows[warp, :, 2 * (lane % 4)] + 2 * (lane // 4)[:, None]
    second = rows[warp, :, 2 * (lane % 4) + 1] + 2 * (lane // 4)[:, None]
    return np.stack([first, first + 1, second, second + 1], axis=-1)


def _transposed_bytes(address: np.ndarray, count: int) -> np.ndarray:
    """Two registers: element g, and g + 8, of rows 4t to 4t + 3."""
    rows, warp, lane = _rows(address, count, 16)
    four = np.stack([rows[warp, :, 4 * (lane % 4) + i] for i in range(4)], axis=-1)
    first = four + (lane // 4)[:, None, None]
    return np.stack([first, first + 8], axis=2).reshape(len(address), 2 * count, 4)


def _stored_bytes(address: np.ndarray, count: int) -> np.ndarray:
    """Row g, columns 2t and 2t + 1, then row g + 8, as of the 16x8 accumulator of mma.

    Columns of the matrix are rows in memory.
    """
    rows, warp, lane = _rows(address, count, 8)
    columns = [rows[warp, :, 2 * (lane % 4) + i] for i in range(2)]
    first = np.stack(columns, axis=-1) + (lane // 4)[:, None, None]
    return np.concatenate([first, first + 8], axis=-1)
