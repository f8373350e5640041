# SPDX-License-Identifier: Apache-2.0
"""`emit_pipeline`: steps get their blocks, and results arrive, in every schedule."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu import sparsecore as plsc
from tests.support.refusal import refused_by
from tests.support.sparsecore.kernels import check
from tests.support.sparsecore.tracing import trace

LANES = 16
BOTH = ("c", "s")
PARALLEL = (plsc.PARALLEL,)


def _vectors(size):
    def each(body):
        return plsc.parallel_loop(0, size, step=LANES)(
            lambda i: body(plsc.ds(i, LANES))
        )

    return each


def _double(x, o):
    @_vectors(x.shape[0])
    def _(part):
        o[part] = 2 * x[part]


X = np.arange(11 * 32, dtype=np.float32)
BLOCK = plsc.BlockSpec((32,), lambda i: (i,))


@pytest.mark.parametrize("steps, cores", [(1, 1), (2, 2), (3, 1), (8, 2), (11, 2)])
def test_subcores_share_the_steps_of_a_parallel_axis(steps, cores):
    def body(x, o):
        plsc.emit_pipeline(
            _double, grid=(steps,), in_specs=[BLOCK], out_specs=[BLOCK],
            core_axis_name=BOTH, dimension_semantics=PARALLEL,
        )(x, o)  # fmt: skip

    x = X[: 32 * steps]
    check(body, [x], 2 * x, cores=cores, subcores=2, schedules=2)


def test_a_number_of_steps_that_is_known_at_run_time():
    def body(x, n, o, count, shared):
        plsc.sync_copy(n, shared)
        plsc.sync_copy(shared, count)
        plsc.emit_pipeline(
            _double, grid=(count[0],), in_specs=[BLOCK], out_specs=[BLOCK],
            core_axis_name="s", dimension_semantics=PARALLEL,
        )(x, o)  # fmt: skip

    n = np.full(8, 5, np.int32)
    scratch = plsc.SMEM((8,), jnp.int32), plsc.VMEM_SHARED((8,), jnp.int32)
    check(body, [X[:160], n], 2 * X[:160], *scratch, subcores=1, schedules=2)


def test_a_block_of_a_result_stays_while_steps_add_to_it():
    def add(x, o):
        @plsc.when(plsc.program_id(1) == 0)
        def _():
            _vectors(32)(lambda part: o.set(jnp.zeros(LANES, jnp.int32), part))

        @_vectors(32)
        def _(part):
            o[part] = o[part] + x[part]

    def body(x, o):
        plsc.emit_pipeline(
            add,
            grid=(2, 3),
            in_specs=[plsc.BlockSpec((None, 32), lambda i, j: (i * 3 + j, 0))],
            out_specs=[plsc.BlockSpec((None, 32), lambda i, j: (i, 0))],
        )(x, o)

    x = np.arange(6 * 32, dtype=np.int32).reshape(6, 32)
    expected = x.reshape(2, 3, 32).sum(1, dtype=np.int32)
    check(body, [x], expected, subcores=1, schedules=3)


def test_rows_that_indices_name_are_gathered_ahead():
    def copy(x, o):
        @plsc.loop(0, 8)
        def _(row):
            @_vectors(128)
            def _(part):
                o[row, part] = x[row, part] + 1

    def body(table, rows, o, index):
        plsc.sync_copy(rows, index)
        plsc.emit_pipeline(
            copy,
            grid=(4,),
            in_specs=[
                plsc.BlockSpec(
                    (plsc.Indirect(8), 128),
                    lambda i: (index.at[plsc.ds(i * 8, 8)], 0),
                )
            ],
            out_specs=[plsc.BlockSpec((8, 128), lambda i: (i, 0))],
        )(table, o)

    table = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
    rows = (np.arange(32, dtype=np.int32) * 7) % 64
    scratch = [plsc.VMEM((32,), jnp.int32)]
    check(body, [table, rows], table[rows] + 1, *scratch, subcores=1, schedules=3)


def test_scalar_subcores_have_blocks_in_smem():
    def add(x, o):
        @plsc.loop(0, 8)
        def _(i):
            o[i] = x[i] + 1

    spec = plsc.BlockSpec((8,), lambda i: (i,))

    def body(x, o):
        plsc.emit_pipeline(
            add, grid=(6,), in_specs=[spec], out_specs=[spec],
            core_axis_name="c", dimension_semantics=PARALLEL,
        )(x, o)  # fmt: skip

    x = np.arange(48, dtype=np.int32)
    check(body, [x], x + 1, scalar=True, cores=2, schedules=2)


def test_the_body_gets_whole_arrays_and_scratch():
    def body(x, o, sums):
        def add(part, whole, _, total):
            assert whole.shape == (64,)
            total[:LANES] = total[:LANES] + part[:LANES]

        sums[:] = jnp.zeros(LANES, jnp.float32)
        plsc.emit_pipeline(
            add,
            grid=(4,),
            in_specs=[plsc.BlockSpec((LANES,), lambda i: (i,)), plsc.BlockSpec()],
            out_specs=[plsc.BlockSpec(memory_space=plsc.HBM)],
        )(x, x, o, scratches=[sums])
        plsc.sync_copy(sums, o)

    x = np.arange(64, dtype=np.float32)
    expected = x.reshape(4, LANES).sum(0)
    check(body, [x], expected, plsc.VMEM((LANES,), jnp.float32), subcores=1)


def _pipeline(**options):
    given = {"grid": (4,), "in_specs": [BLOCK], "out_specs": [BLOCK], **options}
    return plsc.emit_pipeline(_double, **given)


MISTAKES = {
    "blocks that do not divide": lambda x, o: _pipeline(
        in_specs=[plsc.BlockSpec((100,), lambda i: (i,))]
    )(x, o),
    "a reference too few": lambda x, o: _pipeline()(x),
    "an index too many": lambda x, o: _pipeline(
        in_specs=[plsc.BlockSpec((32,), lambda i: (i, 0))]
    )(x, o),
    "no parallel axis": lambda x, o: _pipeline(core_axis_name="core")(x, o),
    "an unknown axis": lambda x, o: _pipeline(
        core_axis_name="tile", dimension_semantics=PARALLEL
    )(x, o),
    "semantics of two axes": lambda x, o: _pipeline(dimension_semantics=PARALLEL * 2),
    "no such semantics": lambda x, o: _pipeline(dimension_semantics=("random",)),
    "an empty grid": lambda x, o: _pipeline(grid=(0,)),
    "a block of zero": lambda x, o: plsc.BlockSpec((0,), lambda i: (i,)),
    "no spec": lambda x, o: _pipeline(in_specs=[(32,)]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@refused_by(trace)
def test_mistakes(x, o, *, mistake):
    MISTAKES[mistake](x, o)
