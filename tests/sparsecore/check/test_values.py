# SPDX-License-Identifier: Apache-2.0
"""Values without a register, accesses without an instruction, memory without room."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax import lax

from pallas_gpu import errors
from pallas_gpu import sparsecore as plsc
from tests.support.refusal import refused_by
from tests.support.sparsecore.tracing import array, scalars, trace

VMEM = [plsc.VMEM((4, 32), jnp.float32)]


@refused_by(trace, scratch_types=VMEM)
def test_a_vector_that_is_not_a_register(x, o, part):
    part[0, :8] = part[0, :8]  # HERE


@refused_by(trace, scratch_types=VMEM)
def test_a_vector_of_two_dimensions(x, o, part):
    part[:2, :4] = jnp.zeros((2, 4))  # HERE


@refused_by(trace, scratch_types=VMEM)
def test_a_scalar_of_vmem(x, o, part):
    part[0, 0] = 1.0  # HERE


@refused_by(trace)
def test_a_value_of_hbm(x, o):
    o[...] = x[...]  # HERE


@pytest.mark.parametrize(
    "accuracy",
    [lax.AccuracyMode.HIGHEST, lax.Tolerance(rtol=1e-3)],
    ids=["mode", "tolerance"],
)
def test_an_accuracy_of_a_function(accuracy):
    def body(x, o):
        @plsc.when(lax.exp(1.0 * lax.axis_index("core"), accuracy=accuracy) > 1)
        def _():
            pass

    with pytest.raises(errors.UnsupportedError, match="exp with an accuracy"):
        trace(body)


@refused_by(trace, scratch_types=[plsc.VMEM_SHARED((16,), jnp.float32)])
def test_a_value_of_shared_memory(x, o, shared):
    shared[...] = jnp.zeros(16)  # HERE


@refused_by(trace, scratch_types=[plsc.SMEM((16,), jnp.float32)])
def test_a_vector_of_smem(x, o, scalars):
    scalars[...] = jnp.zeros(16)  # HERE


@refused_by(trace, scratch_types=VMEM)
def test_a_stride(x, o, part):
    part[0, ::2] = jnp.zeros(16)  # HERE


@refused_by(trace, scratch_types=VMEM)
def test_indices_of_a_vector(x, o, part):
    part[0, lax.iota(jnp.int32, 16)] = jnp.zeros(16)  # HERE


@refused_by(trace, mesh=scalars())
def test_a_vector_on_a_scalar_subcore(x, o):
    jnp.zeros(16) + 1.0  # HERE


@refused_by(trace, mesh=scalars(), scratch_types=VMEM)
def test_vmem_of_a_scalar_subcore(x, o, part):
    pass


@refused_by(trace, mesh=scalars())
def test_a_barrier_of_a_scalar_subcore(x, o):
    plsc.subcore_barrier()  # HERE


@refused_by(trace)
def test_a_sum_over_the_subcores(x, o):
    lax.psum(1.0 * lax.axis_index("subcore"), "subcore")  # HERE


@refused_by(trace)
def test_a_print_of_two_values(x, o):
    plsc.debug_print("{} {}", lax.axis_index("core"), lax.axis_index("subcore"))  # HERE


@refused_by(trace, scratch_types=VMEM)
def test_a_print_of_a_reference_and_a_value(x, o, part):
    plsc.debug_print("{} {}", part, 1)  # HERE


@refused_by(trace, scratch_types=[plsc.VMEM((16, 128), jnp.bfloat16)])
def test_a_print_of_a_narrow_row(x, o, part):
    plsc.debug_print("{}", part.at[3])  # HERE


@refused_by(trace, scratch_types=[plsc.VMEM((16, 256), jnp.float32)])
def test_a_print_of_a_part_of_rows(x, o, part):
    plsc.debug_print("{}", part.at[:, lax.axis_index("core") * 64])  # HERE


@refused_by(trace, scratch_types=[plsc.SemaphoreType.REGULAR])
def test_a_print_of_semaphores(x, o, ready):
    plsc.debug_print("{}", ready)  # HERE


@refused_by(trace, scratch_types=[plsc.VMEM((1024, 129), jnp.float32)])
def test_more_vmem_than_there_is(x, o, large):
    pass


@refused_by(
    trace,
    scratch_types=[
        plsc.VMEM((100_000,), jnp.float32),
        plsc.VMEM_SHARED((1_000_000,), jnp.float32),
    ],
)
def test_more_of_the_pool_than_there_is(x, o, own, shared):
    pass


@pytest.mark.parametrize(
    "tiling, fits", [("compact", False), ("sparsecore", True)], ids=str
)
def test_tiling_decides_how_much_an_array_occupies(tiling, fits):
    def body(x, o, narrow, row):
        pass

    options = {
        "scratch_types": [
            plsc.VMEM((1024, 8), jnp.float32),
            plsc.VMEM((128,), jnp.float32),
        ],
        "compiler_params": plsc.CompilerParams(tiling=tiling),
    }
    if fits:
        trace(body, **options)
        return
    with pytest.raises(errors.OutOfResources):
        trace(body, **options)


@pytest.mark.parametrize(
    "target, lanes", [("v5p", 8), ("v6e", 8), ("tpu7x", 16)], ids=str
)
def test_registers_have_the_lanes_of_the_chip(target, lanes):
    def body(x, o, part):
        n = plsc.get_sparse_core_info().num_lanes
        assert n == lanes
        part[0, :n] = part[0, :n] + 1

    params = plsc.CompilerParams(target=target)
    trace(body, scratch_types=VMEM, inputs=(array(8),), compiler_params=params)
