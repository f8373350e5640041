# SPDX-License-Identifier: Apache-2.0
"""Modules for SparseCores, written by hand: what libtpu takes, independent of emitters.

`kernel` is the frame of a function; the others are whole kernels: a gather that doubles
rows, a scatter-add into the memory that subcores share, a prefix sum of scalars.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import pytest

from pallas_gpu.arch import tpu
from pallas_gpu.sparsecore.runtime import offline_compiler, serialize
from pallas_gpu.sparsecore.runtime.bundles import BundleProgram
from pallas_gpu.sparsecore.runtime.custom_call import CustomCall, config_text

HBM, VMEM, SHARED, SMEM, SEMAPHORES = (
    f"#tpu.memory_space<{space}>"
    for space in ("hbm", "vmem", "vmem_shared", "smem", "semaphore_mem")
)
SEM = f"memref<!tpu.dma_semaphore, {SEMAPHORES}>"
CHIPS = [*tpu.TARGETS]

needs_libtpu = pytest.mark.skipif(
    not offline_compiler.is_available(), reason="libtpu is not installed"
)


def kernel(
    body: str,
    operands: Sequence[str],
    scratch: Sequence[str],
    *,
    ranks: Sequence[int],
    scalar: bool = False,
    cores: int = 1,
    subcores: int = 16,
) -> str:
    """A function of `operands` (inputs, then outputs) and `scratch`: `%name: type`."""
    grid = "%c: i32" if scalar else "%c: i32, %s: i32"
    kind = "sc_scalar_subcore" if scalar else "sc_vector_subcore"
    bounds = f"{cores}" if scalar else f"{cores}, {subcores}"
    axes = ["core_parallel"] if scalar else ["core_parallel", "subcore_parallel"]
    semantics = ", ".join(f"#tpu.dimension_semantics<{a}>" for a in axes)
    dims = "d0" if scalar else "d0, d1"
    windows = ", ".join(
        f"{{transform_indices = affine_map<({dims}) -> ({', '.join('0' * r)})>}}"
        for r in ranks
    )
    arguments = ", ".join([grid, *operands, *scratch])
    return f"""module {{
  func.func @kernel({arguments}) attributes {{
      tpu.core_type = #tpu.core_type<{kind}>, iteration_bounds = array<i64: {bounds}>,
      dimension_semantics = [{semantics}], scratch_operands = {len(scratch)} : i64,
      scalar_prefetch = 0 : i64, window_params = [{windows}]}} {{
    %c0 = arith.constant 0 : i32
    %i0 = arith.constant 0 : index
{body}
    return
  }}
}}"""


def ref(shape: Sequence[int], dtype: str, space: str) -> str:
    """The type of an array in memory."""
    return f"memref<{'x'.join([*map(str, shape), dtype])}, {space}>"


def copied(src: str, src_type: str, dst: str, dst_type: str) -> str:
    """A copy and its wait."""
    return f"""
    tpu.enqueue_dma source({src} : {src_type}) target({dst} : {dst_type}) \
target_semaphore(%sem : {SEM})
    tpu.wait_dma2 semaphore(%sem : {SEM}) src({src} : {src_type}) \
dst({dst} : {dst_type})
"""


def through(body: str = "", *, n: int = 128, dtype: str = "f32", more: str = "") -> str:
    """`%x` to `%buf` in VMEM, `body`, then `%buf` to `%out`."""
    x, buf = ref([n], dtype, HBM), ref([n], dtype, VMEM)
    scratch = [f"%buf: {buf}", f"%sem: {SEM}", *([more] if more else [])]
    text = copied("%x", x, "%buf", buf) + body + copied("%buf", buf, "%out", x)
    return kernel(text, [f"%x: {x}", f"%out: {x}"], scratch, ranks=[1, 1])


def gather(rows: int, width: int, count: int, lanes: int) -> str:
    """Rows of `%t` at the indices `%i`, doubled; 16 subcores, each with its part."""
    mine = count // 16
    t, i, o = ref([rows, width], "f32", HBM), ref([count], "i32", HBM), None
    o = ref([count, width], "f32", HBM)
    part, idx = ref([mine], "i32", HBM), ref([mine], "i32", VMEM)
    buf, out = ref([mine, width], "f32", VMEM), ref([mine, width], "f32", HBM)
    v = f"vector<{lanes}xf32>"
    load = "{strides = array<i32>} : " + f"{buf}, {v},"
    body = f"""
    %mine = arith.constant {mine} : i32
    %one = arith.constant 1 : index
    %rows = arith.constant {mine} : index
    %width = arith.constant {width} : index
    %lanes = arith.constant {lanes} : index
    %base = arith.muli %s, %mine : i32
    %part = tpu.memref_slice %i[%base] : {i} -> {part}
    {copied("%part", part, "%idx", idx)}
    tpu.enqueue_indirect_dma source(%t : {t}) target(%buf : {buf}) \
