# SPDX-License-Identifier: Apache-2.0
"""Every example computes what it says, and compiles for a GPU without spills."""

from __future__ import annotations

import importlib
import pkgutil

import jax
import numpy as np
import pytest

import examples
import pallas_gpu as plgpu
from tests.support.everywhere import has_gpu
from tests.support.semantics import BOTH, under

NAMES = sorted(module.name for module in pkgutil.iter_modules(examples.__path__))


def cases(names):
    return [
        pytest.param(case, id=f"{name}-{i}")
        for name in names
        for i, case in enumerate(importlib.import_module(f"examples.{name}").CASES)
    ]


MADE_OF_READY_KERNELS = {"mixture_of_experts", "transformer"}
CASES, READY_KERNELS = cases(NAMES), cases(sorted(MADE_OF_READY_KERNELS))
OWN_KERNELS = cases(name for name in NAMES if name not in MADE_OF_READY_KERNELS)


def compare(case, got, expected):
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=case.tolerance, rtol=case.tolerance)


@pytest.mark.parametrize("case", CASES)
def test_an_example_computes_its_reference_in_the_emulator(case):
    args = jax.device_put(case.args)
    compare(case, jax.jit(case.function)(*args), case.reference(*args))


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("case", CASES)
def test_the_code_of_an_example_computes_its_reference(case, semantics):
    args = jax.device_put(case.args)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretParams(emitted=True)):
        got = jax.jit(under(semantics, case.function))(*args)
        compare(case, got, case.reference(*args))


@pytest.mark.offline
@pytest.mark.parametrize("case", OWN_KERNELS)
def test_an_example_compiles_without_spills(case):
    for report in plgpu.offline.compile(case.function, *case.args):
        assert report.resources.spill_store_bytes == 0, report


@pytest.mark.parametrize("case", READY_KERNELS)
def test_an_example_of_ready_kernels_is_lowered(case):
    """Its kernels are compiled in tests/ops/test_compiled.py."""
    assert plgpu.offline.lower(case.function, *case.args)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_an_example_computes_its_reference_on_a_gpu(case):
    assert has_gpu()
    gpu = jax.devices("cuda")[0]
    with jax.default_device(gpu):
        got = jax.jit(case.function)(*jax.device_put(case.args, gpu))
    compare(case, got, case.reference(*jax.device_put(case.args)))
