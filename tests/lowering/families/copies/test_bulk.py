# SPDX-License-Identifier: Apache-2.0
"""Copies of adjacent bytes need no tensor map: one bulk copy in each direction."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.host import counted as array
from tests.support.semantics import BOTH, under

F32, BF16, I8 = jnp.float32, jnp.bfloat16, jnp.int8
PROMISE = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
UNDEFINED = plgpu.OOBFillMode.UNDEFINED
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"


def through_smem(shape, dtype, part, transforms=(), **options):
    """A part of an array goes to SMEM, and from there to that part of the result."""
    x, n = array(shape, dtype), np.array([2], np.int32)
    expected = np.zeros_like(x)
    part(expected, 2)[...] = part(x, 2)

    def body(x, n, o, tile, full):
        o[...] = jnp.zeros(shape, dtype)
        plgpu.commit_gmem()
        which = n[0]
        plgpu.copy_gmem_to_smem(part(x.at, which), tile, full, **options)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(tile, part(o.at, which))
        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM(part(x, 2).shape, dtype, transforms=transforms)
    return everywhere.kernel(body, x, tile, plgpu.Barrier()), [x, n], expected


def rows(x, n):
    """Two rows from a start that is known at run time."""
    return x[plgpu.ds(n, 2)] if hasattr(n, "aval") else x[n : n + 2]


def part_of_part(x, n):
    """A part that does not start at a multiple of 16 bytes; its part does."""
    part = x[3:]
    return getattr(part, "at", part)[1:97]


def odd_rows(x, n):
    """Four rows from a multiple of four that is known at run time."""
    return x[plgpu.ds(n * 4, 4)] if hasattr(n, "aval") else x[n * 4 : n * 4 + 4]


SWIZZLED = (plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32))
# By the number of loads and stores that are bulk copies, and of boxes.
FORMS = {
    (1, 1, 0): {
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
    },
    (1, 0, 1): {
        "rows that are promised": ((6, 64), F32, rows, (), PROMISE),
        "rows outside of which nothing is asked": (
            (6, 64), F32, lambda x, n: x[2:4], (), UNDEFINED,
        ),
    },
    (1, 0, 0): {"odd rows that are promised": ((16, 65), F32, odd_rows, (), PROMISE)},
    (0, 0, 2): {
        "several rows": ((6, 64), F32, lambda x, n: x[2:4]),
        "several rows that start at run time": ((6, 64), F32, rows),
        "columns": ((16, 64), F32, lambda x, n: x[:, 16:32]),
        "columns that are promised": (
            (16, 64), F32, lambda x, n: x[:, 16:32], (), PROMISE,
        ),
        "swizzled": ((16, 32), BF16, lambda x, n: x[:], SWIZZLED, PROMISE),
        # Rows that are no multiples of 16 bytes, of which a part starts and ends there.
        "odd rows": ((8, 65), F32, lambda x, n: x[4:8]),
        "an array of odd rows": ((8, 65), BF16, lambda x, n: x[:]),
        "rows of a stack": ((4, 8, 3), F32, lambda x, n: x[n]),
        "rows of bytes": ((32, 7), I8, lambda x, n: x[16:32]),
    },
    (0, 0, 0): {
        "a row of an odd number": ((6, 65), F32, lambda x, n: x[4]),
        "an odd number": ((101,), F32, lambda x, n: x[:]),
        "rows of an odd number from a start at run time": ((16, 65), F32, odd_rows),
    },
}  # fmt: skip
CASES = {
    name: (*case, (), None)[:5] for x in FORMS.values() for name, case in x.items()
}


def case(name, **options):
    *of_part, mode = CASES[name]
    return through_smem(*of_part, oob_mode=mode, **options)


@pytest.mark.parametrize("name", CASES)
def test_parts_travel_through_smem(name):
    everywhere.check(*case(name))


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("name", CASES)
def test_a_copy_is_of_bytes_or_of_a_box(name, semantics):
    make, args, _ = case(name)
    (report,) = plgpu.offline.lower(under(semantics, make()), *args)
    found = [LOAD, STORE, "nvvm.cp.async.bulk.tensor"]
    assert name in FORMS[tuple(report.mlir.count(x) for x in found)]


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