offsets(%idx : {idx}) semaphore(%sem : {SEM})
    tpu.wait_indirect_dma semaphore(%sem : {SEM}) src(%t : {t}) dst(%buf : {buf})
    scf.for %r = %i0 to %rows step %one {{
      scf.for %k = %i0 to %width step %lanes {{
        %v = tpu.vector_load %buf[%r, %k] {load}
        %w = arith.addf %v, %v : {v}
        tpu.vector_store %buf[%r, %k], %w {load}
      }}
    }}
    %dst = tpu.memref_slice %out[%base, %c0] : {o} -> {out}
    {copied("%buf", buf, "%dst", out)}"""
    return kernel(
        body,
        [f"%t: {t}", f"%i: {i}", f"%out: {o}"],
        [f"%idx: {idx}", f"%buf: {buf}", f"%sem: {SEM}"],
        ranks=[2, 1, 2],
    )


def scatter_add(rows: int, width: int, count: int, lanes: int) -> str:
    """`count` rows `%x` are added at the rows `%i` of zeros in VMEM_SHARED."""
    mine, updates = rows // 16, count // 16
    x, i = ref([count, width], "f32", HBM), ref([count], "i32", HBM)
    o, acc = ref([rows, width], "f32", HBM), ref([rows, width], "f32", SHARED)
    zeros, buf = ref([mine, width], "f32", VMEM), ref([updates, width], "f32", VMEM)
    idx, part = ref([updates], "i32", VMEM), ref([updates], "i32", HBM)
    mine_acc, mine_out = (ref([mine, width], "f32", space) for space in (SHARED, HBM))
    rows_in = ref([updates, width], "f32", HBM)
    v = f"vector<{lanes}xf32>"
    body = f"""
    %mine = arith.constant {mine} : i32
    %updates = arith.constant {updates} : i32
    %one = arith.constant 1 : index
    %rows = arith.constant {mine} : index
    %width = arith.constant {width} : index
    %lanes = arith.constant {lanes} : index
    %zero = arith.constant dense<0.0> : {v}
    scf.for %r = %i0 to %rows step %one {{
      scf.for %k = %i0 to %width step %lanes {{
        tpu.vector_store %zeros[%r, %k], %zero {{strides = array<i32>}} : {zeros}, {v},
      }}
    }}
    %first = arith.muli %s, %mine : i32
    %a = tpu.memref_slice %acc[%first, %c0] : {acc} -> {mine_acc}
    {copied("%zeros", zeros, "%a", mine_acc)}
    tpu.barrier barrier_id(%i0)
    %at = arith.muli %s, %updates : i32
    %xs = tpu.memref_slice %x[%at, %c0] : {x} -> {rows_in}
    {copied("%xs", rows_in, "%buf", buf)}
    %is = tpu.memref_slice %i[%at] : {i} -> {part}
    {copied("%is", part, "%idx", idx)}
    tpu.enqueue_indirect_dma source(%buf : {buf}) target(%acc : {acc}) \
offsets(%idx : {idx}) semaphore(%sem : {SEM}) {{add = true}}
    tpu.wait_indirect_dma semaphore(%sem : {SEM}) src(%buf : {buf}) dst(%acc : {acc})
    tpu.barrier barrier_id(%i0)
    %dst = tpu.memref_slice %out[%first, %c0] : {o} -> {mine_out}
    {copied("%a", mine_acc, "%dst", mine_out)}"""
    scratch = [f"%acc: {acc}", f"%zeros: {zeros}", f"%buf: {buf}", f"%idx: {idx}"]
    return kernel(
        body,
        [f"%x: {x}", f"%i: {i}", f"%out: {o}"],
        [*scratch, f"%sem: {SEM}"],
        ranks=[2, 1, 2],
    )


def prefix_sum(n: int, cores: int = 1, operation: str = "arith.addi") -> str:
    """Sums of the beginnings of a row for each core, by its scalar subcore."""
    dtype = "f32" if operation.endswith("f") else "i32"
    x, row, m = (
        ref([k, n], dtype, space) for k, space in ((cores, HBM), (1, HBM), (1, SMEM))
    )
    body = f"""
    %one = arith.constant 1 : index
    %n = arith.constant {n} : index
    %src = tpu.memref_slice %x[%c, %c0] : {x} -> {row}
    %dst = tpu.memref_slice %out[%c, %c0] : {x} -> {row}
    {copied("%src", row, "%m", m)}
    scf.for %i = %one to %n step %one {{
      %p = arith.subi %i, %one : index
      %a = memref.load %m[%i0, %p] : {m}
      %b = memref.load %m[%i0, %i] : {m}
      %s = {operation} %a, %b : {dtype}
      memref.store %s, %m[%i0, %i] : {m}
    }}
    {copied("%m", m, "%dst", row)}"""
    return kernel(
        body,
        [f"%x: {x}", f"%out: {x}"],
        [f"%m: {m}", f"%sem: {SEM}"],
        ranks=[2, 2],
        scalar=True,
        cores=cores,
    )


def compiled(
    text: str,
    operands: Sequence[jax.ShapeDtypeStruct],
    results: Sequence[jax.ShapeDtypeStruct],
    target: str = "tpu7x",
    *,
    cores: int = 1,
    **options,
) -> BundleProgram:
    """The bundles of a module for a chip."""
    bytecode = serialize.serialize(serialize.parse(text))
    call = CustomCall(
        config_text(bytecode, cores=cores, **options),
        tuple(range(len(operands))),
        tuple(range(len(results))),
    )
    return offline_compiler.compile_kernel(
        [call],
        name="kernel",
        target=target,
        operands=[(x.shape, x.dtype.name) for x in operands],
        results=[(x.shape, x.dtype.name) for x in results],
    ).program
