# SPDX-License-Identifier: Apache-2.0
"""Tensors and functions that cannot be called: what the errors say."""

from __future__ import annotations

import sys

import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from tests.support.refusal import refused
from tests.support.torch_calls import (
    VECTOR,
    add,
    double,
    increment,
    increment_ref,
    on_each_device,
    torch,
    vector,
)


def call(fn, *args, **options):
    return plgpu.as_torch_kernel(fn, **options)(*args)


@refused
def test_an_array_is_not_a_tensor():
    call(double, jnp.zeros(256))


@refused
def test_a_number_is_not_a_tensor():
    call(lambda x: double(x["a"] * x["b"]), {"a": vector("cpu"), "b": 2})


@refused
def test_a_tensor_is_contiguous():
    call(double, torch.zeros(256, 2)[:, 0])


@refused
def test_a_sparse_tensor_has_no_elements_in_order():
    call(double, vector("cpu").to_sparse())


@refused
def test_elements_of_64_bits_are_made_by_jax_with_64_bits():
    call(lambda x: x, torch.zeros(4, dtype=torch.int64))


@refused
def test_a_tensor_without_memory_is_on_no_device():
    call(double, torch.zeros(256, device="meta"))


@refused
def test_an_operation_without_a_counterpart_is_named():
    def f(x):
        y = double(x)
        return jnp.sort(y)  # HERE

    call(f, vector("cpu"))


@refused
def test_a_part_of_a_reference_is_taken_in_a_kernel():
    def f(x):
        increment_ref(x)
        return x[3:5] + 1  # HERE

    call(f, vector("cpu"), inout_argnums=(0,))


@refused
def test_a_result_has_a_dtype_of_torch():
    call(lambda x: (x, jnp.zeros(3, jnp.int4)), vector("cpu"))


@refused
def test_a_position_of_a_reference_has_an_argument():
    call(double, vector("cpu"), inout_argnums=(1,))


@refused
def test_an_argument_that_is_updated_has_no_derivative():
    call(increment, vector("cpu").requires_grad_())


@refused
def test_on_a_cpu_a_kernel_may_not_need_a_gpu():
    call(plgpu.kernel(lambda x, o: None, VECTOR, interpret=False), vector("cpu"))


@refused
def test_torch_has_to_be_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    plgpu.as_torch_kernel(double)


@on_each_device
def test_a_tensor_is_aligned(device):
    # As JAX's arrays are: the text has an address.
    with pytest.raises(plgpu.errors.ArgumentError, match=r"aligned(.|\n)*clone\(\)"):
        call(double, torch.zeros(257, device=device)[1:])


@pytest.mark.gpu
def test_arguments_are_on_one_device():
    with pytest.raises(plgpu.errors.ArgumentError, match=r"x\.to\(device\)"):
        call(add, vector("cuda"), vector("cpu"))


@refused
def test_an_operation_updates_what_its_example_does():
    def f(x):
        return increment(x) if x.shape == VECTOR.shape else x + 1

    plgpu.as_torch_kernel(f).custom_op("pallas_gpu_tests::by_shape", vector("cpu"))
    torch.ops.pallas_gpu_tests.by_shape(torch.zeros(3))


@refused
def test_results_of_an_operation_are_one_by_one():
    nested = plgpu.as_torch_kernel(lambda x: ((x, x), x))
    nested.custom_op("pallas_gpu_tests::nested", vector("cpu"))


@refused
def test_an_operation_has_a_library():
    plgpu.as_torch_kernel(double).custom_op("double", vector("cpu"))  # HERE
