# SPDX-License-Identifier: Apache-2.0
"""Products of values in a block of several warpgroups: each stages its own copies."""

from __future__ import annotations

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.semantics import BOTH, under
from tests.support.value_products import F32, float64, numbers

BF16 = jnp.bfloat16
dot = functools.partial(jnp.dot, preferred_element_type=F32)


def wg():
    return jax.lax.axis_index("wg")


def twice(x):
    return (x.astype(F32) * 2).astype(x.dtype)


def both(a_ref, b_ref, o_ref):
    o_ref[wg()] = dot(a_ref[wg()], twice(b_ref[...]))


def sliced(a_ref, b_ref, o_ref):
    """The right operand is the warpgroup's part of a block of both heads."""
    o_ref[wg()] = dot(twice(a_ref[wg()]), b_ref[:, wg()])


def in_a_branch(a_ref, b_ref, o_ref):
    """Only one warpgroup multiplies."""
    o_ref[wg()] = jnp.zeros((64, 64), F32)

    @plgpu.when(wg() == 1)
    def _():
        o_ref[1] = dot(a_ref[1], twice(b_ref[...]))


def in_a_loop(a_ref, b_ref, o_ref):
    """Copies follow each other in the same memory, a different number in each."""

    def step(i, acc):
        first = dot(a_ref[wg()], twice(b_ref[...]))
        return acc + dot(a_ref[wg()], (twice(b_ref[...]) * i).astype(BF16)) - first

    zero = jnp.zeros((64, 64), F32)
    o_ref[wg()] = jax.lax.fori_loop(0, 2 + wg(), step, zero)


def accumulated(a_ref, b_ref, o_ref, acc_ref):
    acc_ref[...] = jnp.zeros_like(acc_ref)
    acc_ref[...] += dot(a_ref[wg()], twice(b_ref[...]))
    o_ref[wg()] = acc_ref[...]


def left_too(a_ref, b_ref, o_ref):
    """Neither operand is read where it is: float32 is not kept in registers."""
    a, b = a_ref[wg()].astype(F32), b_ref[...].astype(F32)
    o_ref[wg()] = dot(a, b * 2)


BODIES = {
    both: lambda p: 2 * p,
    in_a_branch: lambda p: np.stack([0 * p[0], 2 * p[1]]),
    in_a_loop: lambda p: np.stack([-2 * p[0], 0 * p[1]]),
    accumulated: lambda p: 2 * p,
    left_too: lambda p: 2 * p,
    sliced: lambda p: 2 * p,
}


def make(body, entry="pallas_call"):
    out = jax.ShapeDtypeStruct((2, 64, 64), F32)
    scratch = (plgpu.ACC((64, 64), F32),) if body is accumulated else ()
    if entry == "kernel":

        def with_scope(*refs):
            plgpu.run_scoped(functools.partial(body, *refs), *scratch)

        whole = with_scope if scratch else body
        return everywhere.kernel(whole, out, threads={"wg": 2})
    return lambda interpret: plgpu.pallas_call(
        body,
        out,
        grid=(),
        num_threads=2,
        thread_name="wg",
        scratch_shapes=scratch,
        interpret=interpret,
    )


def operands(rng, body):
    b = (32, 2, 64) if body is sliced else (32, 64)
    return [numbers(rng, "bfloat16", 2, 64, 32), numbers(rng, "bfloat16", *b)]


def instructions(function, *args, semantics=BOTH[0]):
    """Returns how many of both instructions there are, and the bytes of spills."""
    (report,) = plgpu.offline.compile(under(semantics, function), *args)
    counts = [len(re.findall(rf"\b{op}\b", report.sass)) for op in ("HGMMA", "HMMA")]
    return *counts, report.resources.spill_load_bytes


