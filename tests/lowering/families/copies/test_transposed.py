# SPDX-License-Identifier: Apache-2.0
"""Copies of transposed views, and of slices of more dimensions than a tensor map."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.host import counted as array
from tests.support.refusal import refused_by
from tests.support.round_trips import through_smem
from tests.support.semantics import BOTH, under

F32, BF16, I8 = jnp.float32, jnp.bfloat16, jnp.int8
TILED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))
BY_TMA = {"implementation": plgpu.AsyncCopyImplementation.TMA}


def case(shape, dtype, part, order=None, transforms=()):
    """A part of an array goes to SMEM in another order of axes, and back again."""

    def turned(ref, n):
        return part(ref.at, n) if order is None else part(ref.at, n).transpose(order)

    return through_smem(shape, dtype, turned, transforms=transforms, **BY_TMA)


TRANSPOSED = {
    "the outer axes change places": ((6, 4, 32), F32, lambda x, n: x[...], (1, 0, 2)),
    "three outer axes": ((2, 3, 4, 32), BF16, lambda x, n: x[...], (2, 0, 1, 3)),
    "a part": ((6, 8, 64), F32, lambda x, n: x[2:5, 1:5, 16:48], (1, 0, 2)),
    "a part of an array of more axes": (
        (3, 6, 8, 64), F32, lambda x, n: x[n, 2:5, 1:5, 16:48], (1, 0, 2),
    ),
    "swizzled": ((16, 3, 64), BF16, lambda x, n: x[...], (1, 0, 2), TILED),
    "bytes": ((5, 7, 32), I8, lambda x, n: x[...], (1, 0, 2)),
    "an axis of one element comes last": (
        (6, 1, 32), F32, lambda x, n: x[...], (0, 2, 1),
    ),
}  # fmt: skip
MANY = {
    "six axes": ((2, 3, 2, 3, 4, 16), F32, lambda x, n: x[...]),
    "seven axes": ((2, 1, 2, 3, 2, 3, 64), BF16, lambda x, n: x[...]),
    "parts of six axes": (
        (3, 3, 4, 3, 4, 32), F32, lambda x, n: x[1:, :2, 1:3, 1:, 2:, 8:24],
    ),
    "six axes in another order": (
        (2, 3, 2, 3, 4, 16), F32, lambda x, n: x[...], (3, 1, 4, 0, 2, 5),
    ),
    "a tiled matrix of a stack of stacks": (
        (2, 2, 2, 16, 64), BF16, lambda x, n: x[...], None, TILED,
    ),
}  # fmt: skip
CASES = {**TRANSPOSED, **MANY}


@pytest.mark.parametrize("name", CASES)
def test_parts_travel_through_smem(name):
    everywhere.check(*case(*CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_checks_of_jax_change_nothing(name):
    with jax.enable_checks(True):
        make, args, expected = case(*CASES[name])
        got = make(True)(*args)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


@everywhere.gives(
    [array((6, 5, 32), F32)],
    lambda x: np.pad(x[4:, :2], ((0, 2), (1, 0), (0, 0))).transpose(1, 0, 2),
    plgpu.SMEM((3, 4, 32), F32),
    plgpu.Barrier(),
)
def test_a_part_that_exceeds_a_transposed_view_is_filled_with_zeros(x, o, tile, full):
    part = x.at[plgpu.ds(4, 4), plgpu.ds(-1, 3)].transpose((1, 0, 2))
    plgpu.copy_gmem_to_smem(part, tile, full, **BY_TMA)
    plgpu.barrier_wait(full)
    o[...] = tile[...]


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("name", ["the outer axes change places", "swizzled"])
def test_ptx_has_one_copy_of_a_box(name, semantics):
    make, args, _ = case(*CASES[name])
    (report,) = plgpu.offline.compile(under(semantics, make()), *args)
    lines = report.ptx.splitlines()
    loads = [x for x in lines if "bulk.tensor" in x and "cluster.global" in x]
    stores = [x for x in lines if "bulk.tensor" in x and "global.shared" in x]
    assert [len(loads), len(stores)] == [1, 1]
    assert "cp.async.cg" not in report.ptx


def emulate(body, shape, tile):
    scratch = plgpu.SMEM(tile, F32), plgpu.Barrier()
    everywhere.emulate(body, [array(shape, F32)], array(tile, F32), *scratch)


@refused_by(emulate, (4, 8, 32), (4, 32, 8))
def test_another_minor_dimension_is_refused(x, o, tile, full):
    part = x.transpose((0, 2, 1))
    plgpu.copy_gmem_to_smem(part, tile, full, **BY_TMA)  # HERE


@refused_by(emulate, (6, 4, 32), (4, 6, 32))
def test_without_the_wait_a_transposed_copy_is_a_race(x, o, tile, full):
    plgpu.copy_gmem_to_smem(x.transpose((1, 0, 2)), tile, full, **BY_TMA)
    o[...] = tile[...]
    plgpu.barrier_wait(full)
