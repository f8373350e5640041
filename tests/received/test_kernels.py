# SPDX-License-Identifier: Apache-2.0
"""Kernels of JAX's own Pallas in the emulator, compiled offline, and on a GPU."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.received import indices, products, rows
from tests.support.everywhere import has_gpu
from tests.support.lockstep import kernels as in_lockstep
from tests.support.received import with_our_kernel

CASES = {**rows.CASES, **products.CASES, **indices.CASES}
each = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def _as_float64(x):
    return np.asarray(x, np.float64)


def _check(case, results, arguments):
    expected = case.reference(*map(_as_float64, arguments))
    tolerance = case.tolerance
    np.testing.assert_allclose(
        _as_float64(results), expected, atol=tolerance, rtol=tolerance
    )


@each
def test_the_emulator_computes_what_numpy_does(case, rng):
    arguments = case.arguments(rng)
    _check(case, case.call(*arguments), arguments)


@each
def test_the_emitted_code_computes_what_numpy_does(case, rng):
    arguments = case.arguments(rng)
    (results,) = in_lockstep.run(with_our_kernel(case.call), arguments)
    _check(case, results, arguments)


@each
@pytest.mark.gpu
def test_the_gpu_computes_what_numpy_does(case, rng):
    assert has_gpu()
    with jax.default_device(jax.devices("cuda")[0]):
        arguments = case.arguments(rng)
        results = jax.jit(case.call)(*arguments)
        assert {d.platform for d in results.devices()} == {"gpu"}
        _check(case, results, arguments)


@each
@pytest.mark.offline
def test_it_compiles_offline_without_spills(case, rng):
    (report,) = plgpu.offline.compile(case.call, *case.arguments(rng))
    assert report.resources.spill_store_bytes == 0
    assert report.resources.spill_load_bytes == 0
