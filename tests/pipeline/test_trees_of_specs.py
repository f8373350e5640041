# SPDX-License-Identifier: Apache-2.0
"""Block specs are pytrees, as in `jax.tree`: None is one without leaves."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.entry_kernels import f32, numbers
from tests.support.refusal import refused

ROWS = plgpu.BlockSpec((8, 128), lambda i: (i, 0))
Specialized = functools.partial(
    plgpu.emit_pipeline_warp_specialized,
    num_compute_wgs=1, memory_registers=40, wg_axis="wg",
)  # fmt: skip
PIPELINES = pytest.mark.parametrize(
    ("pipeline", "threads"),
    [(plgpu.emit_pipeline, {}), (Specialized, {"threads": {"wg": 2}})],
)


class Weighted(NamedTuple):
    value: Any
    weight: Any


@PIPELINES
def test_none_is_an_input_and_an_output_that_is_absent(pipeline, threads):
    def step(_, x, absent, pair, o, nothing):
        assert absent is None
        assert nothing == {"more": None}
        assert isinstance(pair, Weighted)
        assert pair.weight is None
        o[...] = x[...] + pair.value[...]

    def body(x, y, o):
        pipeline(
            step, grid=(8,), in_specs=[ROWS, None, Weighted(ROWS, None)],
            out_specs=(ROWS, {"more": None}), max_concurrent_steps=2,
        )(x, None, Weighted(y, None), o, {"more": None})  # fmt: skip

    x = numbers()
    everywhere.check(everywhere.kernel(body, f32(), **threads), [x, x + 1], 2 * x + 1)


@PIPELINES
def test_specs_of_one_argument_need_no_list(pipeline, threads):
    def step(_, pair, o):
        o[...] = pair["x"][...] + pair["y"][...]

    def body(x, y, o):
        pipeline(
            step, grid=(8,), in_specs={"x": ROWS, "y": ROWS}, out_specs=ROWS,
            max_concurrent_steps=2,
        )({"x": x, "y": y}, o)  # fmt: skip

    x = numbers()
    everywhere.check(everywhere.kernel(body, f32(), **threads), [x, x + 1], 2 * x + 1)


@pytest.mark.parametrize("produced", [False, True])
@pytest.mark.parametrize("consumed", [False, True])
def test_barriers_have_the_structure_of_the_inputs(produced, consumed):
    """It has None for an input without a barrier: one that is not copied each step."""
    fixed = plgpu.BlockSpec((8, 128), lambda i: (0, 0))

    def step(_, pair, fixed, o, *barriers):
        assert len(barriers) == 2 * (produced + consumed)
        for moving, constant in zip(barriers[::2], barriers[1::2], strict=True):
            assert moving["absent"] is None
            assert constant is None
        if produced:
            plgpu.barrier_wait(barriers[0]["x"])
            plgpu.barrier_wait(barriers[0]["y"])
        o[...] = pair["x"][...] + pair["y"][...] + fixed[...]
        if consumed:
            plgpu.barrier_arrive(barriers[-2]["x"])
            plgpu.barrier_arrive(barriers[-2]["y"])

    def body(x, y, z, o):
        Specialized(
            step, grid=(8,),
            in_specs=[{"x": ROWS, "absent": None, "y": ROWS}, fixed], out_specs=[ROWS],
            max_concurrent_steps=2, manual_produced_barriers=produced,
            manual_consumed_barriers=consumed,
        )({"x": x, "absent": None, "y": y}, z, o)  # fmt: skip

    x, z = numbers(), numbers(8, 128)
    make = everywhere.kernel(body, f32(), threads={"wg": 2})
    everywhere.check(make, [x, x + 1, z], 2 * x + 1 + np.tile(z, (8, 1)))


@pytest.mark.parametrize("as_grid_spec", [False, True])
def test_none_is_an_argument_of_a_call_that_is_absent(as_grid_spec):
    def body(x, absent, pair, o):
        assert absent is None
        assert pair["weight"] is None
        o["sum"][...] = x[...] + pair["value"][...]
        assert o["absent"] is None

    specs = {
        "grid": 8,
        "in_specs": [ROWS, None, {"value": ROWS, "weight": None}],
        "out_specs": {"sum": ROWS, "absent": None},
    }
    if as_grid_spec:
        specs = {"grid_spec": plgpu.GridSpec(**specs)}

    def make(interpret):
        call = plgpu.pallas_call(
            body, {"sum": f32(), "absent": None}, interpret=interpret, **specs
        )
        return lambda x, y: call(x, None, {"value": y, "weight": None})

    x = numbers()
    everywhere.check(make, [x, x + 1], {"sum": 2 * x + 1, "absent": None})


def test_none_in_the_place_of_an_array_is_the_whole_array():
    def body(x, y, o):
        o[...] = x[...] + y[plgpu.ds(plgpu.program_id(0) * 8, 8)]

    call = functools.partial(
        plgpu.pallas_call, body, f32(), grid=8, in_specs=[ROWS, None], out_specs=ROWS
    )
    make = lambda interpret: call(interpret=interpret)  # noqa: E731
    everywhere.check(make, [numbers(), numbers()], 2 * numbers())


# Trees of references that are not like [ROWS, None, {"value": ROWS}].
MISTAKES = {
    "a reference for None": lambda x, o: (x, x, {"value": x}, o),
    "None for a reference": lambda x, o: (None, None, {"value": x}, o),
    "references for a reference": lambda x, o: (x, None, {"value": (x, x)}, o),
    "another name": lambda x, o: (x, None, {"weight": x}, o),
    "a reference too few": lambda x, o: (x, None, {"value": x}),
}


@pytest.mark.parametrize("refs", MISTAKES.values(), ids=MISTAKES)
@refused
def test_references_have_the_structure_of_the_specs(refs):
    pipeline = plgpu.emit_pipeline(
        lambda *_: None, grid=(8,), in_specs=[ROWS, None, {"value": ROWS}],
        out_specs=[ROWS],
    )  # fmt: skip
    body = lambda x, o: pipeline(*refs(x, o))  # noqa: E731  # HERE
    jax.eval_shape(plgpu.kernel(body, f32()), numbers())


@pytest.mark.parametrize(
    "args", [(None, None), (None, {"p": 1})], ids=["none", "a tree"]
)
@refused
def test_arguments_have_the_structure_of_the_specs(args):
    call = plgpu.pallas_call(
        lambda *_: None, f32(), grid=8, in_specs=[None, ROWS], out_specs=ROWS
    )
    args = jax.tree.map(lambda _: numbers(), args)
    jax.eval_shape(call, *args)  # HERE


@refused
def test_specs_are_block_specs():
    plgpu.emit_pipeline(  # HERE
        lambda *_: None, grid=(8,), in_specs=[(8, 128)], out_specs=[ROWS]
    )


@refused
def test_none_is_no_sequence_of_specs():
    plgpu.emit_pipeline(lambda *_: None, grid=(8,), in_specs=None)  # HERE
