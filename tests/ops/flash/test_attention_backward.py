# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives: masks, lengths, heads and schedules; what has none."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import ops
from pallas_gpu.ops.flash.attention import attention
from pallas_gpu.ops.flash.backward.config import AttentionBackwardConfig
from pallas_gpu.ops.flash.backward.derivatives import backward_problem
from pallas_gpu.ops.flash.backward.problem import schedule
from pallas_gpu.ops.flash.masks import Mask, Scores
from pallas_gpu.ops.flash.problem import Problem
from tests.support import emulated, host
from tests.support.attention import reference
from tests.support.norms import assert_close
from tests.support.semantics import Warpgroup

# Of the derivatives, relative to their norm; operands have 11 or 8 bits.
BOUNDS = {"float16": 1e-3, "bfloat16": 8e-3}
QUICK = plgpu.InterpretParams(detect_races=False)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one call; neither length is a multiple of a tile."""

    q_len: int = 130
    kv_len: int = 70
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 16
    v_dim: int = 0
    batch: int = 1


def operands(s: Shape, dtype=jnp.float16, seed=0):
    """Returns q, k, v and the cotangents of the result and of logsumexp."""
    rng = np.random.default_rng(seed)
    v_dim = s.v_dim or s.head_dim
    shapes = [
        (s.batch, s.q_len, s.heads, s.head_dim),
        (s.batch, s.kv_len, s.kv_heads, s.head_dim),
        (s.batch, s.kv_len, s.kv_heads, v_dim),
        (s.batch, s.q_len, s.heads, v_dim),
    ]
    arrays = [host.array(rng.standard_normal(x), dtype) for x in shapes]
    sums = rng.standard_normal((s.batch, s.heads, s.q_len))
    return [*arrays, jnp.asarray(sums, jnp.float32)]


def expected(args, *, with_sums=False, **options):
    """Returns the derivatives of q, k and v, and of a bias if there is one."""
    *arrays, do, dlse = args
    given = dict(zip(["q", "k", "v", "bias"], arrays, strict=False))
    return reference(**given, **options).derivatives(do, dlse if with_sums else 0)


def derivatives(interpret, *args, with_sums=False, **options):
    *arrays, do, dlse = args
    options |= {"interpret": interpret, "return_logsumexp": with_sums}

    def f(q, k, v, bias=None):
        return attention(q, k, v, bias=bias, **options)

    _, vjp = jax.vjp(f, *arrays)
    return vjp((do, dlse) if with_sums else do)


def check(s: Shape, *, dtype="float16", interpret=QUICK, **options):
    """Compares in the emulator alone."""
    args = operands(s, dtype)
    of_config = "backward_config", "deterministic"
    plain = {k: v for k, v in options.items() if k not in of_config}
    got = derivatives(interpret, *args, **options)
    assert all(x.dtype == jnp.dtype(dtype) for x in got)
    assert_close(got, expected(args, **plain), BOUNDS[dtype])


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_kernels_everywhere(deterministic):
    args = operands(Shape(64, 64))

    def make(interpret):
        return functools.partial(
            derivatives, interpret, causal=True, deterministic=deterministic
        )

    wanted = expected(args, causal=True)
    emulated.check(make, args, wanted, atol=8e-3, executed=[Warpgroup])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_derivatives_of_scores_are_rounded_once(head_dim, deterministic):
    # dS and each result to 8 bits: 0.0024. Another rounding would make it 0.0029.
    args = operands(Shape(256, 256, head_dim=head_dim), "bfloat16")
    got = derivatives(QUICK, *args, causal=True, deterministic=deterministic)
    for one, wanted in zip(got, expected(args, causal=True), strict=True):
        error = np.linalg.norm(np.asarray(one, np.float32) - wanted)
        assert error < 2.65e-3 * np.linalg.norm(wanted)


IDS = np.sort(np.random.default_rng(1).integers(0, 3, (2, 200)), axis=1).astype("i4")
SEGMENTS = {"q_segment_ids": IDS, "kv_segment_ids": IDS}
LENGTHS = {
    "q_lengths": np.array([130, 20, 0], np.int32),
    "kv_lengths": np.array([70, 150, 3], np.int32),
}
SLOPES = np.array([0.5, 0.03], np.float32)
CAUSAL = {"causal": True}
SIZES_OF_HEADS = (128, 0), (160, 0), (96, 0), (256, 0), (192, 128), (16, 256)
CASES = {
    "lengths that no tile divides": (Shape(), CAUSAL | {"with_sums": True}),
    "bfloat16": (Shape(), {"dtype": "bfloat16", "with_sums": True}),
    **{
        f"heads of {d} and {v_dim}": (Shape(70, 100, head_dim=d, v_dim=v_dim), CAUSAL)
        for d, v_dim in SIZES_OF_HEADS
    },
    "shared heads": (Shape(70, 70, heads=6, kv_heads=2), CAUSAL),
    # Behind row 70 of K and V nothing is seen: the derivatives are zero.
    "a mask from the first rows": (Shape(70, 200), CAUSAL),
    "one row": (Shape(1, 130), CAUSAL),
    "rows before": (Shape(200, 200), {"window": (20, 0)}),
    "rows on both sides": (Shape(200, 200), {"window": (5, 40)}),
    "soft cap": (Shape(head_dim=16), CAUSAL | {"soft_cap": 1.5}),
    "soft cap, wide heads": (Shape(head_dim=160), CAUSAL | {"soft_cap": 1.5}),
    "alibi": (Shape(heads=2, kv_heads=2), {"alibi_slopes": SLOPES}),
    "a scale": (Shape(), CAUSAL | {"sm_scale": 0.75}),
    "a small scale": (Shape(), CAUSAL | {"sm_scale": 1e-3}),
    **{
        f"{name}, deterministic {value}": (s, options | {"deterministic": value})
        for name, s, options in (
            ("segments", Shape(200, 200, batch=2), SEGMENTS | CAUSAL),
            ("lengths", Shape(130, 150, batch=3), LENGTHS | CAUSAL),
        )
        for value in (False, True)
    },
    **{
        f"{config}": (
            Shape(200, 200, heads=2, kv_heads=2, head_dim=32),
            CAUSAL | {"backward_config": AttentionBackwardConfig(**config)},
        )
        for config in (
            {"block_q": 64, "stages": 3},
            {"block_q": 128, "heads_together": 1},
        )
    },
}


@pytest.mark.parametrize(("s", "options"), CASES.values(), ids=CASES)
def test_sizes_and_options(s, options):
    check(s, **options)


def test_rows_that_see_nothing_have_no_derivative():
    args = operands(Shape(200, 64))
    options = {"window": (10, 0), "with_sums": True}
    got = derivatives(QUICK, *args, **options)
    assert_close(got, expected(args, **options), BOUNDS["float16"])
    assert (np.asarray(got[0])[:, 75:] == 0).all()


def test_scores_beyond_the_range_of_exponentials():
    q, k, v, do, dlse = operands(Shape(64, 64))
    args = q * 16, k * 16, v, do, dlse
    got = derivatives(QUICK, *args, causal=True)
    assert_close(got, expected(args, causal=True), 4e-3)


@pytest.mark.parametrize(
    ("s", "options", "config"),
    [
        # Behind row 130 of K and V nothing is seen.
        (Shape(130, 300, batch=2), CAUSAL, {"blocks": 2}),
        (Shape(128, 200, heads=2, kv_heads=2), {}, {"blocks": 1}),
        # One step of a tile of K and V is beyond those that it needs.
        (Shape(200, 200, 2, 2), CAUSAL, {"blocks": 3, "block_q": 128}),
        (Shape(200, 300), {"window": (40, 0)}, {"blocks": 1, "stages": 3}),
        (Shape(130, 256, head_dim=128), {"soft_cap": 1.5}, {"blocks": 1}),
        # Parts of the heads that share a head of K and V.
        (Shape(130, 150, heads=4), CAUSAL, {"kv_parts": 2, "blocks": 3}),
        # Six heads have a divisor of 4 parts in common: 2.
        (Shape(130, 150, 6), CAUSAL, {"kv_parts": 4, "blocks": 3, "block_q": 128}),
    ],
)
def test_persistent_blocks(s, options, config):
    given = {"backward_config": AttentionBackwardConfig(**config)}
    check(s, interpret=plgpu.InterpretParams(asynchrony="late"), **given, **options)


def test_parts_are_added_before_they_are_rounded():
    args = operands(Shape(70, 150, heads=4), "bfloat16")
    one, parts = (
        derivatives(QUICK, *args, backward_config=AttentionBackwardConfig(**config))
        for config in ({}, {"kv_parts": 4, "blocks": 3})
    )
    for a, b in zip(one[1:], parts[1:], strict=True):
        # Where the order of additions decides, the rounded sums differ.
        assert (np.asarray(a) == np.asarray(b)).mean() > 0.98


def test_a_block_for_each_tile_does_not_add_parts():
    config = AttentionBackwardConfig(blocks=7, kv_parts=2)
    for changes, parts in ({}, 2), ({"blocks": None}, 1), ({"deterministic": True}, 1):
        p = problem(2048, kv_heads=2, config=dataclasses.replace(config, **changes))
        assert (p.parts, p.kv_heads) == (parts, 2 * parts)


@pytest.mark.parametrize(
    ("s", "options"),
    [
        # A tile of K and V would have less than two steps.
        (Shape(64, 130), {}),
        # dK and dV have no buffers of one size.
        (Shape(128, 200, head_dim=32, v_dim=64), {}),
        (Shape(128, 100, head_dim=144), {}),
        (Shape(128, 200), {"deterministic": True}),
    ],
)
def test_a_block_for_each_tile_where_persistent_ones_are_not_possible(s, options):
    args = operands(s)
    got, wanted = (
        derivatives(QUICK, *args, backward_config=config, **options)
        for config in (AttentionBackwardConfig(blocks=1), AttentionBackwardConfig())
    )
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def problem(length, *, config=None, **changes):
    """Returns the derivatives' problem of causal attention, 2 x 4 heads."""
    found = (changes.pop(x, 4) for x in ("heads", "kv_heads"))
    sizes = 2, length, length, *found, *[changes.pop("head_dim", 64)] * 2
    options = {"mask": Mask(right=0), "scores": Scores(1.0), "config": None} | changes
    options |= {"dtype": np.dtype("f2"), "backward": config}
    return backward_problem(Problem(*sizes, **options))


