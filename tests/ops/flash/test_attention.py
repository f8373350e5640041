# SPDX-License-Identifier: Apache-2.0
"""Attention: masks, lengths, heads and configurations, against float64; refusals."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.ops.flash.attention import attention
from pallas_gpu.ops.flash.config import AttentionConfig, BlackwellAttentionConfig
from pallas_gpu.ops.flash.forward import heuristic
from pallas_gpu.ops.flash.masks import Mask, Scores
from pallas_gpu.ops.flash.problem import Problem, schedule
from tests.support import emulated, host
from tests.support.attention import reference
from tests.support.semantics import BOTH, Warpgroup

SMALL = AttentionConfig(block_kv=64)
ON_BLACKWELL = BlackwellAttentionConfig(block_kv=32)
BLACKWELL = plgpu.CompilerParams(target="sm_100a", approx_math=True)
# Results are averages of normal numbers; probabilities and results have 11 or 8 bits.
ROUNDING = {"float16": 2**-9, "bfloat16": 2**-6}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one call; by default a head with two tiles of Q and several of K."""

    q_len: int = 200
    kv_len: int = 160
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    batch: int = 1


def config(**changes):
    return dataclasses.replace(SMALL, **changes)


def blackwell(block_kv=32, **changes):
    return BlackwellAttentionConfig(block_kv=block_kv, **changes)


each_target = pytest.mark.parametrize("c", [SMALL, ON_BLACKWELL])


def operands(s: Shape, dtype=jnp.float16, seed=0):
    rng = np.random.default_rng(seed)
    q = s.batch, s.q_len, s.heads, s.head_dim
    kv = s.batch, s.kv_len, s.kv_heads, s.head_dim
    return [host.array(rng.standard_normal(x), dtype) for x in (q, kv, kv)]


def check(
    s: Shape,
    c=SMALL,
    *,
    dtype="float16",
    args=None,
    atol=None,
    executed=(Warpgroup,),
    on_blackwell=False,
    **options,
):
    """Compares on Blackwell with its configurations, or if they are its defaults."""
    on_blackwell |= isinstance(c, BlackwellAttentionConfig)
    args = operands(s, dtype) if args is None else args
    params = {"compiler_params": BLACKWELL} if on_blackwell else {}

    def make(interpret):
        given = {"config": c, "interpret": interpret, **params, **options}
        return functools.partial(attention, **given)

    expected = reference(*args, **options).out
    atol = atol or ROUNDING[dtype]
    on_gpu = not on_blackwell
    emulated.check(make, args, expected, executed, atol=atol, on_gpu=on_gpu)


def cases(name, s, *configs, **options):
    """Calls with each configuration: sizes and options of `check`."""
    return [
        pytest.param(s, c, options, id=f"{name}, {i}") for i, c in enumerate(configs)
    ]


TARGETS = SMALL, ON_BLACKWELL
BLOCKS = config(block_kv=48), config(block_kv=208), blackwell(16), blackwell(112)
STAGES = config(stages=1), config(stages=3), blackwell(stages=1), blackwell(stages=5)
# Without turns, and with them.
CONSUMERS = (
    config(consumers=2, rows=64, ping_pong=False, block_kv=32),
    config(consumers=2, rows=128, ping_pong=True, block_kv=32),
    config(consumers=3, rows=64, ping_pong=True, block_kv=32),
)
ORDERS = [
    dataclasses.replace(c, heads_together=heads)
    for c in (config(blocks=2), blackwell(64))
    for heads in (1, 4)
]
CASES = [
    *cases("float16, mask", Shape(kv_len=100), SMALL, causal=True, executed=BOTH),
    *cases("float16", Shape(kv_len=100), ON_BLACKWELL, executed=BOTH),
    *cases("bfloat16", Shape(kv_len=100), SMALL, dtype="bfloat16", executed=BOTH),
    *cases(
        *("bfloat16, mask", Shape(kv_len=100), ON_BLACKWELL),
        **{"dtype": "bfloat16", "causal": True, "executed": BOTH},
    ),
    *cases("narrow swizzle", Shape(kv_len=128, head_dim=80), SMALL),
    *cases("shared heads", Shape(100, 70, 6, 2, batch=2), *TARGETS, causal=True),
    *cases("blocks of any size", Shape(kv_len=256), *BLOCKS, causal=True),
    *cases("rows that no tile divides", Shape(200, 130), *TARGETS),
    *cases("one row", Shape(1, 130), *TARGETS),
    *cases("one column", Shape(300, 1), *TARGETS, causal=True),
    *cases("fewer rows than columns", Shape(100, 200), SMALL, causal=True),
    *cases("stages", Shape(128), *STAGES, causal=True),
    *cases("consumers", Shape(200, 96, head_dim=16), *CONSUMERS, causal=True),
    *cases("one block", Shape(300, 200, 3, head_dim=16), config(blocks=1), causal=True),
    *cases("persistent blocks", Shape(300, 200, 3, head_dim=16), config(blocks=3)),
    *cases("order of tiles", Shape(130, 64, heads=3, kv_heads=3), *ORDERS),
    *cases("a scale", Shape(128, 128), SMALL, causal=True, sm_scale=0.75),
    # What a mask hides stays hidden, however small the others become.
    *cases("a small scale", Shape(128, 128), *TARGETS, causal=True, sm_scale=1e-30),
    *(
        case
        for d in (64, 128, 256)
        for case in cases(
            f"default, {d}", Shape(130, 160, head_dim=d), None, causal=True
        )
    ),
    *(
        case
        for d in (64, 128)
        for case in cases(
            *(f"default on Blackwell, {d}", Shape(130, 160, head_dim=d), None),
            **{"causal": True, "on_blackwell": True},
        )
    ),
]


