# SPDX-License-Identifier: Apache-2.0
"""Semaphores and delays: what they refuse, where the call is written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support.refusal import refused, refused_by

F32 = jnp.float32
OUT = jax.ShapeDtypeStruct((8, 128), F32)
REGULAR = plgpu.SemaphoreType.REGULAR


def traced(body, *scratch):
    """Traces a kernel with an input."""
    kernel = plgpu.kernel(body, out_type=OUT, scratch_types=scratch)
    return jax.eval_shape(kernel, OUT)


CALLS = [plgpu.semaphore_signal, plgpu.semaphore_wait, plgpu.semaphore_read]


@pytest.mark.parametrize("call", CALLS)
@refused
def test_other_references_are_refused(call):
    traced(lambda x, o: call(x))  # HERE


@pytest.mark.parametrize("call", CALLS)
@refused
def test_arrays_of_semaphores_are_refused(call):
    traced(lambda x, o, s: call(s), REGULAR((4, 2)))  # HERE


@pytest.mark.parametrize("call", CALLS)
def test_an_array_of_one_is_a_semaphore(call):
    traced(lambda x, o, s: [call(s), None][1], REGULAR((1, 1)))


@pytest.mark.parametrize("amount", [1.5, np.ones(2, np.int32), True, 2**31])
@pytest.mark.parametrize("call", [plgpu.semaphore_signal, plgpu.semaphore_wait])
@refused
def test_amounts_are_integer_scalars(call, amount):
    traced(lambda x, o, s: call(s, amount), REGULAR)  # HERE


LASTING = {
    "a write": lambda s, n: s.set(n),  # HERE
    "a read": lambda s, n: s[...],  # HERE
    "an atomic operation": lambda s, n: plgpu.atomic_add(s, n),  # HERE
}


@pytest.mark.parametrize("use", LASTING)
@refused
def test_semaphores_that_outlive_a_kernel_are_no_array(use):
    def body(x, s, o):
        @plgpu.when(x[0, 0] > 0)
        def _():
            plgpu.semaphore_signal_parallel(plgpu.SemaphoreSignal(s))

        LASTING[use](s, 1)

    def call(x):
        return plgpu.kernel(body, out_type=OUT)(x, plgpu.alloc_semaphore())

    jax.eval_shape(call, OUT)


USES = {
    "another scope": lambda o, s: plgpu.semaphore_wait(s, memory_scope="cta"),
    "no signals": lambda o, s: plgpu.semaphore_signal_parallel(),
    "no signal": lambda o, s: plgpu.semaphore_signal_parallel(s),
    "a read": lambda o, s: o.set(s),
    "a write": lambda o, s: s.set(0),
    "an atomic operation": lambda o, s: plgpu.atomic_add(s, 1),
    "SMEM of all CTAs": lambda o, s: plgpu.get_global(plgpu.SMEM((8,), F32)),
    "a barrier of all CTAs": lambda o, s: plgpu.get_global(plgpu.Barrier()),
    "an accumulator of all CTAs": lambda o, s: plgpu.get_global(plgpu.ACC((64, 8))),
    "no declaration": lambda o, s: plgpu.get_global((8,)),
    "a negative delay": lambda o, s: plgpu.delay(-1),
    "a long delay": lambda o, s: plgpu.delay(1_000_001),
}


@pytest.mark.parametrize("use", USES)
@refused_by(traced, REGULAR)
def test_the_use_is_refused(x, o, s, *, use):
    USES[use](o, s)


@pytest.mark.parametrize("call", CALLS)
@refused
def test_a_static_index_is_in_bounds(call):
    traced(lambda x, o, s: call(s.at[4]), REGULAR((4,)))  # HERE


@pytest.mark.parametrize("shape", [0, (2, -1)])
@refused
def test_arrays_have_positive_sizes(shape):
    REGULAR(shape)  # HERE


def test_declarations_are_values():
    one, other = REGULAR((4,)).to_ref(), REGULAR((4,)).to_ref()
    assert one == other and hash(one) == hash(other) and one is not other
    assert one != REGULAR((5,)).to_ref()
    assert (REGULAR((4, 2)).shape, REGULAR((4, 2)).size) == ((4, 2), 8)
    assert str(one.str_short()) == "Semaphore[4]"


@refused
def test_get_global_is_called_in_a_kernel():
    plgpu.get_global(REGULAR)  # HERE
