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
from pallas_gpu import errors
from pallas_gpu.ops.flash.attention import attention
from pallas_gpu.ops.flash.config import AttentionConfig
from pallas_gpu.ops.flash.forward import heuristic
from pallas_gpu.ops.flash.masks import Mask, Scores
from pallas_gpu.ops.flash.problem import Problem, schedule
from tests.support import everywhere, host
from tests.support.refusal import refused
from tests.support.semantics import BOTH, Warpgroup

pytestmark = pytest.mark.sampled(2)

SMALL = AttentionConfig(block_kv=64)
# Results are averages of normal numbers; probabilities and results have 11 or 8 bits.
ROUNDING = {"float16": 2**-9, "bfloat16": 2**-6}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one call; by default a head with two tiles of Q and several of K."""

    q_len: int = 256
    kv_len: int = 256
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    batch: int = 1


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def config(**changes):
    return dataclasses.replace(SMALL, **changes)


def operands(s: Shape, dtype=jnp.float16, seed=0):
    rng = np.random.default_rng(seed)
    q = s.batch, s.q_len, s.heads, s.head_dim
    kv = s.batch, s.kv_len, s.kv_heads, s.head_dim
    return [host.array(rng.standard_normal(x), dtype) for x in (q, kv, kv)]


def reference(q, k, v, causal=False, sm_scale=None):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k)
    scores *= sm_scale or 1 / np.sqrt(q.shape[3])
    if causal:
        scores = np.where(np.tri(*scores.shape[2:], dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(axis=3, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", p / p.sum(axis=3, keepdims=True), v)


def check(
    s: Shape,
    c=SMALL,
    *,
    dtype="float16",
    args=None,
    atol=None,
    executed=(Warpgroup,),
    **options,
):
    args = operands(s, dtype) if args is None else args

    def make(interpret):
        return functools.partial(attention, config=c, interpret=interpret, **options)

    expected = reference(*args, **options)
    atol = atol or ROUNDING[dtype]
    everywhere.check(make, args, expected, atol=atol, executed=executed)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types_and_masks(dtype, causal):
    check(Shape(), dtype=dtype, causal=causal, executed=BOTH)


def test_a_head_of_a_narrow_swizzle():
    check(Shape(kv_len=128, head_dim=80))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_heads_of_k_and_v_serve_several_heads_of_q(heads, kv_heads):
    check(Shape(128, 128, heads, kv_heads, batch=2), causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("block_kv", [48, 208])
def test_masks_meet_blocks_of_any_size(block_kv):
    s = Shape(q_len=256, kv_len=256, head_dim=16)
    check(s, config(block_kv=block_kv), causal=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q_len", "kv_len", "causal"),
    [
        (200, 256, False),
        (256, 200, True),
        (1, 130, False),
        (300, 1, True),
    ],
)
def test_lengths_that_the_tiles_do_not_divide(q_len, kv_len, causal):
    check(Shape(q_len, kv_len, heads=2, batch=2, head_dim=16), causal=causal)


@pytest.mark.parametrize(("q_len", "kv_len"), [(128, 256), (256, 128)])
def test_a_causal_mask_begins_at_the_first_rows(q_len, kv_len):
    check(Shape(q_len, kv_len), causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 3])
def test_any_number_of_stages(stages):
    check(Shape(head_dim=16), config(stages=stages), causal=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("consumers", "rows", "ping_pong"),
    [(2, 64, False), slow(2, 128, True), (3, 64, True)],
)
def test_consumers_with_turns_and_without(consumers, rows, ping_pong):
    c = config(consumers=consumers, rows=rows, ping_pong=ping_pong, block_kv=32)
    check(Shape(q_len=200, kv_len=96, head_dim=16), c, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "causal"), [(1, True), (3, False), (132, True)])
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


@pytest.mark.slow
@pytest.mark.parametrize("heads_together", [1, 4])
def test_the_order_of_tiles_covers_them_all(heads_together):
    c = config(heads_together=heads_together, blocks=2)
    check(Shape(128, 64, heads=3, kv_heads=3, head_dim=16, batch=2), c)


@pytest.mark.parametrize("head_dim", [slow(64), 128, slow(256)])
def test_the_default_configurations(head_dim):
    check(Shape(130, 160, head_dim=head_dim), None, causal=True)


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


@pytest.mark.parametrize("sm_scale", [0.75, 1e-30])
def test_the_scale_of_the_scores(sm_scale):
    """What a mask hides stays hidden, however small the others become."""
    check(Shape(128, 128, head_dim=16), causal=True, sm_scale=sm_scale)


def test_scores_beyond_the_range_of_exponentials():
    # Of a thousand and more: a row of the result is a row of V.
    q, k, v = operands(Shape())
    check(Shape(), args=[q * 64, k * 16, v], causal=True, atol=2**-7)


def growing(s):
    """Operands whose scores grow from step to step: each row's maximum does."""
    q, k, v = operands(s)
    growth = jnp.linspace(4, 1, s.kv_len, dtype=jnp.float16)[None, :, None, None]
    return [jnp.abs(q), jnp.abs(k) * growth, v]


