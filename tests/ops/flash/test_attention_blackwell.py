# SPDX-License-Identifier: Apache-2.0
"""Attention on Blackwell: masks, lengths, heads, sizes, against float64; refusals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors, types
from pallas_gpu.ops.flash import blackwell
from pallas_gpu.ops.flash.attention import attention
from pallas_gpu.ops.flash.config import AttentionConfig, BlackwellAttentionConfig
from tests.ops.flash.test_attention import ROUNDING, Shape, operands, reference
from tests.support import everywhere
from tests.support.refusal import refused
from tests.support.semantics import BOTH, Warpgroup, under

BLACKWELL = plgpu.CompilerParams(target="sm_100a", approx_math=True)
SMALL = BlackwellAttentionConfig(block_kv=32)
# What the emulator says of a missing wait, commit or arrival.
REPORTED = (
    errors.RaceError,
    errors.DeadlockError,
    errors.BarrierError,
    errors.UninitializedReadError,
)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


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
        return functools.partial(
            attention,
            config=c,
            interpret=interpret,
            compiler_params=BLACKWELL,
            **options,
        )

    everywhere.check(
        make,
        args,
        reference(*args, **options),
        atol=atol or ROUNDING[dtype],
        executed=executed,
        on_gpu=False,
    )


@pytest.mark.parametrize("causal", [False, slow(True)])
@pytest.mark.parametrize("dtype", ["float16", slow("bfloat16")])
def test_types_and_masks(dtype, causal):
    check(Shape(256, 96), dtype=dtype, causal=causal, executed=BOTH)


@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), slow(128, False)])
def test_the_default_configurations(head_dim, causal):
    check(Shape(130, 200, head_dim=head_dim), None, causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_heads_of_k_and_v_serve_several_heads_of_q(heads, kv_heads):
    check(Shape(128, 64, heads, kv_heads, batch=2), causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(200, 96), (300, 70), (1, 130), (300, 1), (128, 256)]
)
def test_lengths_that_the_tiles_do_not_divide(q_len, kv_len, causal):
    check(Shape(q_len, kv_len, heads=2), causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_any_number_of_stages(stages):
    c = BlackwellAttentionConfig(block_kv=32, stages=stages)
    check(Shape(kv_len=160), c, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("block_kv", [16, 48, 112])
def test_masks_meet_blocks_of_any_size(block_kv):
    check(Shape(), BlackwellAttentionConfig(block_kv=block_kv), causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("heads_together", [1, 4])
def test_the_order_of_tiles_covers_them_all(heads_together):
    c = BlackwellAttentionConfig(block_kv=64, heads_together=heads_together)
    check(Shape(300, 64, heads=3, kv_heads=3, batch=2), c)


@pytest.mark.parametrize("sm_scale", [0.75, slow(1e-30)])
def test_the_scale_of_the_scores(sm_scale):
    """What a mask hides stays hidden, however small the others become."""
    check(Shape(128, 128), causal=True, sm_scale=sm_scale)


@pytest.mark.slow
def test_scores_beyond_the_range_of_exponentials():
    # Of a thousand and more: a row of the result is a row of V.
    q, k, v = operands(Shape())
    check(Shape(), args=[q * 64, k * 16, v], causal=True, atol=2**-7)


def test_maxima_that_grow_from_step_to_step():
    q, k, v = operands(Shape(q_len=128))
    growth = jnp.linspace(4, 1, 256, dtype=jnp.float16)[None, :, None, None]
    check(Shape(), args=[jnp.abs(q), jnp.abs(k) * growth, v])


def test_vmap_and_jit():
    args = operands(Shape(128, 64, batch=4))
    stacked = [x.reshape(2, 2, *x.shape[1:]) for x in args]
    f = functools.partial(attention, config=SMALL)
    got = np.asarray(jax.jit(jax.vmap(f))(*stacked), np.float64)
    expected = reference(*args)
    np.testing.assert_allclose(
        got.reshape(args[0].shape), expected, atol=ROUNDING["float16"]
    )


def emulated(args, c=SMALL, causal=True, **options):
    interpret = plgpu.InterpretParams(**options)
    return np.asarray(attention(*args, causal=causal, config=c, interpret=interpret))


@pytest.mark.parametrize("causal", [False, True])
def test_twelve_orders_of_events_give_one_result(causal):
    args = operands(Shape(q_len=256, kv_len=160))
    # A result that depends on the schedule is an error.
    got = emulated(args, causal=causal, schedules=12)
    expected = reference(*args, causal=causal)
    np.testing.assert_allclose(got.astype(np.float64), expected, atol=2**-9)


@pytest.mark.parametrize("asynchrony", ["eager", "late"])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_there_is_no_race(head_dim, stages, asynchrony):
    args = operands(Shape(q_len=300, kv_len=256, heads=2, head_dim=head_dim))
    c = BlackwellAttentionConfig(block_kv=64, stages=stages)
    options = {"asynchrony": asynchrony, "detect_races": True, "seed": 5}
    got = emulated(args, c, **options)
    expected = reference(*args, causal=True)
    np.testing.assert_allclose(got.astype(np.float64), expected, atol=2**-9)


# --- mistakes -------------------------------------------------------------------------


@pytest.fixture
def references(monkeypatch):
    """The references of a block by name, once a kernel is being traced."""
    found: dict[str, object] = {}
    declared = blackwell._Memory

    def record(**given):
        found.update(given)
        return declared(**given)

    monkeypatch.setattr(blackwell, "_Memory", record)
    blackwell.make_kernel.cache_clear()
    yield found
    blackwell.make_kernel.cache_clear()


@pytest.mark.parametrize(
    ("operation", "of"),
    [
        ("wait_load_tmem", None),
        ("commit_tmem", None),
        ("commit_smem", None),
        ("barrier_wait", "q_full"),
        ("barrier_wait", "k_full"),
        ("barrier_wait", "v_full"),
        ("barrier_wait", "k_empty"),
        ("barrier_wait", "v_empty"),
        ("barrier_wait", "scores_full"),
        ("barrier_wait", "ready"),
        ("barrier_wait", "result_full"),
        ("barrier_arrive", "ready"),
        ("tcgen05_commit_arrive", "k_empty"),
        ("tcgen05_commit_arrive", "v_empty"),
    ],
)
def test_a_missing_wait_commit_or_arrival_is_reported(
    references, monkeypatch, operation, of
):
    original = getattr(plgpu, operation)

    def omitted(*args):
        barrier = args[0] if args else None
        if isinstance(barrier, types.RefView):
            barrier = barrier.ref
        if of is not None and barrier is not references[of]:
            original(*args)

    monkeypatch.setattr(plgpu, operation, omitted)
    with pytest.raises(REPORTED):
        emulated(operands(Shape(kv_len=160)), seed=3)


# --- what the compiler makes of it ----------------------------------------------------


@pytest.mark.offline
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("semantics", "length"), [*((s, 4096) for s in BOTH), (Warpgroup, 256)]
)
def test_nothing_spills(semantics, length, head_dim, causal):
    shapes = [(4, length, 16, head_dim)] * 3
    args = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes]
    f = functools.partial(attention, causal=causal, compiler_params=BLACKWELL)
    (report,) = plgpu.offline.compile(under(semantics, f), *args, target="sm_100a")
    resources = report.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == 0
    assert resources.stack_bytes == 0
    counts = report.instruction_counts
    # Rows are in single threads: maxima and sums exchange nothing between lanes.
    assert counts["shfl"] == 1
    assert {"tcgen05.mma", "tcgen05.ld", "tcgen05.st"} <= counts.keys()


@pytest.mark.offline
def test_probabilities_are_an_operand_in_tensor_memory():
    args = [jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.float16)] * 3
    f = functools.partial(attention, compiler_params=BLACKWELL)
    (report,) = plgpu.offline.compile(f, *args, target="sm_100a")
    lines = [line for line in report.ptx.splitlines() if "tcgen05.mma" in line]
    # The left operand of a product is a descriptor, or an address in brackets.
    in_tmem = [line for line in lines if line.count("[") == 2]
    assert in_tmem and len(in_tmem) < len(lines)


# --- the choice of the kernel, and refusals -------------------------------------------


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, "wgmma"),
        ({"config": AttentionConfig()}, "wgmma"),
        ({"config": SMALL}, "tcgen05_mma"),
        ({"compiler_params": BLACKWELL}, "tcgen05_mma"),
        ({"config": SMALL, "compiler_params": plgpu.CompilerParams()}, "tcgen05_mma"),
        ({"compiler_params": plgpu.CompilerParams(target="sm_90a")}, "wgmma"),
    ],
)
def test_target_and_configuration_choose_the_kernel(options, chosen):
    traced = jax.make_jaxpr(functools.partial(attention, **options))(
        *operands(Shape(kv_len=128))
    )
    assert chosen in str(traced)


@pytest.mark.parametrize(
    ("c", "target"), [(SMALL, "sm_90a"), (AttentionConfig(), "sm_100a")]
)
@refused
def test_the_configuration_is_for_the_target(c, target):
    params = plgpu.CompilerParams(target=target)
    attention(*operands(Shape()), config=c, compiler_params=params)


@pytest.mark.parametrize("head_dim", [80, 256])
@refused
def test_the_size_of_a_head_is_64_or_128(head_dim):
    attention(*operands(Shape(head_dim=head_dim)), compiler_params=BLACKWELL)


@pytest.mark.parametrize(
    "changes",
    [{"block_kv": 8}, {"block_kv": 272}, {"stages": 0}, {"heads_together": 0}],
)
@refused
def test_a_configuration_fits_the_tensor_core(changes):
    BlackwellAttentionConfig(**changes)


def test_the_arrays_fit_tensor_memory():
    c = BlackwellAttentionConfig(block_kv=128)
    with pytest.raises(errors.OutOfResources, match="TMEM"):
        attention(*operands(Shape(head_dim=128)), config=c)


def test_the_buffers_fit_shared_memory():
    c = BlackwellAttentionConfig(block_kv=64, stages=8)
    with pytest.raises(errors.OutOfResources, match="needs more SMEM"):
        attention(*operands(Shape(head_dim=128)), config=c)
