# SPDX-License-Identifier: Apache-2.0
"""Copies of adjacent bytes need no tensor map: one bulk copy in each direction."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.round_trips import through_smem
from tests.support.semantics import BOTH, under

F32, BF16, I8 = jnp.float32, jnp.bfloat16, jnp.int8
PROMISE = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
UNDEFINED = plgpu.OOBFillMode.UNDEFINED
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"


def rows(x, n):
    """Two rows from a start that is known at run time."""
    return x[plgpu.ds(n, 2)]


def odd_rows(x, n):
    """Four rows from a multiple of four that is known at run time."""
    return x[plgpu.ds(n * 4, 4)]


def part_of_part(x, n):
    """A part that does not start at a multiple of 16 bytes; its part does."""
    return x[3:].at[1:97]


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
    shape, dtype, part, transforms, mode = CASES[name]
    options |= {"transforms": transforms, "oob_mode": mode}
    return through_smem(shape, dtype, lambda x, n: part(x.at, n), **options)


@pytest.mark.parametrize("name", CASES)
def test_parts_travel_through_smem(name):
    everywhere.check(*case(name))


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("name", CASES)
def test_a_copy_is_of_bytes_or_of_a_box(name, semantics):
    make, args, _ = case(name)
    (report,) = plgpu.offline.lower(under(semantics, make()), *args)
    found = [LOAD, STORE, "cp.async.bulk.tensor."]
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
