# SPDX-License-Identifier: Apache-2.0
"""Attention on Blackwell: mistakes in it that are found, its choice, its refusals."""

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
from tests.ops.flash.test_attention import BLACKWELL, Shape, operands

SMALL = BlackwellAttentionConfig(block_kv=32)
# What the emulator says of a missing wait, commit or arrival.
REPORTED = (
    errors.RaceError,
    errors.DeadlockError,
    errors.BarrierError,
    errors.UninitializedReadError,
)


def attended(args, c=SMALL, causal=True, **options):
    interpret = plgpu.InterpretParams(**options)
    return np.asarray(attention(*args, causal=causal, config=c, interpret=interpret))


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
        attended(operands(Shape(kv_len=160)), seed=3)


# --- what the compiler makes of it ----------------------------------------------------


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
def test_the_configuration_is_for_the_target(c, target):
    params = plgpu.CompilerParams(target=target)
    with pytest.raises(errors.ArgumentError) as caught:
        attention(*operands(Shape()), config=c, compiler_params=params)
    what = "attention: the configuration is for another target"
    assert caught.value.what == what
    assert type(c).__name__ in caught.value.got and target in caught.value.got


@pytest.mark.parametrize("head_dim", [80, 256])
def test_the_size_of_a_head_is_64_or_128(head_dim):
    with pytest.raises(errors.ShapeError) as caught:
        attention(*operands(Shape(head_dim=head_dim)), compiler_params=BLACKWELL)
    what = "attention: this head_dim is not supported on Blackwell"
    assert caught.value.what == what
    assert caught.value.got == head_dim


@pytest.mark.parametrize(
    ("changes", "what", "got"),
    [
        ({"block_kv": 8}, "the tensor core does not support this tile", "block_kv=8"),
        ({"block_kv": 272}, "the tensor core does not support this tile", "272"),
        ({"stages": 0}, "a number is not positive", "stages=0"),
        ({"heads_together": 0}, "a number is not positive", "heads_together=0"),
    ],
)
def test_a_configuration_fits_the_tensor_core(changes, what, got):
    with pytest.raises(errors.ArgumentError) as caught:
        BlackwellAttentionConfig(**changes)
    assert caught.value.what == f"BlackwellAttentionConfig: {what}"
    assert got in str(caught.value.got)


def test_the_arrays_fit_tensor_memory():
    c = BlackwellAttentionConfig(block_kv=128)
    with pytest.raises(errors.OutOfResources, match="TMEM"):
        attention(*operands(Shape(head_dim=128)), config=c)


def test_the_buffers_fit_shared_memory():
    c = BlackwellAttentionConfig(block_kv=64, stages=8)
    with pytest.raises(errors.OutOfResources, match="needs more SMEM"):
        attention(*operands(Shape(head_dim=128)), config=c)
