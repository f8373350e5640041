# SPDX-License-Identifier: Apache-2.0
"""Votes, matches and shuffles of the lanes of a warp, everywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere, host
from tests.support.refusal import refused_by
from tests.support.semantics import BOTH, under

LANE = np.arange(32)
FAR = (LANE * 7 + 3) % 64  # the low five bits count


def packed(x):
    return (x.astype(np.uint32) << LANE.astype(np.uint32)).sum(-1, dtype=np.uint32)


def same(x):
    bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")
    return packed(bits[..., :, None] == bits[..., None, :])


def first(x):
    return x & (np.cumsum(x, axis=-1) == 1)


def up(x, n):
    return np.where(n <= LANE, x[..., np.maximum(LANE - n, 0)], x)


def down(x, n):
    return np.where(LANE + n < 32, x[..., np.minimum(LANE + n, 31)], x)


def far(x):
    return jnp.broadcast_to(lax.iota(jnp.int32, 32) * 7 + 3, x.shape) % 64


# Of each: the function in a kernel, and on the host.
VOTES = {
    "ballot": (lambda x: plgpu.ballot(x > 0), lambda x: packed(x > 0)),
    "any": (lambda x: plgpu.vote(x > 3), lambda x: (x > 3).any(-1)),
    "all": (lambda x: plgpu.vote(x > -5, "all"), lambda x: (x > -5).all(-1)),
}
OF_LANES = {
    "elect": (lambda x: plgpu.elect(x > 2), lambda x: first(x > 2)),
    "match_any": (plgpu.match_any, same),
    "idx": (lambda x: plgpu.shfl(x, far(x)), lambda x: x[..., FAR % 32]),
    "one": (lambda x: plgpu.shfl(x, 9), lambda x: 0 * x + x[..., 9:10]),
    "up": (lambda x: plgpu.shfl(x, 3, "up"), lambda x: up(x, 3)),
    "down": (lambda x: plgpu.shfl(x, 3, "down"), lambda x: down(x, 3)),
    "xor": (lambda x: plgpu.shfl(x, 21, "xor"), lambda x: x[..., LANE ^ 21]),
    "prefix": (
        lambda x: lax.cumsum(x, axis=x.ndim - 1),
        lambda x: np.cumsum(x, axis=-1, dtype=x.dtype),
    ),
}
ALL = VOTES | OF_LANES


def numbers(rng, *shape, dtype=np.int32):
    return host.array(rng.integers(-6, 6, shape), dtype)


def check(name, x, **options):
    inside, outside = ALL[name]
    expected = outside(np.asarray(x))

    def body(x_ref, o_ref):
        o_ref[...] = inside(x_ref[...])

    everywhere.check(everywhere.kernel(body, expected, **options), [x], expected)


@pytest.mark.parametrize("name", ALL)
def test_rows_of_a_warpgroup(rng, name):
    check(name, numbers(rng, 2, 3, 32))


@pytest.mark.parametrize("name", ["ballot", "match_any", "idx"])
@pytest.mark.parametrize("rows", [(), (1,), (5,), (16,)])
def test_any_number_of_rows(rng, name, rows):
    if rows or name != "ballot":
        check(name, numbers(rng, *rows, 32))


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "float64", "uint64"])
@pytest.mark.parametrize("name", ["match_any", "up"])
def test_elements_of_any_width(rng, name, dtype):
    with jax.enable_x64(True):
        check(name, numbers(rng, 4, 32, dtype=dtype))


@pytest.mark.parametrize("name", ["match_any", "xor"])
def test_bools(rng, name):
    x = np.asarray(numbers(rng, 4, 32)) > 0
    inside, outside = ALL[name]

    def body(x_ref, o_ref):
        o_ref[...] = inside(x_ref[...] > 0)

    kernel = everywhere.kernel(body, outside(x))
    everywhere.check(kernel, [x.astype(np.int32)], outside(x))


@pytest.mark.parametrize("name", ALL)
def test_a_warp_by_itself(rng, name):
    x = numbers(rng, 4, 2, 32)
    inside, outside = ALL[name]
    expected = outside(np.asarray(x))

    def body(x_ref, o_ref):
        @plgpu.warp_map
        def _(warp_id):
            @plgpu.when(warp_id != 2)
            def _():
                o_ref[warp_id] = inside(x_ref[warp_id])

            @plgpu.when(warp_id == 2)
            def _():
                o_ref[2] = inside(x_ref[2])

    everywhere.check(everywhere.kernel(body, expected), [x], expected)


def test_a_scalar_ballot_of_a_warp(rng):
    """One row: the result is a scalar, by which a warp can branch."""
    x = numbers(rng, 4, 32)

    def body(x_ref, o_ref):
        @plgpu.warp_map
        def _(warp_id):
            votes = plgpu.ballot(x_ref[warp_id] > 0)
            o_ref[warp_id] = lax.population_count(votes).astype(jnp.int32)

    expected = (np.asarray(x) > 0).sum(-1, dtype=np.int32)
    everywhere.check(everywhere.kernel(body, expected), [x], expected)


def test_warp_aggregated_counts(rng):
    """A histogram: the first lane of each value adds for all that have it."""
    x = np.asarray(numbers(rng, 16, 32)) + 6

    def body(x_ref, o_ref):
        o_ref[...] = jnp.zeros(12, jnp.int32)
        digits = x_ref[...]
        peers = plgpu.match_any(digits)
        lane = lax.broadcasted_iota(jnp.uint32, digits.shape, 1)
        below = peers & (lax.shift_left(jnp.uint32(1), lane) - jnp.uint32(1))
        count = lax.population_count(peers).astype(jnp.int32)
        plgpu.atomic_add(o_ref.at[digits], count, mask=below == 0)

    expected = np.bincount(x.reshape(-1), minlength=12).astype(np.int32)
    kernel = everywhere.kernel(body, expected)
    everywhere.check(kernel, [x.astype(np.int32)], expected)


INSTRUCTIONS = {
    "ballot": "vote.sync.ballot.b32",
    "any": "vote.sync.any.pred",
    "all": "vote.sync.all.pred",
    "match_any": "match.any.sync.b32",
    "idx": "shfl.sync.idx.b32",
    "up": "shfl.sync.up.b32",
    "down": "shfl.sync.down.b32",
    "xor": "shfl.sync.bfly.b32",
}


@pytest.mark.offline
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_a_row_is_one_instruction(name):
    """8 rows in 4 warps are two, under either semantics."""
    x = np.zeros((8, 32), np.int32)
    inside, outside = ALL[name]

    def body(x_ref, o_ref):
        o_ref[...] = inside(x_ref[...])

    for semantics in BOTH:
        kernel = under(semantics, everywhere.kernel(body, outside(x))(None))
        (report,) = plgpu.offline.compile(kernel, x)
        assert report.ptx.count(INSTRUCTIONS[name]) == 2 + (name == "idx")


def run(body):
    x = np.zeros((4, 32), np.int32)
    everywhere.kernel(body, x)(plgpu.InterpretParams())(x)


@refused_by(run)
def test_the_last_axis_is_the_lanes(x_ref, o_ref):
    plgpu.match_any(x_ref[...].reshape(2, 64))  # HERE


@refused_by(run)
def test_an_axis_that_no_reshape_makes_lanes(x_ref, o_ref):
    plgpu.match_any(x_ref[0, :31])  # HERE


@refused_by(run)
def test_votes_are_bools(x_ref, o_ref):
    plgpu.ballot(x_ref[...])  # HERE


@refused_by(run)
def test_a_lane_that_a_warp_does_not_have(x_ref, o_ref):
    plgpu.shfl(x_ref[...], 32)  # HERE


@refused_by(run)
def test_lanes_of_another_shape(x_ref, o_ref):
    plgpu.shfl(x_ref[...], jnp.arange(32))  # HERE


@refused_by(run)
def test_lanes_of_another_type(x_ref, o_ref):
    plgpu.shfl(x_ref[...], x_ref[...] * 0.5)  # HERE


@refused_by(run)
def test_elements_of_less_than_a_byte(x_ref, o_ref):
    plgpu.match_any(x_ref[...].astype(jnp.int4))  # HERE


GOOD = {
    "ballot": lambda e: {"x": e.array[:, :32] > 0},
    "vote": lambda e: {"x": e.array[:, :32] > 0},
    "elect": lambda e: {"x": e.array[:, :32] > 0},
    "match_any": lambda e: {"x": e.array[:, :32]},
    "shfl": lambda e: {"x": e.array[:, :32], "lane": 1},
}
EFFECTS = {"vote.kind": ["all"], "shfl.mode": ["up", "xor"]}
