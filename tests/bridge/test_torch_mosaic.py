# SPDX-License-Identifier: Apache-2.0
"""Kernels of the Mosaic level as functions of tensors."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu import mosaic as mgpu
from tests.support.refusal import refused
from tests.support.torch_calls import VECTOR, N, equal, on_each_device, torch, vector

LAUNCH = ((1, 1, 1), (128, 1, 1))
XS = np.arange(N, dtype=np.float32)


def load(ref):
    return mgpu.FragmentedArray.load_strided(ref)


def doubling(ctx, x_ref, o_ref, scratch):
    x = load(x_ref)
    (x + x).store_untiled(o_ref)


def adding(ctx, x_ref, y_ref, o_ref, scratch):
    """Adds x to y in place; what y was is the result."""
    x, y = load(x_ref), load(y_ref)
    y.store_untiled(o_ref)
    (x + y).store_untiled(y_ref)


@on_each_device
def test_a_body_takes_and_returns_tensors(device):
    f = mgpu.as_torch_gpu_kernel(doubling, *LAUNCH, VECTOR, VECTOR, ())
    for start in (0, 7):
        x = vector(device, start)
        result = f(x)
        assert result.device == x.device
        equal(result, 2 * (XS + start))
        equal(x, XS + start)


@on_each_device
def test_a_tensor_is_updated_in_place(device):
    f = mgpu.as_torch_gpu_kernel(
        adding, *LAUNCH, VECTOR, (VECTOR,), (), inout_shape=VECTOR
    )
    x, y = vector(device), vector(device, 3)
    before, after = f(x, y)
    assert after is y
    equal(before, XS + 3)
    equal(y, 2 * XS + 3)


def test_it_is_one_operation_of_a_compiled_program():
    f = mgpu.as_torch_gpu_kernel(doubling, *LAUNCH, VECTOR, VECTOR, ())
    operation = f.custom_op("tests_mosaic::doubling", vector("cpu"))
    compiled = torch.compile(lambda x: operation(x) + 1, backend="aot_eager")
    equal(compiled(vector("cpu")), 2 * XS + 1)


REFUSED = {
    "another shape": lambda f: f(torch.zeros(N // 2)),
    "another dtype": lambda f: f(torch.zeros(N, dtype=torch.int32)),
    "too many": lambda f: f(torch.zeros(N), torch.zeros(N)),
}


@pytest.mark.parametrize("case", REFUSED)
@refused
def test_tensors_that_the_kernel_is_not_for(case):
    REFUSED[case](mgpu.as_torch_gpu_kernel(doubling, *LAUNCH, VECTOR, VECTOR, ()))


@refused
def test_a_profile():
    spec = mgpu.ProfilerSpec(16, "traces")
    mgpu.as_torch_gpu_kernel(doubling, *LAUNCH, VECTOR, VECTOR, (), spec)  # HERE