def test_persistent_blocks_have_each_tile_once_and_equal_work():
    p = problem(2048, config=AttentionBackwardConfig(blocks=7))
    table = schedule(p)
    tiles = [row[1 : row[0] + 1] for row in table]
    assert len(tiles) == p.blocks == 7
    assert sorted(np.concatenate(tiles)) == list(range(p.tiles))
    # The producer reads the number of a tile behind the last one, and of the next.
    assert (table[:, -2:] == 0).all()
    costs = [sum(32 - 2 * (i % p.kv_tiles) + 1 for i in own) for own in tiles]
    assert max(costs) - min(costs) <= 33


@pytest.mark.parametrize(
    ("length", "changes", "blocks"),
    [
        (8192, {}, 132),
        # 512 equal tiles: four for each.
        (8192, {"mask": Mask()}, 128),
        (8192, {"mask": Mask(left=64, right=0)}, 132),
        (8320, {}, None),
        (8192, {"mask": Mask(segments=True)}, None),
        (8192, {"scores": Scores(1.0, soft_cap=2.0)}, None),
        (8192, {"deterministic": True}, None),
        # There are 128 tiles, and an SM for each.
        (2048, {}, None),
    ],
)
def test_where_the_default_has_persistent_blocks(length, changes, blocks):
    p = problem(length, **changes)
    assert p.persistent == (blocks is not None)
    assert p.blocks == (blocks or p.tiles)


