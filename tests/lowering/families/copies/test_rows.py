# SPDX-License-Identifier: Apache-2.0
"""Copies of rows that an array of indices names: gather and scatter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.features.row import Row, omissions
from tests.support.named_rows import gather, scatter, skipped
from tests.support.refusal import refused, refused_by
from tests.support.semantics import BOTH, under

F32, BF16 = jnp.float32, jnp.bfloat16
TILED = (plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32))
WIDE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
COPIES = {
    "bulk copies": gather(16, (64, 32), F32),
    "more rows than threads": gather(144, (200, 16), F32),
    "one row": gather(1, (64, 32), F32),
    "an odd number of rows": gather(13, (64, 32), BF16),
    "rows of 12 bytes": gather(24, (64, 3), F32),
    "odd columns": gather(16, (64, 33), BF16, slice(5, 26)),
    "columns": gather(16, (64, 64), F32, slice(16, 48)),
    "rows of two dimensions": gather(6, (20, 4, 8), F32),
    "tiled and swizzled": gather(16, (64, 32), BF16, None, TILED),
    "wide swizzle": gather(80, (100, 64), BF16, None, WIDE),
    "long rows": gather(16, (20, 256), BF16, None, WIDE),
    "without a barrier": gather(16, (64, 32), F32, barrier=False),
    "one row of many chunks": gather(1, (8, 256), F32, barrier=False),
    "few rows of three times 32 chunks": gather(4, (8, 384), F32, barrier=False),
    "more rows of many chunks than threads": gather(144, (20, 256), F32, barrier=False),
    "an odd number of short rows": gather(13, (64, 32), BF16, barrier=False),
    "skipped": skipped(False),
    "not skipped": skipped(True),
    "scatter": scatter((16, 32), F32),
    "scatter of more rows than threads": scatter((144, 16), F32),
    "scatter of odd rows": scatter((24, 3), F32),
    "scatter of rows of two bytes": scatter((24, 1), BF16),
}


@pytest.mark.parametrize("name", COPIES)
def test_rows_are_gathered(name):
    everywhere.check(*COPIES[name])


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_each_row_is_a_bulk_copy(semantics):
    for make, args, _ in (COPIES["bulk copies"], COPIES["scatter"]):
        (report,) = plgpu.offline.compile(under(semantics, make()), *args)
        bulk = [x for x in report.ptx.splitlines() if "cp.async.bulk" in x]
        assert any("shared::cluster.global" in x or "global.shared" in x for x in bulk)
        assert report.resources.spill_store_bytes == 0


@pytest.mark.parametrize("row", [-1, 64])
@refused
def test_an_index_out_of_bounds_is_found(row):
    make, (x, rows), _ = COPIES["bulk copies"]
    make(True)(x, np.where(np.arange(16) == 5, np.int32(row), rows))


@refused
def test_two_rows_to_one_place_are_a_race():
    make, (x, rows), _ = COPIES["scatter"]
    make(True)(x, np.where(np.arange(16) == 3, rows[7], rows))


X = np.zeros((16, 32), np.float32), np.arange(16, dtype=np.int32)
NO_RESULT = jax.ShapeDtypeStruct((16,), F32)
OUT = X, NO_RESULT, plgpu.SMEM((16, 32), F32), plgpu.Barrier()


@refused_by(everywhere.emulate, *OUT)
def test_indices_name_rows_only(x, rows, o, tile, full):
    source = x.at[rows[...], rows[...]]
    plgpu.copy_gmem_to_smem(source, tile.at[0, 0:16], full)  # HERE


@refused_by(everywhere.emulate, *OUT)
def test_a_gather_has_no_bounds_to_fill(x, rows, o, tile, full):
    zeros = plgpu.OOBFillMode.ZEROS
    plgpu.copy_gmem_to_smem(x.at[rows[...]], tile, full, oob_mode=zeros)  # HERE


FEATURES = [
    Row(
        "rows that indices name, one by one",
        upstream=("copy: gather", "copy: scatter"),
        operations=("gather_rows", "scatter_rows"),
        runs="rows_are_gathered",
        offline="each_row_is_a_bulk_copy",
        instruction="cp.async.bulk",
        omissions=omissions("load rows"),
    ),
]
