# SPDX-License-Identifier: Apache-2.0
"""The plugin of pytest, in a suite of its own."""

from __future__ import annotations

import tomllib

from tools.source_tree import ROOT

pytest_plugins = ["pytester"]

SUITE = """
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import pallas_gpu as plgpu

X = np.ones(128, np.float32)

def twice(x, o):
    o[...] = x[...] * 2

def outside(x, o):
    o[...] = x[...]
    o[x.shape[0] + jax.lax.axis_index("i")] = 0.0

def made(body):
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
                        grid=(1,), grid_names=("i",))

def test_clean(plgpu_check):
    assert plgpu_check(made(twice), orders=2)(X).clean

def test_wrong(plgpu_check):
    plgpu_check(made(outside), orders=2)(X)

@pytest.mark.plgpu_check(orders=2)
def test_marked_clean():
    np.testing.assert_array_equal(jax.jit(made(twice))(X), 2 * X)

@pytest.mark.plgpu_check
def test_marked_wrong():
    jax.jit(made(outside))(X)

def test_unmarked():
    with pytest.raises(plgpu.errors.OutOfBoundsError):
        made(outside)(X)
"""


def test_the_plugin_fails_tests_whose_kernels_are_wrong(pytester):
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess("-p", "pytest_pallas_gpu")
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(["*1. out-of-bounds: *", "*outside*"])


def test_the_plugin_is_registered():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {
        "pytest_pallas_gpu": "pytest_pallas_gpu"
    }
