# SPDX-License-Identifier: Apache-2.0
"""`plsc.kernel`: what a body is traced to, and what a call of it is to JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import sparsecore as plsc
from pallas_gpu.entry.call import kernel_p
from tests import conftest
from tests.support import golden
from tests.support.refusal import refused, refused_by
from tests.support.sparsecore.tracing import array, program, scalars, trace, vectors


def test_a_body_is_a_program_over_memories(request):
    def lookup(table, rows, out, index, part, sem):
        base = 32 * lax.axis_index("subcore")
        plsc.sync_copy(rows.at[plsc.ds(base, 32)], index)
        named = table.at[plsc.Indices(index, ignored_value=-1)]
        copy = plsc.async_copy(named, part, sem.at[1])
        copy.wait()

        @plsc.parallel_loop(0, 32, unroll=2)
        def _(i):
            part[i, :16] = 2 * part[i, :16]

        plsc.sync_copy(part, out.at[plsc.ds(base, 32)])

    shown = program(
        lookup,
        inputs=(array(1024, 128), array(512, dtype=jnp.int32)),
        out_type=array(512, 128),
        scratch_types=[
            plsc.VMEM((32,), jnp.int32),
            plsc.VMEM((32, 128), jnp.float32),
            plsc.SemaphoreType.DMA((2,)),
        ],
    )
    golden.compare(request, shown.strip())


test_a_body_is_a_program_over_memories.has_golden_text = True  # type: ignore


def _call(**options):
    return plsc.kernel(
        lambda x, o: plsc.sync_copy(x, o), array(8), mesh=scalars(), **options
    )


def _equations(f, *args):
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    return [eqn for eqn in jaxpr.eqns if eqn.primitive is kernel_p]


def test_a_call_has_the_chip_in_its_parameters():
    (eqn,) = _equations(_call(), jnp.zeros(8))
    assert eqn.params["compiler_params"].target == "tpu7x"
    assert eqn.params["mesh"].num_cores == 2
    options = plsc.CompilerParams(target="v5p")
    (eqn,) = _equations(_call(compiler_params=options), jnp.zeros(8))
    assert eqn.params["mesh"].num_cores == 4


def test_vmap_is_a_loop_over_launches():
    batched = jax.make_jaxpr(jax.vmap(_call()))(jnp.zeros((3, 8))).jaxpr
    (loop,) = [eqn for eqn in batched.eqns if eqn.primitive is lax.scan_p]
    inner = [eqn.primitive for eqn in loop.params["jaxpr"].eqns]
    assert kernel_p in inner


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_array_of_new_ref_is_updated_in_place(around):
    @plsc.kernel(
        mesh=vectors(num_cores=1, num_subcores=1),
        scratch_types=[plsc.VMEM((4,), jnp.int32), plsc.VMEM((4, 128), jnp.float32)],
    )
    def set_rows(rows, new, table, rows_vmem, new_vmem):
        plsc.sync_copy(rows, rows_vmem)
        plsc.sync_copy(new, new_vmem)
        plsc.sync_copy(new_vmem, table.at[rows_vmem])

    rows = np.array([3, 0, 7, 5], np.int32)
    new = np.arange(4 * 128, dtype=np.float32).reshape(4, 128)
    expected = np.ones((8, 128), np.float32)
    expected[rows] = new

    def updated(table):
        ref = jax.new_ref(table)
        set_rows(rows, new, ref)
        return ref[...]

    found = around(updated)(jnp.ones((8, 128)))
    np.testing.assert_array_equal(found, expected)


def test_numbers_that_a_body_closes_over_are_constants():
    n = jnp.int32(3)

    def body(x, o, counter):
        counter[0] = n

    jaxpr = trace(body, scratch_types=[plsc.SMEM((1,), jnp.int32)])
    assert not jaxpr.constvars and len(jaxpr.invars) == 2


TABLE = np.arange(16, dtype=np.float32)


@refused_by(trace, scratch_types=[plsc.VMEM((16,), jnp.float32)])
def test_an_array_that_a_body_closes_over(x, o, part):
    part[...] = jnp.asarray(TABLE)  # HERE


@refused_by(trace)
def test_a_body_returns_nothing(x, o):
    return 1.0


@refused_by(trace)
def test_an_axis_that_the_mesh_does_not_have(x, o):
    lax.axis_index("tile")  # HERE


@refused_by(trace, out_type=array(1024, dtype=jnp.bool_))
def test_an_array_of_bools(x, o):
    pass


@refused_by(trace, mesh=vectors(num_cores=4))
def test_more_cores_than_the_chip_has(x, o):
    pass


@refused
def test_one_name_for_two_axes():
    plsc.VectorSubcoreMesh(core_axis_name="x", subcore_axis_name="x")  # HERE


@refused
def test_an_unknown_chip():
    plsc.CompilerParams(target="v4")  # HERE


@refused
def test_scratch_of_a_gpu():
    trace(lambda x, o, s: None, scratch_types=[plgpu.SMEM((8,), jnp.float32)])  # HERE


@refused
def test_scratch_in_a_kernel_of_a_gpu():
    plgpu.kernel(
        lambda x, o, s: None,
        out_type=array(8),
        scratch_types=[plsc.VMEM((8,), jnp.float32)],
    )(jnp.zeros(8))


@refused
def test_one_array_of_new_ref_as_two_arguments():
    ref = jax.new_ref(jnp.zeros(8))
    plsc.kernel(lambda x, y: None, mesh=scalars())(ref, ref)  # HERE


@pytest.mark.skipif(conftest.PLATFORM != "cpu", reason="names the platform")
@refused
def test_interpret_false_insists_on_a_tpu():
    _call(interpret=False)(jnp.zeros(8))  # HERE
