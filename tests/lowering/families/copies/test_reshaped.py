# SPDX-License-Identifier: Apache-2.0
"""Copies of references in other shapes, and as other types, with indices around it."""

from __future__ import annotations

import dataclasses

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
from tests.support.semantics import BOTH, under

F32, BF16, I8, I32 = jnp.float32, jnp.bfloat16, jnp.int8, jnp.int32
TILED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))
ds = plgpu.ds


@dataclasses.dataclass
class Array:
    """A NumPy array with the attributes of a reference."""

    x: np.ndarray

    @property
    def at(self):
        return self

    def __getitem__(self, idx):
        idx = idx if isinstance(idx, tuple) else (idx,)
        return Array(self.x[tuple(map(_numpy_index, idx))])

    def reshape(self, *shape):
        return Array(self.x.reshape(*shape))

    def bitcast(self, dtype):
        return Array(self.x.view(dtype))

    def transpose(self, order):
        return Array(self.x.transpose(order))


def _numpy_index(i):
    is_range = hasattr(i, "size") and hasattr(i, "stride")
    return slice(int(i.start), int(i.start) + i.size) if is_range else i


def itself(ref, n):
    return ref


def maker(body, tile, array, transforms):
    """Makes kernels with a tile in SMEM, and a tile and an array as results."""
    return everywhere.kernel(
        body,
        tuple(jax.ShapeDtypeStruct(*kind) for kind in (tile, array)),
        plgpu.SMEM(*tile, transforms=transforms),
        plgpu.Barrier(),
    )


def through_smem(shape, dtype, part, tile, within=itself, transforms=(), by=None):
    """A part of an array goes to a part of an array in SMEM, and back again.

    The results are what SMEM has, of zeros at first, and the array with the part alone.
    """
    x, n = array(shape, dtype), np.array([1], np.int32)
    chosen = part(Array(np.arange(x.size).reshape(shape)), 1).x
    placed = within(Array(np.arange(np.prod(tile)).reshape(tile)), 1).x
    assert chosen.shape == placed.shape
    seen, back = np.zeros(tile, x.dtype), np.zeros_like(x)
    seen.reshape(-1)[placed] = x.reshape(-1)[chosen]
    back.reshape(-1)[chosen] = x.reshape(-1)[chosen]
    options = {} if by is None else {"implementation": by}

    def body(x, n, seen, back, smem, full):
        back[...] = jnp.zeros(shape, dtype)
        smem[...] = jnp.zeros(tile, dtype)
        plgpu.commit_smem()
        plgpu.commit_gmem()
        i = n[0]
        plgpu.copy_gmem_to_smem(part(x, i), within(smem, i), full, **options)
        plgpu.barrier_wait(full)
        seen[...] = smem[...]
        plgpu.copy_smem_to_gmem(within(smem, i), part(back, i))
        plgpu.wait_smem_to_gmem(0)

    make = maker(body, (tile, dtype), (shape, dtype), transforms)
    return make, [x, n], (seen, back)