@pytest.mark.parametrize("entry", ["kernel", "pallas_call"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_each_warpgroup_multiplies_its_own_copies(rng, body, entry):
    a, b = operands(rng, body)
    right = np.moveaxis(float64(b), 1, 0) if body is sliced else float64(b)
    expected = BODIES[body](float64(a) @ right)
    everywhere.check(make(body, entry), [a, b], expected, atol=0.1)


@pytest.mark.offline
@pytest.mark.sass
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("entry", ["kernel", "pallas_call"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_wgmma_multiplies_values_of_several_warpgroups(rng, body, entry, semantics):
    function = make(body, entry)(None)
    args = operands(rng, body)
    wgmma, mma, spilled = instructions(function, *args, semantics=semantics)
    assert wgmma > 0 == mma == spilled


def with_little_room():
    """Returns a kernel of two products, whose K are 64 and 192, in little SMEM."""
    out = jax.ShapeDtypeStruct((2, 64, 64), F32)

    def body(a_ref, b_ref, o_ref, taken_ref):
        taken_ref[wg()] = a_ref[wg(), 0, 0]
        small = dot(a_ref[wg(), :, :64], twice(b_ref[:64]))
        o_ref[wg()] = small + dot(a_ref[wg()], twice(b_ref[...]))  # LARGE

    return everywhere.kernel(
        body, out, plgpu.SMEM((94 * 1024,), BF16), threads={"wg": 2}
    )


@pytest.mark.offline
@pytest.mark.sass
@pytest.mark.parametrize("semantics", BOTH)
def test_a_copy_that_does_not_fit_is_a_warning_of_the_product(rng, semantics):
    """Only that product is multiplied by mma.sync; the other one's copy fits."""
    a, b = numbers(rng, "bfloat16", 2, 64, 192), numbers(rng, "bfloat16", 192, 64)
    make = with_little_room()
    with pytest.warns(errors.PerformanceWarning, match="mma.sync") as seen:
        wgmma, mma, _ = instructions(make(None), a, b, semantics=semantics)
    (text,) = {str(w.message) for w in seen if "mma.sync" in str(w.message)}
    with open(__file__) as file:
        line = 1 + next(i for i, x in enumerate(file) if "# LARGE" in x)
    assert f"test_product_staging.py:{line} " in text
    assert "24,576 bytes of each of the 2 warpgroups" in text
    assert wgmma > 0 < mma


def test_a_product_whose_copy_does_not_fit_is_right(rng):
    a, b = numbers(rng, "bfloat16", 2, 64, 192), numbers(rng, "bfloat16", 192, 64)
    wide = float64(a) @ float64(b)
    small = float64(a)[..., :64] @ float64(b)[:64]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.PerformanceWarning)
        make = with_little_room()
        everywhere.check(make, [a, b], 2 * (wide + small), atol=0.3)


@pytest.mark.offline
def test_a_product_that_wgmma_cannot_compute_is_not_a_warning(rng):
    def body(a_ref, b_ref, o_ref):
        o_ref[wg()] = dot(a_ref[wg(), :32], twice(b_ref[...]))

    out = jax.ShapeDtypeStruct((2, 32, 64), F32)
    make = everywhere.kernel(body, out, threads={"wg": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.PerformanceWarning)
        plgpu.offline.lower(make(None), *operands(rng, body), target="sm_90a")


# --- what people write ----------------------------------------------------------------

CHUNK = 64


def lower_triangle(x, diagonal=0):
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, x.shape, i) for i in (0, 1))
    return jnp.where(rows - columns >= diagonal, x, 0.0)


def mamba_chunk(x_ref, b_ref, c_ref, a_ref, y_ref, state_ref):
    """A chunk of a head: what it adds to itself, and what the state adds to it.

    a_ref holds sums of the logarithms of decays, from the start of the chunk.
    """

    @plgpu.when(plgpu.program_id(0) == 0)
    def _():
        state_ref[wg()] = jnp.zeros(state_ref.shape[1:], F32)

    a, left, right = a_ref[wg()], c_ref[...], b_ref[...]
    scores = lower_triangle(dot(left, right.T) * jnp.exp(a[:, None] - a[None, :]))
    from_state = dot(left, state_ref[wg()].astype(BF16)) * jnp.exp(a)[:, None]
    y_ref[:, wg()] = dot(scores.astype(BF16), x_ref[:, wg()]) + from_state
    new = (x_ref[:, wg()] * jnp.exp(a[-1] - a)[:, None]).astype(BF16)
    state_ref[wg()] = state_ref[wg()] * jnp.exp(a[-1]) + dot(right.T, new)


def delta_chunk(x_ref, k_ref, q_ref, a_ref, y_ref, state_ref):
    """A chunk of a head of the gated delta rule, all of whose betas are 1/2."""

    @plgpu.when(plgpu.program_id(0) == 0)
    def _():
        state_ref[wg()] = jnp.zeros(state_ref.shape[1:], F32)

    a, k, q = a_ref[wg()], k_ref[...], q_ref[...]
    decay = jnp.exp(lower_triangle(a[:, None] - a[None, :]))
    power = lower_triangle(dot(k, k.T) * decay, 1) * -0.5
    # (1 - p)^-1 = (1 + p) (1 + p^2) (1 + p^4) ...
    inverse = power
    for _ in range(5):
        power = dot(power.astype(BF16), power.astype(BF16))
        inverse += power + dot(inverse.astype(BF16), power.astype(BF16))
    old = dot(k, state_ref[wg()].astype(BF16)) * jnp.exp(a)[:, None]
    wanted = (x_ref[:, wg()] - old) * 0.5
    new = (wanted + dot(inverse.astype(BF16), wanted.astype(BF16))).astype(BF16)
    from_state = dot(q, state_ref[wg()].astype(BF16)) * jnp.exp(a)[:, None]
    a = a_ref[wg()]  # the decays are computed again: registers are scarce
    decay = jnp.exp(lower_triangle(a[:, None] - a[None, :]))
    scores = lower_triangle(dot(q, k.T) * decay).astype(BF16)
    y_ref[:, wg()] = from_state + dot(scores, new)
    left = (k * jnp.exp(a[-1] - a)[:, None]).astype(BF16)
    state_ref[wg()] = state_ref[wg()] * jnp.exp(a[-1]) + dot(left.T, new)


def mamba_step(state, x, b, c, decay):
    state = state * decay + np.outer(b, x)
    return state, c @ state


def delta_step(state, v, k, q, decay):
    state = state * decay
    state = state + 0.5 * np.outer(k, v - k @ state)
    return state, q @ state


def scan(body):
    """Returns `make` of a scan over chunks of two heads."""

    def call(interpret, x, b, c, a):
        chunk = plgpu.BlockSpec((CHUNK, 64), lambda i: (i, 0))
        heads = plgpu.BlockSpec((CHUNK, 2, 64), lambda i: (i, 0, 0))
        return plgpu.pallas_call(
            body,
            jax.ShapeDtypeStruct(x.shape, F32),
            grid=(x.shape[0] // CHUNK,),
            in_specs=[
                heads,
                chunk,
                chunk,
                plgpu.BlockSpec((2, CHUNK), lambda i: (0, i)),
            ],
            out_specs=heads,
            scratch_shapes=[plgpu.SMEM((2, 64, 64), F32)],
            num_threads=2,
            thread_name="wg",
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(dimension_semantics=("arbitrary",)),
        )(x, b, c, a)

    return lambda interpret: functools.partial(call, interpret)


SCANS = {mamba_chunk: mamba_step, delta_chunk: delta_step}


@pytest.mark.parametrize("body", SCANS, ids=lambda body: body.__name__)
def test_scans_of_two_heads_in_two_warpgroups(rng, body):
    x = numbers(rng, "bfloat16", 2 * CHUNK, 2, 64)
    b, c = (float64(numbers(rng, "bfloat16", 2 * CHUNK, 64)) for _ in range(2))
    b, c = (np.asarray(v / np.linalg.norm(v, axis=1)[:, None], BF16) for v in (b, c))
    logs = -0.05 * rng.random((2, 2, CHUNK))
    a = np.cumsum(logs, axis=-1).astype(np.float32).reshape(2, 2 * CHUNK)
    expected = np.zeros(x.shape)
    for head in range(2):
        state, decays = np.zeros((64, 64)), np.exp(logs[head].reshape(-1))
        for t, decay in enumerate(decays):
            of_t = float64(x)[t, head], float64(b)[t], float64(c)[t]
            state, expected[t, head] = SCANS[body](state, *of_t, decay)
    everywhere.check(scan(body), [x, b, c, a], expected, atol=0.06)


@pytest.mark.offline
@pytest.mark.sass
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("body", SCANS, ids=lambda body: body.__name__)
def test_scans_consist_of_wgmma_without_spills(body, semantics):
    shapes = [(4 * CHUNK, 2, 64), (4 * CHUNK, 64), (4 * CHUNK, 64)]
    args = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    args.append(jax.ShapeDtypeStruct((2, 4 * CHUNK), F32))
    function = scan(body)(None)
    wgmma, mma, spilled = instructions(function, *args, semantics=semantics)
    assert wgmma > 0 == mma == spilled
