# SPDX-License-Identifier: Apache-2.0
"""Copies of references in other shapes, and as other types, with indices around it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors, types
from pallas_gpu.layouts import reshaped
from tests.support import everywhere
from tests.support.host import counted as array
from tests.support.refusal import refused, refused_by
from tests.support.round_trips import itself, through_smem
from tests.support.semantics import BOTH, under

F32, BF16, I8, I32 = jnp.float32, jnp.bfloat16, jnp.int8, jnp.int32
TILED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))
ds = plgpu.ds


GMEM = {
    "leading dimensions are merged": ((4, 8, 64), BF16, lambda x, n: x.reshape(32, 64)),
    "a dimension is split, and indexed": (
        (32, 64), BF16, lambda x, n: x.reshape(8, 4, 64).at[ds(n * 2, 4), n],
    ),
    "the inner part of a split dimension": (
        (32, 64), BF16, lambda x, n: x.reshape(8, 4, 64).at[:, 1:3],
    ),
    "a slice is merged": (
        (8, 4, 32), F32, lambda x, n: x.at[ds(n * 2, 3)].reshape(12, 32),
    ),
    "a slice is split": (
        (32, 32), F32, lambda x, n: x.at[ds(n * 8, 16)].reshape(4, 4, 32),
    ),
    "behind an integer": ((3, 8, 64), I8, lambda x, n: x.at[n].reshape(2, 4, 64)),
    "indices before and after": (
        (3, 32, 64), BF16,
        lambda x, n: x.at[n, ds(8 * n, 16)].reshape(4, 4, 64).at[ds(n, 2), :, 16:48],
    ),
    "transposed afterwards": (
        (24, 32), F32, lambda x, n: x.reshape(6, 4, 32).transpose((1, 0, 2)),
    ),
    "with axes of one element": (
        (16, 32), F32, lambda x, n: x.at[ds(n * 8, 8)].reshape(8, 1, 32),
    ),
    "three times": (
        (16, 32), F32,
        lambda x, n: x.reshape(512).at[ds(n * 128, 256)].reshape(8, 32).at[2:6]
        .reshape(128),
    ),
    "an edge that the array does not divide": (
        (15, 32), F32, lambda x, n: x.at[3:15].reshape(3, 4, 32),
    ),
}  # fmt: skip
SMEM = {
    "a part of SMEM": (
        (8, 32), F32, itself, (3, 256), lambda s, n: s.at[n].reshape(8, 32),
    ),
    "rows of split SMEM": (
        (4, 32), F32, itself, (16, 32),
        lambda s, n: s.reshape(4, 4, 32).at[n],
    ),
    "tiled SMEM, before the tiles": (
        (4, 16, 64), BF16, itself, (2, 2, 16, 64),
        lambda s, n: s.reshape(4, 16, 64), TILED,
    ),
    "tiled SMEM, at multiples of a tile": (
        (2, 16, 64), BF16, itself, (32, 64),
        lambda s, n: s.reshape(2, 16, 64), TILED,
    ),
    "both sides": (
        (4, 8, 32), F32, lambda x, n: x.reshape(32, 32).at[ds(8 * n, 8)], (256,),
        lambda s, n: s.reshape(8, 32),
    ),
}  # fmt: skip
BITCASTS = {
    "GMEM to a wider type": (
        (16, 64), BF16, lambda x, n: x.at[4:12].bitcast(I32), (8, 32), itself, (), I32,
    ),
    "GMEM to a narrower type, reshaped": (
        (16, 32), F32, lambda x, n: x.bitcast(I8).reshape(4, 4, 128).at[1], (4, 128),
        itself, (), I8,
    ),
    "SMEM to a narrower type": (
        (16, 64), BF16, itself, (16, 32), lambda s, n: s.bitcast(BF16), (), F32,
    ),
    "SMEM to a wider type, reshaped": (
        (16, 32), F32, lambda x, n: x.at[8:16], (1024,),
        lambda s, n: s.bitcast(F32).reshape(8, 32), (), I8,
    ),
    "reshaped, and to another type": (
        (16, 64), BF16, lambda x, n: x.reshape(4, 256).bitcast(F32).at[2], (128,),
        itself, (), F32,
    ),
    "columns as another type": (
        (16, 64), BF16, lambda x, n: x.at[:, 16:48].bitcast(F32), (16, 16),
        itself, (), F32,
    ),
    "tiled SMEM as another type": (
        (16, 64), BF16, itself, (16, 64), lambda s, n: s.bitcast(BF16), TILED,
        jnp.int16,
    ),
    "tiled SMEM to a wider type": (
        (16, 32), F32, itself, (2, 8, 64),
        lambda s, n: s.bitcast(F32).reshape(16, 32), TILED, BF16,
    ),
}  # fmt: skip
CASES = {**GMEM, **SMEM, **BITCASTS}
BY_THREADS = plgpu.AsyncCopyImplementation.CP_ASYNC


@pytest.mark.parametrize("name", CASES)
def test_a_reshaped_part_travels_through_smem(name):
    everywhere.check(*through_smem(*CASES[name]))


@pytest.mark.parametrize("name", ["indices before and after", "rows of split SMEM"])
def test_threads_copy_reshaped_parts(name):
    everywhere.check(*through_smem(*CASES[name], implementation=BY_THREADS))


# --- other copies ---------------------------------------------------------------------


@everywhere.gives(
    [array((12, 5), F32)], lambda x: x[3:9].reshape(30), plgpu.SMEM((30,), F32)
)
def test_cp_async_without_a_barrier_and_a_prefetch_take_reshapes(x, o, smem):
    part = x.at[3:9].reshape(2, 3, 5)
    plgpu.async_prefetch(x.reshape(60).at[ds(0, 40)])
    plgpu.copy_gmem_to_smem(part, smem.reshape(2, 3, 5))
    plgpu.wait_gmem_to_smem(0)
    o[...] = smem[...]


@everywhere.gives(
    [array((64, 32), F32)],
    lambda x: np.stack([x[:32]] * 2),
    plgpu.SMEM((32, 32), F32),
    plgpu.Barrier(),
    plgpu.ClusterBarrier(collective_axes=("c",)),
    cluster={"c": 2},
)
def test_a_multicast_reshapes_its_source(x, o, smem, full, free):
    plgpu.barrier_arrive(free)
    plgpu.barrier_wait(free)
    source, part = (ref.reshape(2, 16, 32) for ref in (x.at[0:32], smem))
    plgpu.copy_gmem_to_smem(source, part, full, collective_axes="c")
    plgpu.barrier_wait(full)
    o[jax.lax.axis_index("c")] = smem[...]


# --- refusals -------------------------------------------------------------------------

REFUSED = {
    "an index into columns that are merged": (
        lambda x, n: x.at[:, 0:32].reshape(512).at[0:256],
    ),
    "tiles": (
        lambda x, n: x.reshape(8, 128).at[:, 0:64], (16, 32),
        lambda s, n: s.reshape(8, 64), (plgpu.TilingTransform((8, 16)),),
    ),
    "columns as a wider type": (
        lambda x, n: x.bitcast(BF16).at[:, 1:33].bitcast(F32).at[:, 0:8],
    ),
    "both sides": (
        lambda x, n: x.at[:, 0:32].reshape(512), (16, 64),
        lambda s, n: s.at[:, 0:32].reshape(512),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@refused
def test_what_has_no_window_is_refused_as_it_is_traced(name):
    make, args, _ = through_smem((16, 64), F32, *REFUSED[name])
    jax.make_jaxpr(make())(*args)


@refused_by(
    everywhere.emulate,
    [array((16, 32), F32)],
    np.zeros(1, F32),
    plgpu.SMEM((32, 32), F32),
    plgpu.Barrier(),
    cluster={"c": 2},
)
def test_a_multicast_keeps_the_type_of_its_destination(x, o, smem, full):
    part = smem.reshape(2, 16, 32).at[0]
    plgpu.copy_gmem_to_smem(x, part, full, collective_axes="c")  # HERE


@refused_by(
    everywhere.emulate,
    [array((4, 32), F32)],
    np.zeros((8, 32), F32),
    plgpu.SMEM((8, 32), F32),
    plgpu.Barrier(),
)
def test_elements_that_no_copy_brings_have_no_value(x, o, smem, full):
    plgpu.copy_gmem_to_smem(x, smem.reshape(4, 2, 32).at[:, 1], full)
    plgpu.barrier_wait(full)
    o[...] = smem[...]  # HERE


# --- wrong windows --------------------------------------------------------------------


def _unscaled(first, factor, divisor, by):
    return first.start


def _undivided(first, factor, divisor, by):
    return first.start if divisor > factor else _RIGHT(first, factor, divisor, by)


def _swapped(shape, dtype):
    """Another order of the first two dimensions: their strides are wrong."""
    first, *rest = shape
    return _STEP((rest[0], first, *rest[1:]) if rest else shape, dtype)


_RIGHT, _STEP = reshaped._scaled, types.Reinterpreted
WRONG = {
    "starts are not scaled": (reshaped, "_scaled", _unscaled),
    "starts are not divided": (reshaped, "_scaled", _undivided),
    "strides of other dimensions": (types, "Reinterpreted", _swapped),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_window_is_noticed(name, monkeypatch):
    monkeypatch.setattr(*WRONG[name])
    noticed = []
    for case in GMEM:
        make, args, expected = through_smem(*GMEM[case])
        try:
            got = make(True)(*args)
        except errors.PallasGpuError:
            noticed.append(case)  # a promised multiple, or bounds
            continue
        pairs = zip(got, expected, strict=True)
        if not all(np.array_equal(np.asarray(a), b) for a, b in pairs):
            noticed.append(case)
    assert noticed


# --- compiled -------------------------------------------------------------------------


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
def test_a_reshaped_part_is_one_tensor_copy(semantics):
    make, args, _ = through_smem(*CASES["indices before and after"])
    (report,) = plgpu.offline.compile(under(semantics, make()), *args)
    assert report.ptx.count("cp.async.bulk.tensor.4d.shared") == 1
    assert report.ptx.count("cp.async.bulk.tensor.4d.global") == 1
