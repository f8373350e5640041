# SPDX-License-Identifier: Apache-2.0
"""Kernels for tests of functions of tensors, and the devices that they run on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu

torch: Any = pytest.importorskip("torch")

on_each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)
N = 256
VECTOR = jax.ShapeDtypeStruct((N,), jnp.float32)


@plgpu.kernel(out_type=VECTOR)
def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


@plgpu.kernel(out_type=VECTOR)
def add(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


def _increment(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1


# Upstream's way to update an argument, and JAX's.
increment = plgpu.pallas_call(_increment, VECTOR, input_output_aliases={0: 0})


def _accumulate(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


accumulate = plgpu.pallas_call(_accumulate, VECTOR, input_output_aliases={0: 0})


@plgpu.kernel(out_type=())
def increment_ref(ref):
    ref[...] = ref[...] + 1


@jax.custom_vjp
def weighted(x, y):
    """x * 2 + y, with its derivatives as kernels."""
    return add(double(x), y)


weighted.defvjp(lambda x, y: (weighted(x, y), ()), lambda _, ct: (double(ct), ct))


def vector(device: str, start: int = 0) -> Any:
    """A tensor of consecutive numbers."""
    return torch.arange(start, start + N, dtype=torch.float32, device=device)


def equal(got: Any, expected: Any) -> None:
    """Compares a tensor with an array."""
    np.testing.assert_array_equal(got.detach().cpu().float().numpy(), expected)
