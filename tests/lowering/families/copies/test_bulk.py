# SPDX-License-Identifier: Apache-2.0
"""Copies of adjacent bytes need no tensor map: one bulk copy in each direction."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.host import counted as array
from tests.support.lockstep import faults
from tests.support.lockstep.engine import KernelError
from tests.support.semantics import BOTH, under

F32, BF16, I8 = jnp.float32, jnp.bfloat16, jnp.int8
PROMISE = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
UNDEFINED = plgpu.OOBFillMode.UNDEFINED
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"


def through_smem(shape, dtype, part, transforms=(), **options):
    """A part of an array goes to SMEM, and from there to that part of the result."""
    x, n = array(shape, dtype), np.array([2], np.int32)
    chosen = part(x, 2)
    expected = np.zeros_like(x)
    view = part(expected, 2)
    view[...] = chosen

    def body(x, n, o, tile, full):
        o[...] = jnp.zeros(shape, dtype)
        plgpu.commit_gmem()
        which = n[0]
        plgpu.copy_gmem_to_smem(part(x.at, which), tile, full, **options)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(tile, part(o.at, which))
        plgpu.wait_smem_to_gmem(0)

    make = everywhere.kernel(
        body,
        jax.ShapeDtypeStruct(shape, dtype),
        plgpu.SMEM(chosen.shape, dtype, transforms=transforms),
        plgpu.Barrier(),
    )

    return make, [x, n], expected


def rows(x, n):
    """Two rows from a start that is known at run time."""
    return x[plgpu.ds(n, 2)] if hasattr(n, "aval") else x[n : n + 2]


def part_of_part(x, n):
    """A part that does not start at a multiple of 16 bytes; its part does."""
    part = x[3:]
    return getattr(part, "at", part)[1:97]


# Parts of which loads and stores, or loads alone, are bulk copies.
BOTH_WAYS = {
    "one dimension": ((512,), F32, lambda x, n: x[:]),
    "a part of one dimension": ((512,), BF16, lambda x, n: x[64:192]),
    "a row": ((6, 64), F32, lambda x, n: x[3]),
    "a row named at run time": ((6, 64), F32, lambda x, n: x[n]),
    "a row of bytes": ((6, 128), I8, lambda x, n: x[n]),
    "a row of a stack": ((3, 4, 32), F32, lambda x, n: x[n, 3]),
    "a part of a row": ((6, 64), F32, lambda x, n: x[n, 16:48]),
    "a row with its dimension": ((6, 64), F32, lambda x, n: x[3:4]),
    "a part of an odd number": ((101,), F32, lambda x, n: x[4:100]),
    "a part of a part of an odd number": ((101,), F32, part_of_part),
    "a part of a row of an odd number": ((6, 65), F32, lambda x, n: x[4, :64]),
    "rows that would be many boxes": ((4, 257), F32, lambda x, n: x[:]),
}
LOADS = {
    "rows that are promised": ((6, 64), F32, rows, (), PROMISE),
    "rows outside of which nothing is asked": (
        (6, 64), F32, lambda x, n: x[2:4], (), UNDEFINED,
    ),
}  # fmt: skip
NEITHER = {
    "several rows": ((6, 64), F32, lambda x, n: x[2:4]),
    "several rows that start at run time": ((6, 64), F32, rows),
    "columns": ((16, 64), F32, lambda x, n: x[:, 16:32]),
    "columns that are promised": ((16, 64), F32, lambda x, n: x[:, 16:32], (), PROMISE),
    "swizzled": (
        (16, 32),
        BF16,
        lambda x, n: x[:],
        (plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32)),
        PROMISE,
    ),
}
# Rows that are no multiples of 16 bytes, of which a part starts and ends at multiples.
ODD_ROWS = {
    "rows": ((8, 65), F32, lambda x, n: x[4:8]),
    "the array": ((8, 65), BF16, lambda x, n: x[:]),
    "rows of a stack": ((4, 8, 3), F32, lambda x, n: x[n]),
    "rows of bytes": ((32, 7), I8, lambda x, n: x[16:32]),
}


def odd_rows(x, n):
    """Four rows from a multiple of four that is known at run time."""
    return x[plgpu.ds(n * 4, 4)] if hasattr(n, "aval") else x[n * 4 : n * 4 + 4]


BY_THREADS = {
    "a row of an odd number": ((6, 65), F32, lambda x, n: x[4]),
    "an odd number": ((101,), F32, lambda x, n: x[:]),
    "rows of an odd number from a start at run time": ((16, 65), F32, odd_rows),
}
LOADED = {"such rows that are promised": ((16, 65), F32, odd_rows, (), PROMISE)}
CASES = {**BOTH_WAYS, **LOADS, **NEITHER, **ODD_ROWS, **BY_THREADS, **LOADED}


def case(name, **options):
    shape, dtype, part, *rest = CASES[name]
    transforms, mode = (*rest, (), None)[:2] if len(rest) < 2 else rest
    return through_smem(shape, dtype, part, transforms, oob_mode=mode, **options)


@pytest.mark.parametrize("name", CASES)
def test_parts_travel_through_smem(name):
    everywhere.check(*case(name))


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("name", CASES)
def test_a_copy_is_of_bytes_or_of_a_box(name, semantics):
    make, args, _ = case(name)
    (report,) = plgpu.offline.lower(under(semantics, make()), *args)
    boxes = report.mlir.count("nvvm.cp.async.bulk.tensor")
    found = [report.mlir.count(LOAD), report.mlir.count(STORE), boxes]
    wanted = [0, 0, 2]
    if name in BY_THREADS:
        wanted = [0, 0, 0]
    elif name in LOADED:
        wanted = [1, 0, 0]
    elif name in BOTH_WAYS:
        wanted = [1, 1, 0]
    elif name in LOADS:
        wanted = [1, 0, 1]
    assert found == wanted


@everywhere.gives(
    [array((100,), F32)],
    lambda x: np.pad(x[64:], (0, 92)),
    plgpu.SMEM((128,), F32),
    plgpu.Barrier(),
)
def test_a_part_over_the_edge_is_a_box_and_filled_with_zeros(x, o, tile, full):
    plgpu.copy_gmem_to_smem(x.at[plgpu.ds(64, 128)], tile, full)
    plgpu.barrier_wait(full)
    o[...] = tile[...]


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("hint", [None, "evict_first"])
def test_ptx_has_bulk_copies_and_no_descriptor(hint, semantics):
    make, args, _ = case("a row named at run time", cache_hint=hint)
    (report,) = plgpu.offline.compile(under(semantics, make()), *args)
    hinted = "" if hint is None else ".L2::cache_hint"
    assert f"{LOAD}{hinted} [" in report.ptx
    assert f"{STORE} [" in report.ptx
    assert "bulk.tensor" not in report.ptx
    assert report.resources.spill_store_bytes == 0


def test_hints_change_no_result():
    everywhere.check(*case("one dimension", cache_hint="evict_last"))


MISTAKES = {
    "no copy": (faults.drop_text(r"cp\.async\.bulk\.shared"), "deadlock"),
    "no fence": (faults.drop("nvvm.fence.proxy"), "overwrites .* without fence"),
}


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_copy_is_found(mistake, semantics):
    fault, message = MISTAKES[mistake]
    make, args, _ = case("one dimension")
    with pytest.raises(KernelError, match=message):
        faults.run(under(semantics, make()), args, fault)