@pytest.mark.parametrize(("s", "c", "options"), CASES)
def test_sizes_configurations_and_options(s, c, options):
    check(s, c, **options)


def problem(length, kv_len, head_dim, mask, config):
    sizes = 2, length, kv_len, 4, 4, head_dim, head_dim
    others = {"mask": mask, "scores": Scores(1.0), "config": config}
    return Problem(*sizes, dtype=jnp.dtype(jnp.float16), **others)


def tiles_of_workers(p):
    """Those of each one; each tile has one."""
    tiles = [row[1 : row[0] + 1] for row in schedule(p)]
    assert sorted(np.concatenate(tiles)) == list(range(p.tiles))
    return tiles


@pytest.mark.parametrize("workers", [1, 3, 7])
def test_each_tile_has_one_worker_and_they_have_equal_work(workers):
    p = problem(1024, 1024, 64, Mask(right=0), config(blocks=workers))
    tiles = tiles_of_workers(p)
    assert len(tiles) == workers
    blocks = [sum(2 * (p.place(int(i))[2] + 1) for i in own) for own in tiles]
    assert max(blocks) - min(blocks) < 16


@pytest.mark.parametrize(
    ("kv_len", "head_dim", "mask", "alternate"),
    [
        (1024, 128, Mask(), True),
        (1040, 128, Mask(), False),
        (1040, 128, Mask(right=0), True),
        (1040, 128, Mask(left=100), True),
        (1040, 128, Mask(ragged=True), True),
        (1040, 64, Mask(), True),
        (1040, 256, Mask(), True),
    ],
)
def test_whose_consumers_alternate(kv_len, head_dim, mask, alternate):
    p = problem(130, kv_len, head_dim, mask, SMALL)
    assert heuristic.configured(p).ping_pong == alternate


@each_target
def test_scores_beyond_the_range_of_exponentials(c):
    # Of a thousand and more: a row of the result is a row of V.
    q, k, v = operands(Shape())
    check(Shape(), c, args=[q * 64, k * 16, v], causal=True, atol=2**-7)


def growing(s):
    """Operands whose scores grow from step to step: each row's maximum does."""
    q, k, v = operands(s)
    growth = jnp.linspace(4, 1, s.kv_len, dtype=jnp.float16)[None, :, None, None]
    return [jnp.abs(q), jnp.abs(k) * growth, v]


@pytest.mark.parametrize("c", [SMALL, config(keep_maxima=True), ON_BLACKWELL])
def test_maxima_that_grow_from_step_to_step(c):
    check(Shape(), c, args=growing(Shape(q_len=128)))


def test_nan_in_a_row_leaves_the_others_alone():
    q, k, v = growing(Shape(q_len=128, kv_len=128))
    args, c = [q.at[0, 3].set(jnp.nan), k, v], config(block_kv=32, keep_maxima=True)
    got = np.asarray(attention(*args, config=c), np.float64)
    np.testing.assert_allclose(got, reference(*args).out, atol=ROUNDING["float16"])
    assert np.isnan(got).any(axis=(0, 2, 3)).tolist() == [i == 3 for i in range(128)]


AT = np.minimum(np.arange(200) // 50, 2).astype(np.int32)[None]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (40, 0)},
        {"q_segment_ids": AT, "kv_segment_ids": AT},
    ],
)
def test_consumers_without_rows_take_part_in_steps(options):
    args = operands(Shape(kv_len=200, heads=3, kv_heads=3, head_dim=16))
    c = config(consumers=3, block_kv=32, blocks=2)
    got = attention(*args, config=c, **options)
    wanted = reference(*args, **options).out
    np.testing.assert_allclose(np.asarray(got, float), wanted, atol=2**-8)


def test_tiles_with_few_rows_count_less_in_the_schedule():
    c = config(consumers=3, blocks=7)
    p = problem(192 * 5 + 64, 1024, 64, Mask(), c)
    assert p.idles and p.uneven and p.cost(5) == p.cost(0) / 2
    tiles = tiles_of_workers(p)
    costs = [sum(p.cost(p.place(int(i))[2]) for i in own) for own in tiles]
    assert max(costs) - min(costs) <= p.cost(0)


@each_target
def test_vmap_and_jit(c):
    args = operands(Shape(128, 64, batch=4))
    stacked = [x.reshape(2, 2, *x.shape[1:]) for x in args]
    f = jax.jit(jax.vmap(functools.partial(attention, config=c)))
    got = np.asarray(f(*stacked), np.float64).reshape(args[0].shape)
    np.testing.assert_allclose(got, reference(*args).out, atol=ROUNDING["float16"])