@pytest.mark.parametrize("keep_maxima", [False, True])
def test_maxima_that_grow_from_step_to_step(keep_maxima):
    c = config(keep_maxima=keep_maxima)
    check(Shape(), c, args=growing(Shape(q_len=128)))


def test_nan_in_a_row_leaves_the_others_alone():
    q, k, v = growing(Shape(q_len=128, kv_len=128))
    args, c = [q.at[0, 3].set(jnp.nan), k, v], config(block_kv=32, keep_maxima=True)
    got = np.asarray(attention(*args, config=c), np.float64)
    np.testing.assert_allclose(got, reference(*args), atol=ROUNDING["float16"])
    assert np.isnan(got).any(axis=(0, 2, 3)).tolist() == [i == 3 for i in range(128)]


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (40, 0)}, {"ids": True}]
)
def test_consumers_without_rows_take_part_in_steps(options):
    s = Shape(q_len=200, kv_len=200, heads=3, kv_heads=3, head_dim=16)
    args, c = operands(s), config(consumers=3, block_kv=32, blocks=2)
    at = np.arange(200)
    sees = np.ones((200, 200), bool)
    if "causal" in options:
        sees = at <= at[:, None]
    if "window" in options:
        sees = (at <= at[:, None]) & (at >= at[:, None] - 40)
    if options.pop("ids", False):
        ids = np.minimum(at // 50, 2).astype(np.int32)[None]
        sees = ids[0] == ids[0][:, None]
        options = {"q_segment_ids": ids, "kv_segment_ids": ids}
    got = attention(*args, config=c, **options)
    scores = np.einsum("bqhd,bkhd->bhqk", *(np.asarray(x, float) for x in args[:2]))
    p = np.where(sees, np.exp(scores / 4), 0)
    expected = np.einsum("bhqk,bkhd->bqhd", p / p.sum(3, keepdims=True), args[2])
    np.testing.assert_allclose(np.asarray(got, float), expected, atol=2**-8)


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


def test_vmap_and_jit():
    args = operands(Shape(128, 128, batch=6))
    stacked = [x.reshape(2, 3, *x.shape[1:]) for x in args]
    f = jax.jit(jax.vmap(functools.partial(attention, config=SMALL)))
    got = np.asarray(f(*stacked), np.float64).reshape(args[0].shape)
    np.testing.assert_allclose(got, reference(*args), atol=ROUNDING["float16"])


def emulated(args, c, causal, **options):
    interpret = plgpu.InterpretParams(**options)
    return np.asarray(attention(*args, causal=causal, config=c, interpret=interpret))


@pytest.mark.parametrize(("blocks", "causal"), [(None, False), (1, True)])
def test_ten_orders_of_events_give_one_result(blocks, causal):
    c = config(block_kv=32, blocks=blocks)
    args = operands(Shape(q_len=192, kv_len=96, head_dim=16))
    # A result that depends on the schedule is an error.
    got = emulated(args, c, causal, schedules=10)
    expected = reference(*args, causal=causal)
    np.testing.assert_allclose(got.astype(np.float64), expected, atol=2**-9)


@pytest.mark.slow
@pytest.mark.parametrize("asynchrony", ["eager", "late"])
@pytest.mark.parametrize("changes", [{}, {"blocks": 2}, {"consumers": 3, "stages": 1}])
def test_there_is_no_race(changes, asynchrony):
    args = operands(Shape(q_len=320, kv_len=256, heads=2, head_dim=16))
    options = {"asynchrony": asynchrony, "detect_races": True, "seed": 5}
    got = emulated(args, config(**changes), True, **options)
    expected = reference(*args, causal=True)
    np.testing.assert_allclose(got.astype(np.float64), expected, atol=2**-9)


# --- what the compiler makes of it ----------------------------------------------------


@pytest.mark.offline
@pytest.mark.parametrize(
    ("head_dim", "causal", "c"),
    [
        (64, True, None),
        slow(64, False, None),
        slow(128, False, None),
        (128, True, AttentionConfig(block_kv=144)),
        (128, False, AttentionConfig(blocks=132, keep_maxima=True)),
        slow(256, True, None),
    ],
)
def test_products_stay_asynchronous_and_nothing_spills(head_dim, causal, c):
    s = Shape(4096, 4096, 16, 16, head_dim, batch=4)
    shapes = [(s.batch, s.q_len, s.heads, head_dim)] * 3
    args = [jax.ShapeDtypeStruct(x, jnp.float16) for x in shapes]
    f = functools.partial(attention, causal=causal, config=c)
    (report,) = plgpu.offline.compile(f, *args)
    # ptxas remarks where it has to wait for a product by itself.
    assert report.resources.remarks == ()
    assert report.resources.spill_store_bytes == 0
    assert report.resources.spill_load_bytes == 0


# --- refusals -------------------------------------------------------------------------


def assert_refusal(caught, what, **rows):
    """Checks a message; its line is the traceback's: no kernel is traced yet."""
    assert caught.value.what == what
    assert caught.value.expected and caught.value.hint
    for row, part in rows.items():
        assert part in str(getattr(caught.value, row)), str(caught.value)


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({"head_dim": 128}, 1),
        ({"batch": 2}, 2),
        ({"kv_len": 128}, 2),
        ({"kv_heads": 2}, 1),
        ({"kv_heads": 0}, 1),
    ],
)
@refused
def test_the_shapes_fit_each_other(changes, number):
    args = operands(Shape(heads=3))
    other = operands(dataclasses.replace(Shape(heads=3), **changes))
    mixed = other if "kv_heads" in changes else [*args]
    mixed[number] = other[number]
    attention(*mixed)


