# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel's module on the GPU, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.runtime import custom_call, serialize


def capability() -> tuple[int, ...]:
    """The compute capability of the GPU."""
    return tuple(map(int, jax.devices("cuda")[0].compute_capability.split(".")))


def run_module(
    module: ir.Module, operands: Sequence[np.ndarray], results: Sequence[Any]
) -> list[np.ndarray]:
    """Runs a module; arguments and results are those of lockstep's `run_module`."""
    serialized = serialize.serialize(module)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]

    def call(*arrays):
        return custom_call.call(arrays, types, serialized)

    # Wherever JAX's default device is: a kernel without operands follows it.
    with jax.enable_x64(True), jax.default_device(jax.devices("cuda")[0]):
        return [np.asarray(x) for x in jax.jit(call)(*operands)]
