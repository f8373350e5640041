# SPDX-License-Identifier: Apache-2.0
"""Copies that libtpu refuses, or that fail on the device, are refused when traced."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import pytest
from jax import lax

from pallas_gpu import errors
from pallas_gpu import sparsecore as plsc
from tests.support.refusal import refused_by
from tests.support.sparsecore import emitted
from tests.support.sparsecore.modules import CHIPS, needs_libtpu
from tests.support.sparsecore.tracing import array, scalars, trace, vectors

VMEM = plsc.VMEM((128,), jnp.float32)
SHARED = plsc.VMEM_SHARED((128,), jnp.float32)
TABLE = {"inputs": (array(512, 128), array(64, dtype=jnp.int32))}
ROWS = {
    "out_type": array(64, 128),
    "scratch_types": [
        plsc.VMEM((64,), jnp.int32),
        plsc.VMEM((64, 128), jnp.float32),
        plsc.VMEM_SHARED((64, 128), jnp.float32),
    ],
}


PAIRS = [
    (
        vectors(),
        "HBM-HBM HBM-VMEM HBM-VMEM_SHARED VMEM-HBM VMEM-VMEM_SHARED "
        "VMEM_SHARED-HBM VMEM_SHARED-VMEM VMEM_SHARED-VMEM_SHARED VMEM_SHARED-SMEM",
    ),
    (
        scalars(),
        "HBM-HBM HBM-VMEM_SHARED HBM-SMEM VMEM_SHARED-HBM VMEM_SHARED-VMEM_SHARED "
        "VMEM_SHARED-SMEM SMEM-HBM SMEM-SMEM",
    ),
]


def _copies(mesh, pairs):
    """A kernel that copies between pairs of memories, and its scratch."""
    names = ["VMEM_SHARED", "SMEM", *["VMEM"] * mesh.is_vector]

    def body(x, o, *scratch):
        of = dict(zip(names, scratch[: len(names)], strict=True), HBM=x)
        to = dict(zip(names, scratch[len(names) :], strict=True), HBM=o)
        for pair in pairs:
            src, dst = pair.split("-")
            plsc.sync_copy(of[src], to[dst])

    return body, [getattr(plsc, name)((128,), jnp.float32) for name in names * 2]


@pytest.mark.parametrize("mesh, possible", PAIRS)
def test_pairs_of_memories_that_can_copy(mesh, possible):
    names = ["HBM", "VMEM_SHARED", "SMEM", *["VMEM"] * mesh.is_vector]
    found = set()
    for src, dst in itertools.product(names, names):
        body, scratch = _copies(mesh, [f"{src}-{dst}"])
        try:
            trace(body, inputs=(array(128),), out_type=array(128), mesh=mesh,
                  scratch_types=scratch)  # fmt: skip
        except errors.MemorySpaceError:
            continue
        found.add(f"{src}-{dst}")
    assert found == set(possible.split())


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("mesh, possible", PAIRS)
def test_libtpu_compiles_all_of_them(mesh, possible, chip):
    body, scratch = _copies(mesh, possible.split())
    call = plsc.kernel(body, array(128), mesh=mesh, scratch_types=scratch)
    emitted.compiled(call, array(128), target=chip)


@refused_by(trace, scratch_types=[VMEM, VMEM])
def test_from_vmem_to_vmem(x, o, first, second):
    plsc.sync_copy(first, second)  # HERE


@refused_by(trace, scratch_types=[plsc.VMEM((100,), jnp.float32)])
def test_an_offset_in_hbm_that_is_not_a_multiple_of_32_bytes(x, o, part):
    plsc.sync_copy(x.at[100:200], part)  # HERE


@refused_by(trace, scratch_types=[VMEM])
def test_outside_of_the_array(x, o, part):
    plsc.sync_copy(x.at[plsc.ds(960, 128)], part)  # HERE


@refused_by(trace, scratch_types=[VMEM])
def test_an_input_is_the_destination(x, o, part):
    plsc.sync_copy(part, x.at[:128])  # HERE


@refused_by(trace, scratch_types=[VMEM, plsc.SemaphoreType.REGULAR])
def test_a_semaphore_of_another_type(x, o, part, sem):
    plsc.async_copy(x.at[:128], part, sem)  # HERE


@refused_by(trace, scratch_types=[VMEM, plsc.SemaphoreType.DMA((2,))])
def test_several_semaphores(x, o, part, sems):
    plsc.async_copy(x.at[:128], part, sems)  # HERE


@refused_by(trace, scratch_types=[VMEM])
def test_other_shapes(x, o, part):
    plsc.sync_copy(x, part)  # HERE


@refused_by(trace, scratch_types=[VMEM, SHARED])
def test_adding_without_indices(x, o, part, shared):
    plsc.sync_copy(part, shared, add=True)  # HERE


@refused_by(trace, **TABLE, **ROWS)
def test_adding_to_hbm(table, rows, o, index, part, shared):
    plsc.sync_copy(part, o.at[index], add=True)  # HERE


@refused_by(trace, **TABLE, **ROWS)
def test_indices_in_hbm(table, rows, o, index, part, shared):
    plsc.sync_copy(table.at[rows], part)  # HERE


@refused_by(trace, **TABLE, **ROWS)
def test_indices_of_vmem(table, rows, o, index, part, shared):
    plsc.sync_copy(part.at[index], shared)  # HERE


@refused_by(trace, **TABLE, **ROWS)
def test_indices_on_both_sides(table, rows, o, index, part, shared):
    plsc.sync_copy(table.at[index], o.at[index])  # HERE


@refused_by(trace, **TABLE, **ROWS)
def test_indices_of_the_second_dimension(table, rows, o, index, part, shared):
    plsc.sync_copy(table.at[:, index], part)  # HERE


@refused_by(trace, **TABLE, **ROWS)
def test_a_part_of_rows_that_indices_name(table, rows, o, index, part, shared):
    plsc.sync_copy(table.at[index].at[:, :128], part)  # HERE


@refused_by(
    trace,
    inputs=(array(512, 128), array(64)),
    out_type=array(64, 128),
    scratch_types=[plsc.VMEM((64,), jnp.float32), plsc.VMEM((64, 128), jnp.float32)],
)
def test_indices_that_are_floats(table, rows, o, index, part):
    plsc.sync_copy(table.at[index], part)  # HERE


NARROW = {
    "inputs": (array(512, 64),),
    "out_type": array(64, 64),
    "scratch_types": [plsc.VMEM((64,), jnp.int32), plsc.VMEM((64, 64), jnp.float32)],
}


@refused_by(trace, **NARROW)
def test_narrow_rows_under_compact_tiling(table, o, index, part):
    plsc.sync_copy(table.at[index], part)  # HERE


WIDE = {
    "inputs": (array(64, 256), array(64, 256, dtype=jnp.bfloat16)),
    "out_type": array(64, 256),
    "scratch_types": [
        plsc.VMEM((64,), jnp.int32),
        plsc.VMEM((64, 256), jnp.float32),
        plsc.VMEM((64, 256), jnp.bfloat16),
        plsc.VMEM_SHARED((64, 256), jnp.float32),
    ],
}


@refused_by(trace, **WIDE)
def test_rows_of_two_tiles_that_are_not_equal_parts(x, y, o, index, v, w, shared):
    plsc.sync_copy(x.at[3:10], v.at[:7])  # HERE


@refused_by(trace, **WIDE)
def test_columns_of_two_tiles_that_are_not_equal_parts(x, y, o, index, v, w, shared):
    plsc.sync_copy(x.at[:, :136], v.at[:, :136])  # HERE


@refused_by(trace, **WIDE)
def test_one_row_of_narrow_elements(x, y, o, index, v, w, shared):
    plsc.sync_copy(y.at[5], w.at[0])  # HERE


@refused_by(trace, **WIDE)
def test_rows_from_a_start_that_is_not_known(x, y, o, index, v, w, shared):
    rows = plsc.ds(2 * lax.axis_index("subcore"), 8)
    plsc.sync_copy(x.at[rows], v.at[:8])  # HERE


@refused_by(trace, **WIDE)
def test_wide_rows_of_shared_memory(x, y, o, index, v, w, shared):
    plsc.sync_copy(shared.at[index], v)  # HERE


@refused_by(trace, **WIDE, compiler_params=plsc.CompilerParams(tiling="sparsecore"))
def test_parts_of_rows_that_indices_name(x, y, o, index, v, w, shared):
    plsc.sync_copy(x.at[:, :128].at[index], v.at[:, :128])  # HERE


# Rows of an array of float32 with two tiles in a row, and of bfloat16: the first, and
# how many.
PARTS = {
    "float32": [(0, 8), (8, 16), (2, 4), (4, 8), (6, 4), (63, 1), (12, 8), (1, 7)],
    "bfloat16": [(0, 8), (8, 16), (2, 4), (4, 8), (6, 4), (62, 2), (12, 8)],
}


@needs_libtpu
@pytest.mark.parametrize("dtype", PARTS)
def test_libtpu_compiles_the_other_parts(dtype):
    def body(x, o, v):
        for first, count in PARTS[dtype]:
            plsc.sync_copy(x.at[first : first + count], v.at[:count])

        @plsc.loop(0, 64, step=8)
        def _(i):
            plsc.sync_copy(x.at[plsc.ds(i, 8)], v.at[plsc.ds(i, 8)])
            plsc.sync_copy(v.at[plsc.ds(i, 4)], o.at[plsc.ds(i, 4)])

    x = array(64, 256, dtype=dtype)
    scratch = [plsc.VMEM((64, 256), jnp.dtype(dtype))]
    call = plsc.kernel(body, x, mesh=vectors(), scratch_types=scratch)
    emitted.compiled(call, x)


def test_rows_of_any_width_under_the_tiling_of_sparsecores():
    def body(table, o, index, part):
        plsc.sync_copy(table.at[index], part)

    trace(body, **NARROW, compiler_params=plsc.CompilerParams(tiling="sparsecore"))
