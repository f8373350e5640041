# SPDX-License-Identifier: Apache-2.0
"""Attention on Blackwell: mistakes in it that are found, its choice, its refusals."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors, types
from pallas_gpu.ops import memory
from pallas_gpu.ops.flash import blackwell
from pallas_gpu.ops.flash.attention import attention
from pallas_gpu.ops.flash.config import AttentionConfig, BlackwellAttentionConfig
from pallas_gpu.primitives import mbarrier
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
    declared = memory.Memory

    def record(**given):
        found.update(given)
        for x, part in itertools.product("kv", ("full", "empty")):
            found[f"{x}_{part}"] = getattr(given[f"{x}_ring"], part)
        return declared(**given)

    monkeypatch.setattr(memory, "Memory", record)
    blackwell.make_kernel.cache_clear()
    yield found
    blackwell.make_kernel.cache_clear()


@pytest.mark.parametrize(
    ("operation", "of"),
    [
        ("wait_load_tmem", None),
        ("commit_tmem", None),
        ("commit_smem", None),
        *(("barrier_wait", f"{x}_full") for x in ("q", "k", "v", "scores", "result")),
        *(("barrier_wait", x) for x in ("k_empty", "v_empty", "ready")),
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
    if operation == "barrier_wait":
        monkeypatch.setattr(mbarrier, operation, omitted)
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
