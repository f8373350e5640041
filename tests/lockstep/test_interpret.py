# SPDX-License-Identifier: Apache-2.0
"""`interpret="emitted"`: a JAX program whose kernels run as the code they become."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.lockstep import engine
from pallas_gpu.lockstep.sync import control

X = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
TILE = plgpu.SMEM((64, 128), jnp.float32)


def doubled(x, o, tile, barrier, commit=True):
    plgpu.copy_gmem_to_smem(x, tile, barrier)
    plgpu.barrier_wait(barrier)
    tile[...] = 2 * tile[...]
    if commit:
        plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, o)
    plgpu.wait_smem_to_gmem(0)


def without_a_fence(x, o, tile, barrier):
    doubled(x, o, tile, barrier, commit=False)


def without_a_wait(x, o, tile, barrier):
    plgpu.copy_gmem_to_smem(x, tile, barrier)
    o[...] = tile[...]
    plgpu.barrier_wait(barrier)


def waits_for_ever(x, o, tile, barrier):
    plgpu.barrier_wait(barrier)


def beyond_the_end(x, o, tile, barrier):
    o[...] = x[plgpu.ds(jax.lax.axis_index("i") + 1, 64)]


def kernel(body, interpret="emitted", **options):
    return plgpu.kernel(
        body, out_type=TILE, scratch_types=[TILE, plgpu.Barrier()],
        grid=(1,), grid_names=("i",), interpret=interpret, **options,
    )  # fmt: skip


def calls():
    k = kernel(doubled)
    pair = np.stack([X, X + 1])
    return {
        "eager": (lambda: k(X), 2 * X),
        "jit": (lambda: jax.jit(k)(X), 2 * X),
        "vmap": (lambda: jax.vmap(k)(pair), 2 * pair),
        "scan": (lambda: jax.lax.scan(lambda c, x: (c, k(x)), 0, pair)[1], 2 * pair),
        "two kernels": (lambda: jax.jit(lambda x: k(k(x) + 1))(X), 2 * (2 * X + 1)),
        "parameters": (
            lambda: kernel(doubled, plgpu.InterpretParams(emitted=True, seed=3))(X),
            2 * X,
        ),
        "forced": (forced, 2 * X),
    }


def forced():
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretParams(emitted=True)):
        return kernel(doubled, interpret=None)(X)


@pytest.mark.parametrize(("call", "expected"), calls().values(), ids=calls())
def test_the_code_of_kernels_runs_wherever_kernels_do(call, expected, monkeypatch):
    runs = []
    real = engine.Scheduler.run
    monkeypatch.setattr(
        engine.Scheduler, "run", lambda *args: runs.append(1) or real(*args)
    )
    np.testing.assert_array_equal(call(), expected)
    assert runs


def test_a_variable_of_the_environment_chooses_it(monkeypatch):
    monkeypatch.setenv("PALLAS_GPU_INTERPRET", "emitted")
    with pytest.raises(plgpu.errors.PtxError):
        kernel(without_a_fence, interpret=None)(X)


WRONG = {
    without_a_fence: (plgpu.errors.RaceError, "plgpu.copy_smem_to_gmem(tile, o)"),
    without_a_wait: (plgpu.errors.RaceError, "o[...] = tile[...]"),
    waits_for_ever: (plgpu.errors.DeadlockError, "plgpu.barrier_wait(barrier)"),
}


@pytest.mark.parametrize("body", WRONG, ids=lambda body: body.__name__)
@pytest.mark.parametrize("semantics", plgpu.LoweringSemantics)
def test_a_mistake_has_the_class_of_the_emulator_and_the_line(body, semantics):
    wanted, line = WRONG[body]
    params = plgpu.CompilerParams(lowering_semantics=semantics)
    with pytest.raises(wanted):
        kernel(body, interpret=True, compiler_params=params)(X)
    with pytest.raises(plgpu.errors.PtxError) as info:
        kernel(body, compiler_params=params)(X)
    assert isinstance(info.value, wanted)
    assert "test_interpret.py" in str(info.value.where)
    assert line in str(info.value)


def test_a_loop_that_does_not_end_is_one(monkeypatch):
    def body(x, o, tile, barrier):
        end = jax.lax.while_loop(lambda i: i >= 0, lambda i: i * 0, jnp.int32(x[0, 0]))
        o[...] = x[...] + end.astype(jnp.float32)

    monkeypatch.setattr(control, "_MOST_TRIPS", 100)
    with pytest.raises(plgpu.errors.LivelockError):
        kernel(body)(X)


def test_an_access_out_of_bounds_is_one():
    with pytest.raises(plgpu.errors.OutOfBoundsError):
        kernel(beyond_the_end)(X)


def test_a_check_of_the_code_has_the_rules_of_the_emulator():
    clean = plgpu.check(kernel(doubled), orders=2, emitted=True)(X)
    assert clean.clean and clean.coverage[0].schedules == 2
    wrong = plgpu.check(kernel(without_a_fence), orders=2, emitted=True)(X)
    assert [f.rule.id for f in wrong.findings] == ["race"]
    assert wrong.findings[0].at.function == "kernel"
    assert plgpu.errors.PtxError("another").finding.rule.id == "emitted-code"
    with pytest.raises(plgpu.errors.UnsupportedError, match="emitted"):
        plgpu.check(kernel(doubled), orders="all", emitted=True)
