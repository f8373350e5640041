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


@pytest.mark.parametrize(
    ("c", "dtype", "causal"),
    [
        (SMALL, "float16", True),
        (SMALL, "bfloat16", False),
        (ON_BLACKWELL, "float16", False),
        (ON_BLACKWELL, "bfloat16", True),
    ],
)
def test_types_and_masks(c, dtype, causal):
    check(Shape(kv_len=100), c, dtype=dtype, causal=causal, executed=BOTH)


def test_a_head_of_a_narrow_swizzle():
    check(Shape(kv_len=128, head_dim=80))


@each_target
def test_heads_of_k_and_v_serve_several_heads_of_q(c):
    check(Shape(100, 70, heads=6, kv_heads=2, batch=2), c, causal=True)


@pytest.mark.parametrize(
    "c", [config(block_kv=48), config(block_kv=208), blackwell(16), blackwell(112)]
)
def test_masks_meet_blocks_of_any_size(c):
    check(Shape(kv_len=256), c, causal=True)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "causal", "c"),
    [
        *((200, 130, False, c) for c in (SMALL, ON_BLACKWELL)),
        *((1, 130, False, c) for c in (SMALL, ON_BLACKWELL)),
        *((300, 1, True, c) for c in (SMALL, ON_BLACKWELL)),
        (100, 200, True, SMALL),
    ],
)
def test_lengths_that_the_tiles_do_not_divide(q_len, kv_len, causal, c):
    check(Shape(q_len, kv_len), c, causal=causal)


@pytest.mark.parametrize(
    "c",
    [config(stages=1), config(stages=3), blackwell(stages=1), blackwell(stages=5)],
)
def test_any_number_of_stages(c):
    check(Shape(128), c, causal=True)


@pytest.mark.parametrize(
    ("consumers", "rows", "ping_pong"),
    [(2, 64, False), (2, 128, True), (3, 64, True)],
)
def test_consumers_with_turns_and_without(consumers, rows, ping_pong):
    c = config(consumers=consumers, rows=rows, ping_pong=ping_pong, block_kv=32)
    check(Shape(q_len=200, kv_len=96, head_dim=16), c, causal=True)


@pytest.mark.parametrize(("blocks", "causal"), [(1, True), (3, False)])
def test_persistent_blocks_compute_several_tiles(blocks, causal):
    c = config(blocks=blocks)
    check(Shape(300, 200, heads=3, head_dim=16), c, causal=causal)


@pytest.mark.parametrize("workers", [1, 3, 7])
def test_each_tile_has_one_worker_and_they_have_equal_work(workers):
    c = config(blocks=workers, block_kv=64)
    p = Problem(
        *(2, 1024, 1024, 4, 4, 64, 64),
        dtype=jnp.dtype(jnp.float16),
        mask=Mask(right=0),
        scores=Scores(1.0),
        config=c,
    )
    table = schedule(p)
    assert table.shape[0] == workers
    tiles = [row[1 : row[0] + 1] for row in table]
    assert sorted(np.concatenate(tiles)) == list(range(p.tiles))
    blocks = [sum(2 * (p.place(int(i))[2] + 1) for i in own) for own in tiles]
    assert max(blocks) - min(blocks) < 16


@pytest.mark.parametrize("heads_together", [1, 4])
@pytest.mark.parametrize("c", [config(blocks=2), blackwell(64)])
def test_the_order_of_tiles_covers_them_all(c, heads_together):
    c = dataclasses.replace(c, heads_together=heads_together)
    check(Shape(130, 64, heads=3, kv_heads=3), c)


@pytest.mark.parametrize(
    ("head_dim", "on_blackwell"),
    [(64, False), (128, False), (256, False), (64, True), (128, True)],
)
def test_the_default_configurations(head_dim, on_blackwell):
    s = Shape(130, 160, head_dim=head_dim)
    check(s, None, causal=True, on_blackwell=on_blackwell)


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
    p = Problem(
        *(2, 130, kv_len, 4, 4, head_dim, head_dim),
        dtype=jnp.dtype(jnp.float16),
        mask=mask,
        scores=Scores(1.0),
        config=SMALL,
    )
    assert heuristic.configured(p).ping_pong == alternate


@pytest.mark.parametrize(
    ("c", "sm_scale"), [(SMALL, 0.75), (SMALL, 1e-30), (ON_BLACKWELL, 1e-30)]
)
def test_the_scale_of_the_scores(c, sm_scale):
    """What a mask hides stays hidden, however small the others become."""
    check(Shape(128, 128), c, causal=True, sm_scale=sm_scale)


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
    p = Problem(
        *(2, 192 * 5 + 64, 1024, 4, 4, 64, 64),
        dtype=jnp.dtype(jnp.float16),
        mask=Mask(),
        scores=Scores(1.0),
        config=config(consumers=3, blocks=7),
    )
    assert p.idles and p.uneven and p.cost(5) == p.cost(0) / 2
    table = schedule(p)
    tiles = [row[1 : row[0] + 1] for row in table]
    assert sorted(np.concatenate(tiles)) == list(range(p.tiles))
    costs = [sum(p.cost(p.place(int(i))[2]) for i in own) for own in tiles]
    assert max(costs) - min(costs) <= p.cost(0)


@each_target
def test_vmap_and_jit(c):
    args = operands(Shape(128, 64, batch=4))
    stacked = [x.reshape(2, 2, *x.shape[1:]) for x in args]
    f = jax.jit(jax.vmap(functools.partial(attention, config=c)))
    got = np.asarray(f(*stacked), np.float64).reshape(args[0].shape)
    np.testing.assert_allclose(got, reference(*args).out, atol=ROUNDING["float16"])
