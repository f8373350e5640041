# SPDX-License-Identifier: Apache-2.0
"""Kernels written against upstream run here with only their import lines changed."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.support import porting
from tests.support.lockstep import kernels as in_lockstep


def arguments(module):
    return module.arguments(np.random.default_rng(0))


@pytest.mark.skipif(
    not jax.__version__.startswith("0.11."), reason="written against upstream 0.11"
)
@pytest.mark.parametrize("name", porting.FILES)
def test_upstream_lowers_the_kernel(name):
    module = porting.upstream(name)
    traced = jax.jit(module.kernel).trace(*arguments(module))
    traced.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("name", porting.FILES)
def test_the_kernel_runs_with_its_import_lines_changed(name):
    module = porting.ported(name)
    args = arguments(module)
    compare(module.kernel(*args), module.expected(*args))


@pytest.mark.parametrize("name", porting.FILES)
def test_what_is_emitted_for_the_kernel_runs(name):
    module = porting.ported(name)
    args = arguments(module)
    got = in_lockstep.lower(module.kernel, args).run()
    compare(got, module.expected(*args), containers=False)


def compare(got, expected, containers=True):
    if containers:
        assert jax.tree.structure(got) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = a.astype(np.float32), b.astype(np.float32)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
