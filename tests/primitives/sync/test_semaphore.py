# SPDX-License-Identifier: Apache-2.0
"""Semaphores and delays: what they refuse, where the call is written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
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


@refused
def test_other_devices_come_later():
    traced(lambda x, o, s: plgpu.semaphore_signal(s, device_id=1), REGULAR)  # HERE


@refused
def test_scopes_are_those_of_a_device_and_of_the_system():
    wait = plgpu.semaphore_wait
    traced(lambda x, o, s: wait(s, memory_scope="cta"), REGULAR)  # HERE


@pytest.mark.parametrize(
    "use",
    [lambda o, s: o.set(s), lambda o, s: s.set(0), lambda o, s: plgpu.atomic_add(s, 1)],
    ids=["read", "write", "atomic"],
)
@refused
def test_a_semaphore_is_no_array(use):
    traced(lambda x, o, s: use(o, s.at[0]), REGULAR((2,)))


@pytest.mark.parametrize("call", CALLS)
def test_a_static_index_is_in_bounds(call):
    with pytest.raises(errors.OutOfBoundsError, match="an index is out of bounds"):
        traced(lambda x, o, s: call(s.at[4]), REGULAR((4,)))


@pytest.mark.parametrize("given", [(), ("s",)], ids=["none", "a semaphore"])
@refused_by(traced, REGULAR)
def test_parallel_signals_are_signals(x, o, s, *, given):
    plgpu.semaphore_signal_parallel(*[s for _ in given])  # HERE


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


# --- get_global -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "what", [plgpu.SMEM((8,), F32), plgpu.Barrier(), plgpu.ACC((64, 8))]
)
@refused
def test_what_ctas_do_not_share_is_refused(what):
    traced(lambda x, o: plgpu.get_global(what))  # HERE


@refused
def test_get_global_takes_a_declaration():
    traced(lambda x, o: plgpu.get_global((8,)))  # HERE


def test_get_global_is_called_in_a_kernel():
    with pytest.raises(errors.KernelError, match="get_global"):
        plgpu.get_global(REGULAR)


# --- delay ----------------------------------------------------------------------------


@pytest.mark.parametrize("nanos", [-1, 1_000_001])
@refused
def test_delays_are_those_of_the_hardware(nanos):
    traced(lambda x, o: plgpu.delay(nanos))  # HERE
