# SPDX-License-Identifier: Apache-2.0
"""Programs with a body for vector subcores and one for scalar subcores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxlib.mlir import ir

from pallas_gpu import sparsecore as plsc
from tests.support.refusal import refused
from tests.support.sparsecore import emitted, interpreter
from tests.support.sparsecore.modules import CHIPS, needs_libtpu
from tests.support.sparsecore.tracing import array, scalars, vectors

MESHES = [vectors(num_cores=2), scalars(num_cores=2)]


def doubled(x, twice, sums):
    """Of vector subcores."""
    lanes = plsc.get_sparse_core_info().num_lanes
    number = lax.axis_index("core") * 16 + lax.axis_index("subcore")
    part = plsc.ds(number * 32, 32)

    def scoped(own):
        plsc.sync_copy(x.at[part], own)

        @plsc.parallel_loop(0, 32, step=lanes)
        def _(i):
            own[plsc.ds(i, lanes)] = 2 * own[plsc.ds(i, lanes)]

        plsc.sync_copy(own, twice.at[part])

    plsc.run_scoped(scoped, plsc.VMEM((32,), jnp.int32))


def summed(x, twice, sums):
    """Of scalar subcores: running sums of a part for each core."""
    part = plsc.ds(lax.axis_index("core") * 64, 64)

    def scoped(own):
        plsc.sync_copy(x.at[part], own)

        @plsc.loop(1, 64)
        def _(i):
            own[i] = own[i] + own[i - 1]

        plsc.sync_copy(own, sums.at[part])

    plsc.run_scoped(scoped, plsc.SMEM((64,), jnp.int32))


def _kernel(**options):
    types = [array(1024, dtype=jnp.int32), array(128, dtype=jnp.int32)]
    return plsc.kernel([doubled, summed], types, mesh=MESHES, **options)


X = np.arange(1024, dtype=np.int32)


def _require_right(results):
    np.testing.assert_array_equal(results[0], 2 * X)
    expected = np.cumsum(X[:128].reshape(2, 64), axis=1).reshape(-1)
    np.testing.assert_array_equal(results[1], expected)


def test_both_kinds_run_at_the_same_time():
    _require_right(_kernel(interpret=plsc.InterpretParams(schedules=3))(X))


def test_the_module_has_a_function_for_each_kind():
    build = emitted.lowered(_kernel(), X)
    text = str(build.module)
    assert text.count("func.func") == 2
    assert "sc_vector_subcore" in text and "sc_scalar_subcore" in text
    # They share nothing, so one after the other is one of their orders.
    found = [interpreter.execute(_only(build.module, i), X)[i] for i in range(2)]
    _require_right(found)


def _only(module, number):
    """A module with one of the functions."""
    with module.context, ir.Location.unknown():
        copy = ir.Module.parse(str(module))
    copy.body.operations[1 - number].erase()
    return copy


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_libtpu_compiles_both(chip):
    program = emitted.compiled(_kernel(), X, target=chip).program
    kinds = {stream.kind for stream in program.vector.streams}
    assert kinds == {"stream.linear.gather", "stream.linear.scatter"}
    assert any("dma." in i for i in program.scalar.instructions)


def _traced(bodies, meshes, **options):
    call = plsc.kernel(bodies, array(128), mesh=meshes, **options)
    jax.make_jaxpr(call)(array(128))


def _nothing(x, o):
    pass


MISTAKES = {
    "two of one kind": lambda: _traced([_nothing] * 2, [vectors(), vectors()]),
    "one body": lambda: _traced(_nothing, MESHES),
    "one mesh": lambda: _traced([_nothing] * 2, vectors()),
    "other cores": lambda: _traced(
        [_nothing] * 2, [vectors(num_cores=2), scalars(num_cores=1)]
    ),
    "a barrier of scalar subcores": lambda: _traced(
        [_nothing, lambda x, o: plsc.subcore_barrier()], MESHES
    ),
    "VMEM of both": lambda: _traced(
        [lambda *_: None] * 2, MESHES, scratch_types=[plsc.VMEM((8,), jnp.float32)]
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@refused
def test_mistakes(mistake):
    MISTAKES[mistake]()
