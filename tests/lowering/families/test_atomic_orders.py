# SPDX-License-Identifier: Apache-2.0
"""Atomic operations that release and acquire, and their scopes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, offline
from tests.support import everywhere
from tests.support.entry_kernels import f32
from tests.support.refusal import refused_by
from tests.support.semantics import BOTH, under

I32, F32 = jnp.int32, jnp.float32
N, CTAS = 128, 4
SEEDS = range(4)


def ramp(*shape):
    return (np.arange(np.prod(shape)) % 100).astype(np.float32).reshape(shape)


def ticket(cluster=False, **order):
    """`make`: each CTA stores a row and counts itself; the last one adds them up."""

    def body(count, x, rows, total):
        i = lax.axis_index("i")
        rows[i] = x[i] * 2
        before = plgpu.atomic_add(count.at[0], 1, **order)

        @plgpu.when(before == CTAS - 1)
        def _():
            total[...] = jnp.sum(rows[...], axis=0)

    options = {"cluster" if cluster else "grid": {"i": CTAS}}
    make = everywhere.in_place(body, (f32(CTAS, N), f32(N)), **options)
    return lambda interpret=None: lambda x: make(interpret)(jnp.zeros((1,), I32), x)


ORDERED = [
    {"sem": "acq_rel"},
    {"sem": "acq_rel", "scope": "gpu"},
    {"sem": "acq_rel", "scope": "sys"},
    {"cluster": True, "sem": "acq_rel", "scope": "cluster"},
]
UNORDERED = [
    {},
    {"sem": "relaxed", "scope": "sys"},
    {"sem": "release"},
    {"sem": "acquire"},
    {"sem": "acq_rel", "scope": "cta"},
    {"sem": "acq_rel", "scope": "cluster"},
]


@pytest.mark.smoke
@pytest.mark.parametrize("order", ORDERED, ids=str)
def test_the_last_cta_reads_what_the_others_have_stored(order):
    x = ramp(CTAS, N)
    expected = np.array([CTAS], np.int32), x * 2, np.sum(x * 2, axis=0)
    everywhere.check(ticket(**order), [x], expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", UNORDERED, ids=str)
def test_less_is_a_race(order, seed):
    with pytest.raises(errors.RaceError):
        ticket(**order)(plgpu.InterpretParams(seed=seed))(ramp(CTAS, N))


# --- messages -------------------------------------------------------------------------


def emulate(body, ctas, seed):
    """The first result of CTAs that share a flag and an array."""
    flag, x = jax.new_ref(jnp.zeros((1,), I32)), ramp(N)
    options = {"grid": {"i": ctas}, "seed": seed}
    return everywhere.emulate(body, [flag, x], (x, x), **options)[0]


def message(release, acquire):
    """One CTA stores and sets a flag, for which the other one waits in a loop."""

    def body(flag, x, o, y):
        i = lax.axis_index("i")

        @plgpu.when(i == 0)
        def _():
            y[...] = x[...]
            plgpu.atomic_xchg(flag.at[0], 1, **release)

        @plgpu.when(i == 1)
        def _():
            lax.while_loop(
                lambda seen: seen < 1,
                lambda _: plgpu.atomic_add(flag.at[0], 0, **acquire),
                I32(0),
            )
            o[...] = y[...]

    return functools.partial(emulate, body, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_message_arrives(seed):
    got = message({"sem": "release"}, {"sem": "acquire"})(seed)
    np.testing.assert_array_equal(got, ramp(N))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("release", "acquire"),
    [("relaxed", "acquire"), ("release", "relaxed"), ("acquire", "release")],
)
def test_a_message_without_both_is_a_race(release, acquire, seed):
    with pytest.raises(errors.RaceError):
        message({"sem": release}, {"sem": acquire})(seed)


def shared(release, acquire):
    """`make`: warpgroups of a CTA add to a counter in SMEM; the last one adds up."""

    def body(x, o, count, rows, ready):
        w = lax.axis_index("wg")
        plgpu.when(w == 0)(lambda: count.set(jnp.zeros((1,), I32)))
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        rows[w] = x[w]
        before = plgpu.atomic_add(count.at[0], 1, sem=release)
        after = plgpu.atomic_add(count.at[0], 0, sem=acquire)

        @plgpu.when((before == 1) & (after == 2))
        def _():
            o[...] = rows[0] + rows[1]

    return everywhere.kernel(
        body,
        jax.ShapeDtypeStruct((N,), F32),
        plgpu.SMEM((1,), I32),
        plgpu.SMEM((2, N), F32),
        plgpu.Barrier(num_arrivals=2),
        threads={"wg": 2},
    )


def test_counters_in_smem_order_warpgroups():
    x = ramp(2, N)
    everywhere.check(shared("release", "acquire"), [x], x[0] + x[1])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "orders", [("relaxed", "acquire"), ("release", "relaxed")], ids=str
)
def test_relaxed_counters_in_smem_do_not(orders, seed):
    with pytest.raises(errors.RaceError):
        shared(*orders)(plgpu.InterpretParams(seed=seed))(ramp(2, N))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("expected", [0, 5])
def test_a_comparison_that_fails_releases_nothing(expected, seed):
    def body(flag, x, o, y):
        i = lax.axis_index("i")

        @plgpu.when(i == 0)
        def _():
            y[...] = x[...]
            plgpu.atomic_cas(flag.at[0], expected, 1, sem="release")
            plgpu.atomic_max(flag.at[0], 1)

        @plgpu.when(i == 1)
        def _():
            lax.while_loop(
                lambda seen: seen < 1,
                lambda _: plgpu.atomic_or(flag.at[0], 0, sem="acquire"),
                I32(0),
            )
            o[...] = y[...]

    if expected == 0:
        np.testing.assert_array_equal(emulate(body, 2, seed), ramp(N))
        return
    with pytest.raises(errors.RaceError):
        emulate(body, 2, seed)


# --- instructions ---------------------------------------------------------------------


@pytest.mark.offline
def test_the_instructions_have_order_and_scope():
    def body(counts, x, o):
        plgpu.atomic_add(counts.at[0], 1, sem="release", scope="gpu")
        plgpu.atomic_max(counts.at[1], 1, sem="acquire", scope="sys")
        plgpu.atomic_add(counts.at[plgpu.ds(8, 128)], 1, sem="release", scope="cta")
        plgpu.atomic_cas(counts.at[2], 0, 1, sem="acq_rel")
        o[...] = x[...]

    def call(counts, x):
        kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((N,), F32))
        return kernel(jax.new_ref(counts), x)

    for semantics in BOTH:
        function = under(semantics, call)
        (report,) = offline.compile(
            function, np.zeros(256, np.int32), ramp(N), target="sm_90a"
        )
        for text in (
            "red.release.gpu.global.add.u32",
            "atom.acquire.sys.global.max.s32",
            "red.release.cta.global.add.u32",
            "atom.acq_rel.gpu.global.cas.b32",
        ):
            assert text in report.ptx, text


# --- refused --------------------------------------------------------------------------


def trace(body):
    x = jnp.zeros((N,), I32)
    kernel = everywhere.kernel(body, x, plgpu.SMEM((N,), I32), cluster={"c": 2})
    jax.eval_shape(kernel())


@refused_by(trace)
def test_the_scope_of_a_cta_does_not_include_another_one(o, s):
    plgpu.atomic_add(plgpu.cluster_ref(s, {"c": 1}), 1, scope="cta")  # HERE
