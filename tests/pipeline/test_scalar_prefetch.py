# SPDX-License-Identifier: Apache-2.0
"""Scalar prefetch: index maps of pallas_call that read the call's first arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.entry_kernels import f32, numbers
from tests.support.refusal import refused

ORDER = np.array([3, 0, 7, 1, 2, 6, 5, 4], np.int32)
GATHERED = plgpu.BlockSpec((8, 128), lambda i, order: (order[i], 0))
ROWS = plgpu.BlockSpec((8, 128), lambda i, _: (i, 0))


def copy(order, x, o):
    o[...] = x[...]


def called(body, out=None, *, semantics="parallel", count=1, interpret=None, **spec):
    return plgpu.pallas_call(
        body, out or f32(), interpret=interpret,
        grid_spec=plgpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=count, **({"grid": (8,)} | spec)
        ),
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=(semantics,), max_concurrent_steps=2
        ),
    )  # fmt: skip


def gather(interpret=None, semantics="parallel"):
    return called(
        copy, semantics=semantics, in_specs=[GATHERED], out_specs=ROWS,
        interpret=interpret,
    )  # fmt: skip


def blocks(array):
    return array.reshape(8, 8, 128)


@pytest.mark.parametrize("semantics", ["parallel", "arbitrary"])
def test_the_index_map_of_an_argument_reads_an_array(semantics):
    expected = blocks(numbers())[ORDER].reshape(64, 128)
    everywhere.check(
        lambda interpret: gather(interpret, semantics), [ORDER, numbers()], expected
    )


@pytest.mark.parametrize("semantics", ["parallel", "arbitrary"])
def test_the_index_map_of_a_result_reads_an_array(semantics):
    expected = np.empty_like(numbers())
    blocks(expected)[ORDER] = blocks(numbers())
    everywhere.check(
        lambda interpret: called(
            copy, semantics=semantics, in_specs=[ROWS], out_specs=GATHERED,
            interpret=interpret,
        ),
        [ORDER, numbers()], expected,
    )  # fmt: skip


def test_the_last_step_decides_about_a_block_that_several_steps_write():
    """Steps in between have another block: the later store overwrites the earlier."""
    order = np.array([0, 1, 0, 2, 1, 3, 3, 0], np.int32)
    call = called(
        copy, f32(32, 128), semantics="arbitrary", in_specs=[ROWS], out_specs=GATHERED,
        interpret=plgpu.InterpretParams(schedules=3),
    )  # fmt: skip
    last = [7, 4, 3, 6]
    np.testing.assert_array_equal(
        call(order, numbers()), blocks(numbers())[last].reshape(32, 128)
    )


def test_the_body_gets_the_arrays_as_its_first_references():
    def body(order, scale, x, o):
        i = plgpu.program_id(0)
        o[...] = x[...] * (order[i] + scale[0]).astype(jnp.float32)

    spec = plgpu.BlockSpec((8, 128), lambda i, order, scale: (order[i], 0))
    rows = plgpu.BlockSpec((8, 128), lambda i, *_: (i, 0))
    call = called(body, count=2, in_specs=[spec], out_specs=rows)
    expected = blocks(numbers())[ORDER] * (ORDER + 5)[:, None, None]
    got = call(ORDER, np.array([5], np.int32), numbers())
    np.testing.assert_array_equal(got, expected.reshape(64, 128))


def test_scratch_follows_the_arrays():
    def body(order, x, o, tile):
        tile[...] = x[...]
        o[...] = tile[...] + order[0].astype(jnp.float32)

    tile = plgpu.SMEM((8, 128), jnp.float32)
    call = called(body, in_specs=[GATHERED], out_specs=ROWS, scratch_shapes=[tile])
    expected = blocks(numbers())[ORDER].reshape(64, 128) + ORDER[0]
    np.testing.assert_array_equal(call(ORDER, numbers()), expected)


@pytest.mark.parametrize("batched", [(0, 0), (None, 0), (0, None)])
def test_vmap_over_arrays_that_index_maps_read(batched):
    orders = np.stack([ORDER, ORDER[::-1]])
    xs = np.stack([numbers(), numbers() + 1])
    args = [a if b == 0 else a[0] for a, b in zip((orders, xs), batched, strict=True)]
    got = jax.jit(jax.vmap(gather(), in_axes=batched))(*args)
    for k in range(2):
        order, x = (a[k] if b == 0 else a for a, b in zip(args, batched, strict=True))
        np.testing.assert_array_equal(got[k], blocks(x)[order].reshape(64, 128))


@refused
def test_an_index_outside_of_the_array_is_found_with_a_line():
    order = ORDER.copy()
    order[2] = 8
    gather()(order, numbers())


def test_blocks_that_several_ctas_store_are_a_race():
    order = np.array([0, 1, 0, 2, 4, 3, 3, 0], np.int32)
    call = called(copy, in_specs=[ROWS], out_specs=GATHERED)
    with pytest.raises(errors.RaceError):
        call(order, numbers())


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize("args", [(), (numbers(), ORDER)], ids=["none", "floats"])
@refused
def test_the_first_arguments_are_the_arrays_of_integers_that_index_maps_read(args):
    gather()(*args)  # HERE


@refused
def test_an_index_map_takes_the_references_too():
    spec = plgpu.BlockSpec((8, 128), lambda i: (i, 0))  # HERE
    called(copy, in_specs=[spec], out_specs=ROWS)(ORDER, numbers())


@refused
def test_a_mistake_in_an_index_map_has_its_line():
    of_two = plgpu.BlockSpec((8, 128), lambda i, order: (order[i, 0], 0))  # HERE
    called(copy, in_specs=[of_two], out_specs=ROWS)(ORDER, numbers())
