# SPDX-License-Identifier: Apache-2.0
"""Derivatives, devices, budgets: what a call refuses, eagerly and under jit."""

from __future__ import annotations

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests import conftest
from tests.support.entry_kernels import f32, make, numbers, run
from tests.support.refusal import refused, refused_by

no_gpu = pytest.mark.skipif(conftest.PLATFORM != "cpu", reason="needs no GPU")


def add_one(x, o):
    o[...] = x[...] + 1


def blocked(**options):
    spec = plgpu.BlockSpec((32, 128), lambda i: (i, 0))
    return plgpu.pallas_call(
        add_one, f32(), grid=2, in_specs=[spec], out_specs=spec, **options
    )


def with_a_rule(k):
    f = jax.custom_vjp(k)
    f.defvjp(lambda x: (k(x), None), lambda _, g: (k(g),))
    return f


# --- derivatives ----------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("make_kernel", [lambda: make(add_one), blocked])
@refused
def test_a_kernel_has_no_derivative(make_kernel, jit):
    k = make_kernel()

    def loss(x):
        return k(x).sum()  # HERE

    jax.grad(jax.jit(loss) if jit else loss)(numbers())


@pytest.mark.parametrize("transformation", [jax.jvp, jax.linearize, jax.vjp])
def test_no_mode_of_differentiation_passes(transformation):
    k = make(add_one)
    primals = (numbers(),)
    with pytest.raises(errors.DifferentiationError, match="defvjp"):
        if transformation is jax.jvp:
            jax.jvp(k, primals, primals)
        else:
            transformation(k, *primals)


def test_a_custom_derivative_is_used():
    k = make(add_one)
    f = jax.custom_vjp(k)
    f.defvjp(lambda x: (k(x), None), lambda _, g: (g * 5,))
    gradient = jax.jit(jax.grad(lambda x: f(x).sum()))(numbers())
    np.testing.assert_array_equal(gradient, np.full((64, 128), 5, np.float32))


def test_vmap_leaves_a_kernel_of_unmapped_arrays_as_it_is():
    k = make(add_one)
    x = numbers()
    alone, mapped = jax.vmap(lambda t: (k(x), k(x + t)), out_axes=(None, 0))(
        jnp.arange(3.0)
    )
    np.testing.assert_array_equal(alone, x + 1)
    np.testing.assert_array_equal(mapped, np.stack([x + 1, x + 2, x + 3]))


@pytest.mark.parametrize("transform", [jax.jacfwd, jax.jacrev])
def test_the_jacobian_of_a_kernel_with_a_rule(transform):
    k = make(add_one)

    @jax.custom_jvp
    def f(x):
        return k(x)

    f.defjvp(lambda x, t: (k(*x), 2 * t[0]))
    x = numbers()
    jacobian = transform(lambda s: f(s * x))(jnp.float32(1))
    np.testing.assert_array_equal(jacobian, 2 * x)


# --- export ---------------------------------------------------------------------------


@refused
def test_the_emulator_cannot_be_exported():
    k = make(add_one)
    jax.export.export(jax.jit(k))(numbers())  # HERE


def test_a_kernel_is_exported_for_gpus_without_one():
    exported = jax.export.export(jax.jit(make(add_one)), platforms=["cuda"])(numbers())
    assert "mosaic_gpu_v2" in exported.mlir_module()


# --- devices --------------------------------------------------------------------------


@no_gpu
@pytest.mark.parametrize("entry", [lambda **kw: make(add_one, **kw), blocked])
@pytest.mark.parametrize("jit", [False, True])
@refused
def test_interpret_false_insists_on_a_gpu(entry, jit):
    k = entry(interpret=False)
    (jax.jit(k) if jit else k)(numbers())  # HERE


@pytest.mark.parametrize("interpret", [None, True, plgpu.InterpretParams(seed=3)])
def test_the_emulator_runs_where_it_is_asked_for(interpret):
    k = make(add_one, interpret=interpret)
    np.testing.assert_array_equal(k(numbers()), numbers() + 1)


def test_the_environment_asks_for_the_emulator(monkeypatch):
    monkeypatch.setenv("PALLAS_GPU_INTERPRET", "1")
    np.testing.assert_array_equal(make(add_one)(numbers()), numbers() + 1)


@refused
def test_a_target_exists():
    plgpu.CompilerParams(target="sm_80")  # HERE


# --- budgets --------------------------------------------------------------------------

BIG = plgpu.SMEM((1024, 128), jnp.float32)


@pytest.mark.parametrize("way", ["eager", "jit", "offline", "vmap"])
@refused
def test_smem_over_the_budget_is_refused_in_every_way(way):
    def body(x, o, big, barrier):  # HERE
        o[...] = x[...]

    k = make(body, scratch_types=[BIG, plgpu.Barrier()])
    match way:
        case "eager":
            k(numbers())
        case "jit":
            jax.jit(k)(numbers())
        case "vmap":
            jax.vmap(k)(numbers(2, 64, 128))
        case "offline":
            plgpu.offline.lower(k, numbers())


@refused_by(
    run, scratch_types=[BIG], compiler_params=plgpu.CompilerParams(target="sm_100a")
)
def test_the_budget_is_that_of_the_target_asked_for(x, o, big):
    o[...] = x[...]


