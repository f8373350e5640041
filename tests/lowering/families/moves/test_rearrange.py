# SPDX-License-Identifier: Apache-2.0
"""Slices, concatenations, reversals, padding and reshapes of values: everywhere."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.semantics import BOTH, Lane, under

I32 = jnp.int32


def numbers(shape, dtype="int32"):
    x = (np.arange(math.prod(shape)) * 7 % 101).reshape(shape)
    return x % 3 == 0 if dtype == "bool" else (x % 50).astype(jnp.dtype(dtype))


def check(body, x, **options):
    """The body gives in a kernel what it gives in JAX."""
    with jax.enable_x64(x.dtype.itemsize == 8):
        expected = np.asarray(body(jnp.asarray(x)))
        make = everywhere.elementwise(body, expected.dtype, shape=expected.shape)
        everywhere.check(make, [x], expected, **options)


# One operation each, for arrays of rank 2 with axes of at least 16.
OPERATIONS = {
    "concatenate": lambda x: jnp.concatenate([x, x[:8], x[::-1]], 0),
    "concatenate minor": lambda x: jnp.concatenate([x[:, :4], x[:, :12]], 1),
    "split": lambda x: jnp.split(x, 2, 1)[1],
    "pad": lambda x: jnp.pad(x, ((8, 8), (0, 16))),
    "pad negative": lambda x: lax.pad(x, x[0, 1], ((-1, 1, 0), (-3, -5, 0))),
    "pad interior": lambda x: lax.pad(x[:8], x[0, 1], ((0, 1, 1), (0, 0, 0))),
    "rev": lambda x: x[::-1],
    "flip": jnp.flip,
    "tile": lambda x: jnp.tile(x, (2, 3)),
    "stack": lambda x: jnp.stack([x, x + 1], 1),
    "unstack": lambda x: sum(jnp.unstack(x[:, 2:6], axis=1)),
    "roll": lambda x: jnp.roll(x, 3, 1),
    "stride": lambda x: x[::2],
    "stride minor": lambda x: x[:, 1::3],
    "slice": lambda x: x[3:11, 5:9],
    "row": lambda x: x[5],
    "element": lambda x: x ^ x[2, 3] if x.dtype != np.float32 else x + x[2, 3],
    "last": lambda x: x[-1:, -1:],
    "reshape": lambda x: x.reshape(-1, 8),
    "reshape with dimensions": lambda x: lax.reshape(x, (x.size,), (1, 0)),
    "transpose": lambda x: x.T,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_agrees_with_jax(name):
    check(OPERATIONS[name], numbers((32, 16)))


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float32", "int64"])
@pytest.mark.parametrize(
    "name", ["concatenate", "pad", "flip", "stride minor", "slice", "reshape"]
)
def test_every_width(name, dtype):
    check(OPERATIONS[name], numbers((32, 16), dtype))


@pytest.mark.parametrize(
    ("shape", "body"),
    [
        ((128,), lambda x: x[::-1]),
        ((128,), lambda x: jnp.concatenate([x[5:], x[:5]])),
        ((3,), lambda x: jnp.pad(x, 1)),
        ((5, 3), lambda x: x[1:4, ::2]),
        ((5, 3), lambda x: jnp.concatenate([x, x], 1)),
        ((1, 1), lambda x: jnp.pad(x, ((0, 3), (2, 0)))),
        ((4, 8, 16), lambda x: jnp.flip(x, (0, 2))),
        ((4, 8, 16), lambda x: x[1:3, :, 3:11]),
        ((3, 2, 5, 4), lambda x: x[::2, :, 1:4].reshape(3, -1)),
        ((2, 3, 4, 8), lambda x: jnp.concatenate([x, x[:, ::-1]], 1)),
        ((129,), lambda x: jnp.concatenate([x[1:], x[:1]])),
        ((1001,), lambda x: x[::-1][3:900:2]),
        ((100, 77), lambda x: x.reshape(77, 100)),
        ((100, 77), lambda x: jnp.pad(x[3:, 1:70], ((1, 2), (0, 9)))),
        ((65, 33), lambda x: jnp.concatenate([x, x[:, :7]], 1).T),
        ((65, 33), lambda x: jnp.concatenate([x, x])),
        ((24, 16), lambda x: x.reshape(3, 128).T),
        ((24, 16), lambda x: jnp.concatenate([x[8:], x[:8]])),
    ],
)
def test_every_rank_and_sizes_that_are_no_powers_of_two(shape, body):
    check(body, numbers(shape))


@pytest.mark.parametrize("start", [0, 3, 40, -5])
@pytest.mark.parametrize("dtype", ["int32", "int8", "uint32"])
def test_a_dynamic_slice_clamps_its_start(start, dtype):
    x = numbers((32, 16))
    x[0, 0] = start if dtype != "uint32" or start >= 0 else 2**31 - 1

    def body(x):
        i = x[0, 0].astype(dtype)
        if dtype == "uint32":
            i = i * 2
        part = lax.dynamic_slice(x, (i, jnp.asarray(2, dtype)), (8, 12))
        return lax.dynamic_update_slice(x, part * 2, (i, i))

    check(body, x)


@everywhere.tests(check, numbers((32, 16)))
def test_a_part_may_be_all_of_the_array(x):
    i = x[0, 1]
    y = lax.dynamic_update_slice(x, x * 2, (i, i))
    return lax.dynamic_slice(y, (i, i), (32, 16)) + x[:, 0:16]


@pytest.mark.smoke
@everywhere.tests(check, numbers((32, 16)))
def test_splats_and_iotas_are_sliced_joined_and_turned(x):
    row = lax.broadcasted_iota(I32, x.shape, 0)
    ones = jnp.ones_like(x)
    both = jnp.concatenate([row, ones, x[:4]])[8:40]
    return (
        both
        + jnp.flip(ones)
        + jnp.flip(row, 0)
        + ones[3:4, 2:3]
        + row.reshape(16, 32).T
        + jnp.pad(ones[1:], ((1, 0), (0, 0)), constant_values=5)
        + lax.dynamic_slice(ones, (x[0, 1], x[0, 2]), (32, 1))
    )


@everywhere.tests(check, numbers((32, 16)))
def test_rows_that_are_broadcast_are_sliced(x):
    rows = jnp.broadcast_to(x.max(1, keepdims=True), (32, 16)) + 1
    return rows[1:31:2] + jnp.flip(rows)[:15] + rows.reshape(16, 32)[:15, :16]


@everywhere.tests(check, numbers((32, 16)))
def test_a_loops_array_of_one_element_is_a_scalar(x):
    def step(_, carry):
        total, one = carry
        return total + jnp.squeeze(one), one * 2

    start = jnp.int32(0), x[:1, 3]
    return x + lax.fori_loop(0, 3, step, start)[0]


@pytest.mark.parametrize("scratch", [None, 512])
def test_warpgroups_have_scratch_of_their_own(scratch):
    """It grows after the first use, and where it may not, there are rounds."""
    x = numbers((2, 64, 32))

    def body(x_ref, o_ref):
        i = lax.axis_index("wg")
        x = x_ref[i]
        x = x + jnp.cumsum(x, axis=0) * 0 + x[5, 7]
        o_ref[i] = jnp.flip(jnp.concatenate([x[3:], x[:3]])) + i

    moved = x + x[:, 5:6, 7:8]
    moved = np.concatenate([moved[:, 3:], moved[:, :3]], 1)[:, ::-1, ::-1]
    everywhere.run(
        body,
        [x],
        moved + np.arange(2, dtype=np.int32)[:, None, None],
        threads={"wg": 2},
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=scratch),
    )


@pytest.mark.parametrize("choice", BOTH)
def test_aligned_parts_are_renamed(choice):
    """No data moves through SMEM where registers are only renamed."""

    def body(x_ref, o_ref):
        x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA)
        left, right = jnp.split(x, 2, 1)
        o_ref[...] = jnp.concatenate([right, left], 1)

    x = numbers((64, 32), "float32")
    kernel = under(choice, everywhere.kernel(body, x)())
    (lowered,) = plgpu.offline.lower(kernel, x, target="sm_90a")
    assert "llvm.ptr<3>" not in lowered.mlir


@everywhere.gives(
    [numbers((64, 32), "float32")],
    lambda x: np.concatenate([x[:8], x[::-1, ::-1][8:]]) + x,
    semantics=[Lane],
)
def test_the_layout_of_the_operand_stays_where_it_fits(x_ref, o_ref):
    x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA)
    y = lax.dynamic_update_slice(jnp.flip(x), x[:8], (x_ref[0, 0].astype(I32), 0))
    o_ref[...] = y + x  # Lane refuses this for two layouts.