GMEM = {
    "all of an array, flat": (
        (8, 32), F32, lambda x, n: x.reshape(256), (256,),
    ),
    "leading dimensions are merged": (
        (4, 8, 64), BF16, lambda x, n: x.reshape(32, 64), (32, 64),
    ),
    "a dimension is split, and indexed": (
        (32, 64), BF16, lambda x, n: x.reshape(8, 4, 64).at[ds(n * 2, 4), n], (4, 64),
    ),
    "the inner part of a split dimension": (
        (32, 64), BF16, lambda x, n: x.reshape(8, 4, 64).at[:, 1:3], (8, 2, 64),
    ),
    "a slice is merged": (
        (8, 4, 32), F32, lambda x, n: x.at[ds(n * 2, 3)].reshape(12, 32), (12, 32),
    ),
    "a slice is split": (
        (32, 32), F32, lambda x, n: x.at[ds(n * 8, 16)].reshape(4, 4, 32), (4, 4, 32),
    ),
    "behind an integer": (
        (3, 8, 64), I8, lambda x, n: x.at[n].reshape(2, 4, 64), (2, 4, 64),
    ),
    "indices before and after": (
        (3, 32, 64), BF16,
        lambda x, n: x.at[n, ds(8 * n, 16)].reshape(4, 4, 64).at[ds(n, 2), :, 16:48],
        (2, 4, 32),
    ),
    "transposed afterwards": (
        (24, 32), F32, lambda x, n: x.reshape(6, 4, 32).transpose((1, 0, 2)),
        (4, 6, 32),
    ),
    "with axes of one element": (
        (16, 32), F32, lambda x, n: x.at[ds(n * 8, 8)].reshape(8, 1, 32), (8, 1, 32),
    ),
    "columns, which SMEM has split": (
        (16, 64), F32, lambda x, n: x.at[:, 16:48].reshape(512), (512,),
    ),
    "three times": (
        (16, 32), F32,
        lambda x, n: x.reshape(512).at[ds(n * 128, 256)].reshape(8, 32).at[2:6]
        .reshape(128),
        (128,),
    ),
    "an edge that the array does not divide": (
        (15, 32), F32, lambda x, n: x.at[3:15].reshape(3, 4, 32), (3, 4, 32),
    ),
}  # fmt: skip
SMEM = {
    "SMEM is flat": (
        (8, 32), F32, itself, (256,), lambda s, n: s.reshape(8, 32),
    ),
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
CASES = {**GMEM, **SMEM}
BY_THREADS = plgpu.AsyncCopyImplementation.CP_ASYNC


@pytest.mark.parametrize("name", CASES)
def test_a_reshaped_part_travels_through_smem(name):
    everywhere.check(*through_smem(*CASES[name]))


@pytest.mark.parametrize("name", ["indices before and after", "rows of split SMEM"])
def test_threads_copy_reshaped_parts(name):
    everywhere.check(*through_smem(*CASES[name], by=BY_THREADS))


# --- as other types -------------------------------------------------------------------

# Shape, dtype, part of it; shape, dtype, transforms and part of the array in SMEM.
BITCASTS = {
    "GMEM to a type of the same width": (
        (16, 32), F32, lambda x: x.bitcast(I32), (16, 32), I32, (), lambda s: s,
    ),
    "GMEM to a wider type": (
        (16, 64), BF16, lambda x: x.at[4:12].bitcast(I32), (8, 32), I32, (),
        lambda s: s,
    ),
    "GMEM to a narrower type, reshaped": (
        (16, 32), F32, lambda x: x.bitcast(I8).reshape(4, 4, 128).at[1],
        (4, 128), I8, (), lambda s: s,
    ),
    "SMEM to a narrower type": (
        (16, 64), BF16, lambda x: x, (16, 32), F32, (), lambda s: s.bitcast(BF16),
    ),
    "SMEM to a wider type, reshaped": (
        (16, 32), F32, lambda x: x.at[8:16], (1024,), I8, (),
        lambda s: s.bitcast(F32).reshape(8, 32),
    ),
    "reshaped, and to another type": (
        (16, 64), BF16, lambda x: x.reshape(4, 256).bitcast(F32).at[2],
        (128,), F32, (), lambda s: s,
    ),
    "columns": (
        (16, 64), BF16, lambda x: x.at[:, 16:48].bitcast(F32), (16, 16), F32, (),
        lambda s: s,
    ),
    "tiled SMEM": (
        (16, 64), BF16, lambda x: x, (16, 64), jnp.int16, TILED,
        lambda s: s.bitcast(BF16),
    ),
    "tiled SMEM to a wider type": (
        (16, 32), F32, lambda x: x, (2, 8, 64), BF16, TILED,
        lambda s: s.bitcast(F32).reshape(16, 32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BITCASTS)
def test_a_part_travels_as_another_type(name):
    shape, dtype, part, tile, other, transforms, within = BITCASTS[name]
    x = array(shape, dtype)
    expected = np.zeros(tile, other), np.zeros_like(x)
    within(Array(expected[0])).x[...] = part(Array(x)).x
    part(Array(expected[1])).x[...] = part(Array(x)).x

    def body(x, seen, back, smem, full):
        back[...] = jnp.zeros(shape, dtype)
        smem[...] = jnp.zeros(tile, other)
        plgpu.commit_smem()
        plgpu.commit_gmem()
        plgpu.copy_gmem_to_smem(part(x), within(smem), full)
        plgpu.barrier_wait(full)
        seen[...] = smem[...]
        plgpu.copy_smem_to_gmem(within(smem), part(back))
        plgpu.wait_smem_to_gmem(0)

    make = maker(body, (tile, other), (shape, dtype), transforms)
    everywhere.check(make, [x], expected)


# --- other copies ---------------------------------------------------------------------


def test_rows_of_a_reshaped_array_are_gathered_and_scattered():
    x, rows = array((4, 8, 64), F32), np.array([9, 2, 30, 17], np.int32)
    back = np.zeros_like(x)
    back.reshape(32, 64)[rows] = x.reshape(32, 64)[rows]

    def body(x, rows, seen, back, smem, full):
        back[...] = jnp.zeros(x.shape, F32)
        plgpu.commit_gmem()
        chosen = rows[...]
        tile = smem.reshape(4, 64)
        plgpu.copy_gmem_to_smem(x.reshape(32, 64).at[chosen], tile, full)
        plgpu.barrier_wait(full)
        seen[...] = tile[...]
        plgpu.copy_smem_to_gmem(tile, back.reshape(32, 64).at[chosen])
        plgpu.wait_smem_to_gmem(0)

    everywhere.run(
        body,
        [x, rows],
        (x.reshape(32, 64)[rows], back),
        plgpu.SMEM((256,), F32),
        plgpu.Barrier(),
    )


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
    [array((14, 32), F32)],
    lambda x: np.pad(x[8:], ((0, 2), (0, 0))).reshape(4, 2, 32),
    plgpu.SMEM((4, 2, 32), F32),
    plgpu.Barrier(),
)
def test_a_part_over_the_edge_is_filled_with_zeros(x, o, smem, full):
    plgpu.copy_gmem_to_smem(x.at[ds(8, 8)].reshape(4, 2, 32), smem, full)
    plgpu.barrier_wait(full)
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
    part = smem.reshape(2, 16, 32)
    plgpu.copy_gmem_to_smem(x.at[0:32].reshape(2, 16, 32), part, full,
                            collective_axes="c")  # fmt: skip
    plgpu.barrier_wait(full)
    o[jax.lax.axis_index("c")] = smem[...]


# --- refusals -------------------------------------------------------------------------

REFUSED = {
    "an index into columns that are merged": (
        lambda x: x.at[:, 0:32].reshape(512).at[0:256],
        (256,),
        (),
        itself,
    ),
    "tiles": (
        lambda x: x.reshape(8, 128).at[:, 0:64],
        (16, 32),
        (plgpu.TilingTransform((8, 16)),),
        lambda s, n: s.reshape(8, 64),
    ),
    "columns as a wider type": (
        lambda x: x.bitcast(BF16).at[:, 1:33].bitcast(F32).at[:, 0:8],
        (16, 8),
        (),
        itself,
    ),
    "transposed, to a wider type": (
        lambda x: x.bitcast(BF16).T.bitcast(F32).at[0:8],
        (8, 8),
        (),
        itself,
    ),
    "both sides": (
        lambda x: x.at[:, 0:32].reshape(512),
        (16, 64),
        (),
        lambda s, n: s.at[:, 0:32].reshape(512),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@refused
def test_what_has_no_window_is_refused_as_it_is_traced(name):
    part, tile, transforms, within = REFUSED[name]
    x = array((16, 64), F32)

    def body(x, o, smem, full):
        src, dst = part(x), within(smem, 0)
        plgpu.copy_gmem_to_smem(src, dst, full)  # HERE

    scratch = plgpu.SMEM(tile, F32, transforms=transforms), plgpu.Barrier()
    everywhere.emulate(body, [x], jax.ShapeDtypeStruct((1,), F32), *scratch)


@refused_by(
    everywhere.emulate,
    [array((16, 32), F32)],
    jax.ShapeDtypeStruct((1,), F32),
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
    jax.ShapeDtypeStruct((8, 32), F32),
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