@refused
def test_blocks_over_the_budget_are_refused():
    spec = plgpu.BlockSpec((256, 256), lambda i: (i, 0))

    def body(x, o):  # HERE
        o[...] = x[...]

    k = plgpu.pallas_call(body, f32(512, 256), grid=2, in_specs=[spec], out_specs=spec)
    k(numbers(512, 256))


def test_scopes_that_follow_each_other_share_the_budget():
    def body(x, o):
        for _ in range(3):
            plgpu.run_scoped(lambda tile: None, plgpu.SMEM((300, 128), jnp.float32))
        o[...] = x[...]

    np.testing.assert_array_equal(run(body), numbers())


# --- mistakes that only a run shows ---------------------------------------------------


JITTED = {
    "jit": jax.jit,
    "vmap": lambda k: jax.jit(jax.vmap(lambda x: k(x), axis_size=2, in_axes=None)),
    "scan": lambda k: lambda x: jax.lax.scan(lambda c, _: (k(c), None), x, length=2),
    "grad": lambda k: jax.jit(jax.grad(lambda x: with_a_rule(k)(x).sum())),
}
jitted = pytest.mark.parametrize("transform", JITTED.values(), ids=JITTED.keys())


def waiting(x, o, barrier):
    plgpu.barrier_wait(barrier)


def racing(x, o):
    o[...] = x[...] + jax.lax.axis_index("i")


def require_report(info, name, line, source):
    """The error of JAX's runtime: its own line, the kernel's line, the report."""
    prefix, place, what, *rest = str(info.value).splitlines()
    assert prefix.startswith("INTERNAL: CpuCallback error")
    assert f'test_transformations.py", line {line}, in ' in place
    assert what.startswith(name)
    text = "\n".join(rest)
    for part in ("expected:", "got:", "hint:", "at:", source):
        assert part in text
    seen = "".join(traceback.format_exception(info.value))
    assert seen.count(what) == 1
    assert len(seen.splitlines()) <= 25


@jitted
def test_under_jit_the_report_comes_first_once_and_is_short(transform, caplog):
    f = transform(make(waiting, scratch_types=[plgpu.Barrier()]))
    with pytest.raises(Exception, match="deadlock: 1 of ") as info:
        jax.block_until_ready(f(numbers()))
    line = waiting.__code__.co_firstlineno + 1
    require_report(info, "DeadlockError: deadlock", line, "plgpu.barrier_wait(barrier)")
    assert "0 of 1 arrivals" in str(info.value)
    assert not caplog.records, "JAX logs the error a second time"


@jitted
def test_a_race_under_jit_is_a_report_of_jax(transform):
    f = transform(make(racing, grid=(2,), grid_names=("i",)))
    with pytest.raises(jax.errors.JaxRuntimeError) as info:
        jax.block_until_ready(f(numbers()))
    line = racing.__code__.co_firstlineno + 1
    require_report(info, "RaceError: output 0", line, "o[...] = x[...] + jax.lax.axis")


@pytest.mark.parametrize(
    "transform",
    [
        lambda k: lambda xs: k(xs[0]),
        jax.vmap,
        lambda k: jax.grad(lambda xs: with_a_rule(k)(xs[0]).sum()),
        lambda k: jax.disable_jit()(jax.jit(lambda xs: k(xs[0]))),
    ],
    ids=["eager", "vmap", "grad", "jit disabled"],
)
def test_without_jit_a_race_is_a_race_error(transform):
    f = transform(make(racing, grid=(2,), grid_names=("i",)))
    with pytest.raises(errors.RaceError) as info:
        f(numbers(1, 64, 128))
    assert "o[...] = x[...] + jax.lax.axis_index" in str(info.value)


def test_the_report_of_many_threads_that_wait_is_short():
    def body(x, o, barriers):
        for i in range(16):
            wg = jax.lax.axis_index("wg")
            at = jax.lax.axis_index("c") * 2 + wg

            @plgpu.when(at == i)
            def _(i=i):
                plgpu.barrier_wait(barriers.at[i])

    k = make(
        body, cluster=(8,), cluster_names=("c",), num_threads=2, thread_name="wg",
        scratch_types=[plgpu.Barrier(num_barriers=16)],
    )  # fmt: skip
    with pytest.raises(Exception, match="16 of 16 warpgroups wait") as info:
        jax.jit(k)(numbers())
    seen = "".join(traceback.format_exception(info.value))
    assert "... and 12 more" in seen
    assert len(seen.splitlines()) <= 25


def test_an_eager_error_shows_the_users_frames_only():
    with pytest.raises(errors.DeadlockError) as info:
        make(waiting, scratch_types=[plgpu.Barrier()])(numbers())
    seen = [frame.filename for frame in traceback.extract_tb(info.value.__traceback__)]
    assert seen == [__file__]


def test_frames_stay_where_jax_is_asked_for_them():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(Exception, match="deadlock: 1 of ") as info:
            jax.jit(make(waiting, scratch_types=[plgpu.Barrier()]))(numbers())
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert "emulator/engine/scheduler.py" in str(info.value)


def test_an_error_leaves_the_kernel_usable():
    def body(x, n, o):
        o[...] = x[...] * 0
        o[n[0]] = x[0]

    k = make(body)
    with pytest.raises(errors.OutOfBoundsError):
        k(numbers(), np.array([64], np.int32))
    result = k(numbers(), np.array([63], np.int32))
    np.testing.assert_array_equal(result[63], numbers()[0])