@pytest.mark.parametrize(
    ("length", "changes", "parts", "stages"),
    [
        (4096, {"heads": 32}, 4, 2),
        (2048, {"heads": 32}, 1, 2),
        (4096, {"heads": 32, "mask": Mask()}, 1, 2),
        # Not persistent: there is room for another stage.
        (16384, {"heads": 32}, 1, 3),
        (16384, {"heads": 32, "mask": Mask(right=0, segments=True)}, 1, 2),
    ],
)
def test_where_the_default_has_parts_or_stages(length, changes, parts, stages):
    p = problem(length, kv_heads=4, head_dim=128, **changes)
    assert (p.parts, p.config.stages) == (parts, stages)


def test_the_default_configuration():
    """Narrow heads leave registers for larger tiles, and SMEM for more stages."""
    default = AttentionBackwardConfig.default
    assert default(64).block_q > default(128).block_q
    assert default(64, deterministic=True).stages > default(128).stages
    config = default(16, deterministic=True)
    args = operands(Shape(64, 64))
    got = derivatives(QUICK, *args, backward_config=config)
    wanted = derivatives(QUICK, *args, deterministic=True)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_vmap_jit_and_a_second_call():
    args = operands(Shape(70, 70, batch=4))
    stacked = [x.reshape(2, 2, *x.shape[1:]) for x in args]
    f = jax.jit(jax.vmap(functools.partial(derivatives, QUICK)))
    wanted = expected(args)
    for _ in range(2):
        got = [x.reshape(-1, *x.shape[2:]) for x in f(*stacked)]
        assert_close(got, wanted, BOUNDS["float16"])


def test_grad_of_the_public_function():
    q, k, v, _, dlse = operands(Shape(64, 64))

    def loss(q):
        return jnp.sum(ops.attention(q, k, v, interpret=QUICK).astype(jnp.float32) ** 2)

    wanted, *_ = expected((q, k, v, 2 * reference(q, k, v).out, dlse))
    assert_close([jax.grad(loss)(q)], [wanted], 2e-3)
