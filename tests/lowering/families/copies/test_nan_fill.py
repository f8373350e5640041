# SPDX-License-Identifier: Apache-2.0
"""Copies to SMEM that read NaN outside of the array: `OOBFillMode.NAN`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused
from tests.support.semantics import BOTH, under

NAN, ZEROS = plgpu.OOBFillMode.NAN, plgpu.OOBFillMode.ZEROS
TILED = {
    jnp.float32: (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
    jnp.bfloat16: (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)),
}


def over_the_edge(dtype, mode=NAN, transforms=(), rows=20, columns=48, **options):
    """A tile that begins in an array and ends outside of it."""
    x = np.arange(rows * columns).reshape(rows, columns) % 113
    x = np.asarray(jnp.asarray(x).astype(dtype))
    fill = np.nan if mode is NAN and x.dtype.kind != "i" else 0
    expected = np.full((32, 64), fill, x.dtype)
    expected[: rows - 8, : columns - 32] = x[8:, 32:]

    def body(x, o, tile, full):
        part = x.at[plgpu.ds(8, 32), plgpu.ds(32, 64)]
        plgpu.copy_gmem_to_smem(part, tile, full, oob_mode=mode, **options)
        plgpu.barrier_wait(full)
        o[...] = tile[...]

    tile = plgpu.SMEM((32, 64), dtype, transforms=transforms)
    return everywhere.kernel(body, expected, tile, plgpu.Barrier()), [x], expected


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("mode", [NAN, ZEROS])
@pytest.mark.parametrize("dtype", TILED)
def test_elements_outside_are_read_as_the_mode_says(dtype, mode, tiled):
    transforms = TILED[dtype] if tiled else ()
    everywhere.check(*over_the_edge(dtype, mode, transforms))


def test_float64_is_filled_too():
    with jax.enable_x64(True):
        everywhere.check(*over_the_edge(jnp.float64))


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_the_driver_encodes_the_map_with_its_fill(semantics):
    make, args, _ = over_the_edge(jnp.float16)
    (report,) = plgpu.offline.compile(under(semantics, make()), *args)
    assert report.mlir.count("call @cuTensorMapEncodeTiled") == 1
    assert "cp.async.bulk.tensor.2d.shared::cluster.global" in report.ptx
    make, args, _ = over_the_edge(jnp.float16, ZEROS)
    (report,) = plgpu.offline.lower(under(semantics, make()), *args)
    assert "cuTensorMapEncodeTiled" not in report.mlir


TILE = plgpu.SMEM((8, 64), jnp.float32)
HALF = np.arange(8)[:, None] + np.zeros((8, 64), np.float32)


@everywhere.gives(
    [np.ones((20, 64), np.float32)],
    np.where(HALF < 4, np.float32(2), np.float32(7)),
    TILE,
    TILE,
    plgpu.Barrier(num_arrivals=2),
)
def test_maps_of_both_fills_are_two(x, o, a, b, full):
    part = x.at[plgpu.ds(16, 8)]
    plgpu.copy_gmem_to_smem(part, a, full, oob_mode=NAN)
    plgpu.copy_gmem_to_smem(part, b, full, oob_mode=ZEROS)
    plgpu.barrier_wait(full)
    o[...] = jnp.where(jnp.isnan(a[...]), 7.0, a[...]) + b[...]


def test_a_block_over_the_edge_holds_nan():
    x = np.arange(80 * 64, dtype=np.float32).reshape(80, 64)

    def body(x, o):
        o[...] = jnp.nansum(x[...], axis=0)[None] * jnp.ones((8, 1))

    def make(interpret=None):
        return plgpu.pallas_call(
            body,
            jax.ShapeDtypeStruct((16, 64), jnp.float32),
            grid=(2,),
            in_specs=[plgpu.BlockSpec((64, 64), lambda i: (i, 0), oob_fill_mode=NAN)],
            out_specs=plgpu.BlockSpec((8, 64), lambda i: (i, 0)),
            interpret=interpret,
        )

    sums = np.stack([x[:64].sum(0), x[64:].sum(0)])
    everywhere.check(make, [x], np.repeat(sums, 8, axis=0))


@refused
def test_integers_have_no_nan():
    make, args, _ = over_the_edge(jnp.int32)
    make(True)(*args)


@pytest.mark.parametrize(
    "change",
    [{"columns": 46}, {"implementation": plgpu.AsyncCopyImplementation.CP_ASYNC}],
)
@refused
def test_threads_fill_with_zeros_alone(change):
    make, args, _ = over_the_edge(jnp.float32, **change)
    make(True)(*args)
