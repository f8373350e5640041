# SPDX-License-Identifier: Apache-2.0
"""Copies of rows that an array of indices names: gather and scatter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere, skipped_rows
from tests.support.host import counted as array
from tests.support.lockstep import faults
from tests.support.lockstep.engine import KernelError
from tests.support.refusal import refused_by
from tests.support.semantics import BOTH, under

F32, BF16 = jnp.float32, jnp.bfloat16
TILED = (plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32))
WIDE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def some_rows(count, of):
    return np.random.default_rng(count).permutation(of)[:count].astype(np.int32)


def gather(count, shape, dtype, columns=None, transforms=(), barrier=True):
    """Rows of an array, in the order of an array of indices."""
    part = columns or slice(None)
    width = array(shape, dtype)[:, part].shape[1:]

    def body(x, rows, o, tile, full):
        chosen = x.at[rows[...], part] if columns else x.at[rows[...]]
        if barrier:
            plgpu.copy_gmem_to_smem(chosen, tile, full)
            plgpu.barrier_wait(full)
        else:
            plgpu.copy_gmem_to_smem(chosen, tile)
            plgpu.wait_gmem_to_smem(0)
        o[...] = tile[...]

    make = everywhere.kernel(
        body,
        jax.ShapeDtypeStruct((count, *width), dtype),
        plgpu.SMEM((count, *width), dtype, transforms=transforms),
        plgpu.Barrier(),
    )

    x, rows = array(shape, dtype), some_rows(count, shape[0])
    return make, [x, rows], x[rows][:, part]


GATHERS = {
    "bulk copies": (16, (64, 32), F32),
    "more rows than threads": (144, (200, 16), F32),
    "one row": (1, (64, 32), F32),
    "an odd number of rows": (13, (64, 32), BF16),
    "rows of 12 bytes": (24, (64, 3), F32),
    "odd columns": (16, (64, 33), BF16, slice(5, 26)),
    "columns": (16, (64, 64), F32, slice(16, 48)),
    "rows of two dimensions": (6, (20, 4, 8), F32),
    "tiled and swizzled": (16, (64, 32), BF16, None, TILED),
    "wide swizzle": (80, (100, 64), BF16, None, WIDE),
    "long rows": (16, (20, 256), BF16, None, WIDE),
    "without a barrier": (16, (64, 32), F32, None, (), False),
}


@pytest.mark.parametrize("name", GATHERS)
def test_rows_are_gathered(name):
    make, args, expected = gather(*GATHERS[name])
    everywhere.check(make, args, expected)


def scatter(count, shape, dtype):
    """Rows of an array go to the rows of a result that an array of indices names."""

    def body(x, rows, o, tile, full):
        plgpu.copy_gmem_to_smem(x, tile, full)
        plgpu.barrier_wait(full)
        plgpu.copy_smem_to_gmem(tile, o.at[rows[...]])
        plgpu.wait_smem_to_gmem(0)

    make = everywhere.kernel(
        body,
        jax.ShapeDtypeStruct(shape, dtype),
        plgpu.SMEM(shape, dtype),
        plgpu.Barrier(),
    )

    x, rows = array(shape, dtype), some_rows(count, count)
    expected = np.empty_like(x)
    expected[rows] = x
    return make, [x, rows], expected


SCATTERS = {
    "bulk copies": (16, (16, 32), F32),
    "more rows than threads": (144, (144, 16), F32),
    "odd rows": (24, (24, 3), F32),
    "rows of two bytes": (24, (24, 1), BF16),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_rows_are_scattered(name):
    make, args, expected = scatter(*SCATTERS[name])
    everywhere.check(make, args, expected)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_predicate_skips_the_rows_and_not_the_arrival(wanted):
    everywhere.check(skipped_rows.kernel(), *skipped_rows.operands(wanted))


# --- mistakes -------------------------------------------------------------------------


@pytest.mark.parametrize("row", [-1, 64])
def test_an_index_out_of_bounds_is_found(row):
    make, (x, rows), _ = gather(*GATHERS["bulk copies"])
    rows = rows.copy()
    rows[5] = row
    with pytest.raises(errors.OutOfBoundsError, match="copied out of bounds") as caught:
        make(True)(x, rows)
    assert f"index {row} at position 5 of 16" in str(caught.value)


def test_two_rows_to_one_place_are_a_race():
    make, (x, rows), _ = scatter(*SCATTERS["bulk copies"])
    rows = rows.copy()
    rows[3] = rows[7]
    with pytest.raises(errors.RaceError, match="two rows of a copy go to one row"):
        make(True)(x, rows)


def mistaken(body, out, *args):
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out, F32),
        scratch_types=[plgpu.SMEM((16, 32), F32), plgpu.Barrier()],
        interpret=plgpu.InterpretParams(partial_results=True),
    )
    return kernel(*args)


def test_a_gather_without_a_wait_is_a_race():
    def body(x, rows, o, tile, full):
        plgpu.copy_gmem_to_smem(x.at[rows[...]], tile, full)
        o[...] = tile[...]
        plgpu.barrier_wait(full)

    _, args, _ = gather(*GATHERS["bulk copies"])
    with pytest.raises(errors.RaceError, match="barrier_wait"):
        mistaken(body, (16, 32), *args)


@refused_by(lambda body: mistaken(body, (16, 32), some_rows(16, 16)))
def test_a_scatter_of_what_threads_stored_needs_commit_smem(rows, o, tile, full):
    tile[...] = jnp.ones((16, 32), F32)
    plgpu.copy_smem_to_gmem(tile, o.at[rows[...]])
    plgpu.wait_smem_to_gmem(0)


@refused_by(lambda body: mistaken(body, (16, 32), some_rows(16, 16)))
def test_a_scatter_without_a_wait_is_a_race(rows, o, tile, full):
    tile[...] = jnp.ones((16, 32), F32)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, o.at[rows[...]])
    tile[...] = jnp.zeros((16, 32), F32)
    plgpu.wait_smem_to_gmem(0)


@pytest.mark.parametrize("semantics", BOTH)
def test_without_expected_bytes_the_rows_arrive_too_late(semantics):
    make, args, _ = gather(*GATHERS["bulk copies"])
    fault = faults.edit_text(r"cp\.async\.bulk\.shared.*", "")
    with pytest.raises(KernelError, match="deadlock"):
        faults.run(under(semantics, make()), args, fault)


def index_columns(x, rows, tile, full):
    plgpu.copy_gmem_to_smem(x.at[:, rows[...]], tile, full)


def index_twice(x, rows, tile, full):
    plgpu.copy_gmem_to_smem(x.at[rows[...], rows[...]], tile.at[0, 0:16], full)


@pytest.mark.parametrize("copy", [index_columns, index_twice])
def test_indices_name_rows_only(copy):
    def body(x, rows, o, tile, full):
        copy(x, rows, tile.at[:, 0:16] if copy is index_columns else tile, full)

    x, rows = array((16, 32), F32), some_rows(16, 16)
    with pytest.raises(errors.UnsupportedError, match="indices do not name rows"):
        mistaken(body, (16, 32), x, rows)


def test_a_gather_has_no_bounds_to_fill():
    def body(x, rows, o, tile, full):
        zeros = plgpu.OOBFillMode.ZEROS
        plgpu.copy_gmem_to_smem(x.at[rows[...]], tile, full, oob_mode=zeros)

    _, args, _ = gather(*GATHERS["bulk copies"])
    with pytest.raises(errors.UnsupportedError, match="none of these options"):
        mistaken(body, (16, 32), *args)


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_each_row_is_a_bulk_copy(semantics):
    for make, args, _ in (gather(*GATHERS["bulk copies"]), scatter(16, (16, 32), F32)):
        (report,) = plgpu.offline.compile(under(semantics, make()), *args)
        bulk = [x for x in report.ptx.splitlines() if "cp.async.bulk" in x]
        assert any("shared::cluster.global" in x or "global.shared" in x for x in bulk)
        assert report.resources.spill_store_bytes == 0
