# SPDX-License-Identifier: Apache-2.0
"""What `InterpretParams(like_upstream=True)` accepts, and errors without it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors

X = np.arange(128, dtype=np.float32)
LIKE_UPSTREAM = plgpu.InterpretParams(like_upstream=True)
SMEM = plgpu.SMEM((128,), np.float32)


def call(body, interpret, *scratch):
    k = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(X.shape, X.dtype),
        scratch_types=scratch,
        interpret=interpret,
    )
    return k(X)


def stores_to_an_input(x, o):
    x[...] = x[...] + 1
    o[...] = x[...]


def stores_half_of_a_result(x, o):
    o[0:64] = x[0:64] + 1


def signals_once_more_than_it_waits(x, o, ready):
    plgpu.semaphore_signal(ready, 2)
    plgpu.semaphore_wait(ready)
    o[...] = x[...] + 1


def loads_what_it_does_not_wait_for(x, o, held, loaded):
    plgpu.copy_gmem_to_smem(x, held, loaded)
    o[...] = x[...] + 1


def leaves_a_scope_while_it_loads(x, o):
    plgpu.run_scoped(
        lambda held, loaded: plgpu.copy_gmem_to_smem(x, held, loaded),
        SMEM,
        plgpu.Barrier(),
    )
    o[...] = x[...] + 1


def loads_by_threads_what_it_does_not_wait_for(x, o, held):
    plgpu.copy_gmem_to_smem(x.at[0:2], held.at[0:2])
    o[...] = x[...] + 1


def stores_a_copy_that_it_does_not_wait_for(x, o, held):
    held[...] = x[...] + 1
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(held, o)


RULES = [
    (stores_to_an_input, errors.KernelError, ()),
    (stores_half_of_a_result, errors.UnwrittenResultError, ()),
    (
        signals_once_more_than_it_waits,
        errors.SemaphoreError,
        (plgpu.SemaphoreType.REGULAR,),
    ),
    (loads_what_it_does_not_wait_for, errors.BarrierError, (SMEM, plgpu.Barrier())),
    (leaves_a_scope_while_it_loads, errors.BarrierError, ()),
    (loads_by_threads_what_it_does_not_wait_for, errors.BarrierError, (SMEM,)),
    (stores_a_copy_that_it_does_not_wait_for, errors.KernelError, (SMEM,)),
]


@pytest.mark.parametrize(
    ("body", "error", "scratch"), RULES, ids=[body.__name__ for body, *_ in RULES]
)
def test_what_is_an_error_is_accepted_like_upstream(body, error, scratch):
    for seed in range(3):
        with pytest.raises(error):
            call(body, plgpu.InterpretParams(seed=seed, asynchrony="late"), *scratch)
    result = call(body, LIKE_UPSTREAM, *scratch)
    np.testing.assert_array_equal(result[0:64], X[0:64] + 1)


def test_a_stored_input_is_the_kernels_own_copy():
    x = X.copy()
    k = plgpu.kernel(
        stores_to_an_input,
        out_type=jax.ShapeDtypeStruct(X.shape, X.dtype),
        interpret=LIKE_UPSTREAM,
    )
    np.testing.assert_array_equal(k(x), X + 1)
    np.testing.assert_array_equal(jax.jit(k)(x), X + 1)
    np.testing.assert_array_equal(x, X)


def test_a_race_is_one_like_upstream_too():
    def body(x, o):
        o[...] = x[...] + jax.lax.axis_index("g")

    with pytest.raises(errors.RaceError):
        plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(X.shape, X.dtype),
            grid=(2,),
            grid_names=("g",),
            interpret=LIKE_UPSTREAM,
        )(X)


def test_what_overwrites_an_operand_in_flight_is_accepted_without_races():
    def body(x, o, held, barrier):
        for i in range(2):
            plgpu.copy_gmem_to_smem(x.at[64 * i : 64 * (i + 1)], held.at[0:64], barrier)
            plgpu.barrier_wait(barrier)
            plgpu.copy_smem_to_gmem(held.at[0:64], o.at[64 * i : 64 * (i + 1)])
        plgpu.wait_smem_to_gmem(0)

    scratch = SMEM, plgpu.Barrier()
    with pytest.raises(errors.RaceError):
        call(body, plgpu.InterpretParams(detect_races=False), *scratch)
    at_once = dataclasses.replace(LIKE_UPSTREAM, detect_races=False, asynchrony="eager")
    np.testing.assert_array_equal(call(body, at_once, *scratch), X)