def test_operands_have_four_dimensions():
    q, k, v = operands(Shape())
    with pytest.raises(errors.ShapeError) as caught:
        attention(q[0], k[0], v[0])
    assert_refusal(caught, "attention: the shapes do not match", got="(256,")


@refused
def test_the_size_of_a_head_fits_the_registers():
    attention(*operands(Shape(head_dim=272)))


@refused
def test_the_types_are_floats_of_16_or_8_bits():
    attention(*operands(Shape(), jnp.float32))


@refused
def test_operands_have_one_type():
    q, k, v = operands(Shape())
    attention(q, k, v.astype(jnp.bfloat16))


@pytest.mark.parametrize("sm_scale", [0.0, -1.0, float("nan"), float("inf")])
@refused
def test_the_scale_is_positive(sm_scale):
    attention(*operands(Shape()), sm_scale=sm_scale)


@refused
def test_the_tiles_fit_in_registers():
    attention(*operands(Shape()), config=config(consumers=3, block_kv=144))


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 96},
        {"rows": 0},
        {"block_kv": 72},
        {"block_kv": 272},
        {"consumers": 1},
        {"stages": 0},
        {"heads_together": 0},
        {"blocks": 0},
    ],
)
@refused
def test_a_configuration_fits_the_tensor_core(changes):
    config(**changes)


def test_the_buffers_fit_shared_memory():
    with pytest.raises(errors.OutOfResources, match="needs more SMEM") as caught:
        attention(*operands(Shape(head_dim=128)), config=config(stages=8))
    assert caught.value.limit_bytes < caught.value.used_bytes
