# SPDX-License-Identifier: Apache-2.0
"""The emulator for every kernel of a program, and what `interpret=False` means."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors

X = np.arange(128, dtype=np.float32)


def body(x, o):
    o[...] = x[...] + 1


def unwritten(x, o):
    o[0:64] = x[0:64]


def kernel(fn=body, **options):
    return plgpu.kernel(fn, out_type=jax.ShapeDtypeStruct((128,), "float32"), **options)


def test_false_without_a_gpu_is_a_value_error_as_upstream():
    for k in (kernel(interpret=False), jax.jit(kernel(interpret=False))):
        with pytest.raises(ValueError, match="interpret=False needs a GPU") as info:
            k(X)
        assert isinstance(info.value, errors.NoGpuError)


def test_a_forced_mode_replaces_interpret():
    with plgpu.force_gpu_interpret_mode():
        for call in (kernel(interpret=False), jax.jit(kernel(interpret=False))):
            np.testing.assert_array_equal(call(X), X + 1)
    with pytest.raises(errors.NoGpuError):
        kernel(interpret=False)(X)


def test_params_of_a_forced_mode_are_those_of_the_emulator():
    lenient = plgpu.InterpretParams(partial_results=True)
    k = jax.jit(lambda x: kernel(unwritten)(x)[0:64])
    with plgpu.force_gpu_interpret_mode(params=lenient):
        np.testing.assert_array_equal(k(X), X[0:64])
    # The jitted function is traced again outside.
    with pytest.raises(Exception, match="elements that no CTA stored"):
        k(X).block_until_ready()


def test_a_mode_is_set_for_the_program():
    plgpu.set_gpu_interpret_mode(plgpu.InterpretParams())
    try:
        np.testing.assert_array_equal(kernel(interpret=False)(X), X + 1)
    finally:
        plgpu.set_gpu_interpret_mode(None)
    with pytest.raises(errors.NoGpuError):
        kernel(interpret=False)(X)
