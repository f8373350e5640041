# SPDX-License-Identifier: Apache-2.0
"""Loops of JAX with products copy ahead by themselves, or say why they do not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import arch, offline, triton
from tests.support import everywhere

RNG = np.random.default_rng(0)
A = RNG.integers(-4, 4, size=(64, 320)).astype(jnp.bfloat16)
B = RNG.integers(-4, 4, size=(320, 128)).astype(jnp.bfloat16)
N = np.array([10], np.int32)
OUT = jax.ShapeDtypeStruct((64, 128), jnp.float32)
EXACT = A.astype(np.float32) @ B.astype(np.float32)


def zeros():
    return jnp.zeros(OUT.shape, OUT.dtype)


def part(a, b, first):
    k = plgpu.ds(first, 32)
    return jnp.dot(a[:, k], b[k, :], preferred_element_type=jnp.float32)


def fori(n, a, b):
    step = lambda i, acc: acc + part(a, b, i * 32)  # noqa: E731
    return lax.fori_loop(0, 10, step, zeros())


def fori_to_a_value(n, a, b):
    step = lambda i, acc: acc + part(a, b, (i - 2) * 32)  # noqa: E731
    return lax.fori_loop(2, n[0] + 2, step, zeros())


def scan_of_an_offset(n, a, b):
    def step(carry, _):
        at, acc = carry
        return (at + 32, acc + part(a, b, at)), None

    start = (plgpu.multiple_of(n[0] - 10, 32), zeros())
    (end, acc), _ = lax.scan(step, start, length=10)
    return acc + jnp.float32(end - 320)


def scan_over_offsets(n, a, b):
    step = lambda acc, at: (acc + part(a, b, at), None)  # noqa: E731
    return lax.scan(step, zeros(), 32 * jnp.arange(2, 12) - 64, reverse=True)[0]


def while_of_an_offset(n, a, b):
    def step(carry):
        at, acc = carry
        return at + 32, acc + part(a, b, at)

    end, acc = lax.while_loop(lambda carry: carry[0] < 300, step, (0, zeros()))
    return acc + jnp.float32(end - 320)


def loop(n, a, b, **options):
    @plgpu.loop(0, 10, init_carry=zeros(), **options)
    def acc(i, acc):
        return acc + part(a, b, i * 32)

    return acc


def kernel(loop, **options):
    def body(*refs):
        *ins, o = refs
        o[...] = loop(*ins)

    return everywhere.kernel(body, OUT, **options)


def traced(loop, *args, **options):
    """Slots of the ring of each load that is copied ahead, and notes of the others."""
    make = kernel(loop, **options)
    args = args or (N, A, B)
    (found,) = offline.kernels_called(make(None), args, arch.target("sm_90a"))
    rings = [v.aval for eqn in found.jaxpr.eqns if eqn.primitive.name == "run_scoped"
             for v in eqn.params["jaxpr"].invars
             if getattr(v.aval, "memory_space", None) is plgpu.SMEM]  # fmt: skip
    return [x.shape[0] for x in rings], [why for _, why in found.not_ahead]


def nested(n, a, b):
    def outer(i, acc):
        def inner(j, acc):
            return acc + part(a, b, (i * 5 + j) * 32)

        # Loads of its own, of which nothing is left.
        own = part(a, b, i * 32)
        return lax.fori_loop(0, n[0] // 2, inner, acc + own) - own

    return lax.fori_loop(0, n[0] // 5, outer, zeros())


def in_a_branch(n, a, b):
    return lax.cond(n[0] > 2, fori_to_a_value, lambda *_: zeros(), n, a, b)


def of_carries(n, a, b):
    def step(i, carry):
        half, odd, bits, key, acc = carry
        key, _ = jax.random.split(key)
        acc += 2 * half * part(a, b, i * 32)
        return half, ~odd, bits * jnp.uint8(3), key, acc

    start = (0.5, jnp.bool_(True), jnp.uint8(7), jax.random.key(0), zeros())
    _, odd, bits, _, acc = lax.fori_loop(0, 10, step, start)
    # 7 * 3^10 of 8 bits.
    return jnp.where(odd & (bits == 159), acc, 0.0)


LOOPS = [fori, fori_to_a_value, scan_of_an_offset, scan_over_offsets]
LOOPS += [while_of_an_offset, loop, of_carries]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_a_loop_with_products_copies_ahead(loop):
    assert traced(loop) == ([2, 2], [])
    everywhere.check(kernel(loop), [N, A, B], EXACT)


@pytest.mark.parametrize("loop", [nested, in_a_branch])
def test_loops_in_loops_and_in_branches(loop):
    everywhere.check(kernel(loop), [N, A, B], EXACT)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_a_loop_to_a_value_may_be_short(n):
    k = 32 * n
    expected = A.astype(np.float32)[:, :k] @ B.astype(np.float32)[:k]
    everywhere.check(kernel(fori_to_a_value), [np.array([n], np.int32), A, B], expected)


@pytest.mark.parametrize(
    ("params", "options", "slots"),
    [
        ({"num_stages": 1}, {}, []),
        ({"num_stages": 4}, {}, [4, 4]),
        ({"num_stages": 4}, {"num_stages": 2}, [2, 2]),
        ({}, {"num_stages": 1}, []),
        ({"num_stages": 99}, {}, [10, 10]),
    ],
)
def test_the_kernel_or_the_loop_says_how_many_stages(params, options, slots):
    both = traced(
        lambda *ins: loop(*ins, **options),
        compiler_params=plgpu.CompilerParams(**params),
    )
    assert both == (slots, [])


def test_stages_of_triton_are_those_of_the_compiler():
    assert triton.CompilerParams(num_stages=3).num_stages == 3
    assert triton.CompilerParams().num_stages is None


def linked(n, a, b):
    def step(_, carry):
        at, acc = carry
        return n[at] * 0 + at, acc + part(a, b, at * 32)

    return lax.fori_loop(0, 10, step, (0, zeros()))[1]


def of_two(n, a, b):
    step = lambda i, acc: acc + part(a, b, i * 32)  # noqa: E731
    return lax.fori_loop(0, 2, step, zeros())


def elementwise(n, a, b):
    step = lambda i, acc: acc + a[:, plgpu.ds(i * 32, 32)].sum()  # noqa: E731
    return lax.fori_loop(0, 10, step, zeros())


def partly(n, a, b):
    def step(i, acc):
        k = plgpu.ds(i * 32, 32)
        return acc + jnp.dot(a[:, :32], b[k, :], preferred_element_type=jnp.float32)

    return lax.fori_loop(0, 10, step, zeros())


def over_a_table(n, a, b):
    step = lambda acc, at: (acc + part(a, b, at * 32), None)  # noqa: E731
    return lax.scan(step, zeros(), jnp.arange(10) + n[0] - 10)[0]


def until_a_flag(n, a, b):
    def step(carry):
        i, acc, _ = carry
        return i + 1, acc + part(a, b, i * 32), i >= 9

    return lax.while_loop(lambda carry: ~carry[2], step, (0, zeros(), False))[1]


SLICED = "its loop slices or stacks arrays: let it carry, read and store parts"
ENDLESS = "its loop runs until something else than `index < bound` is false"
CARRIED = "its indices depend on the loop's carry"


@pytest.mark.parametrize(
    ("loop", "why"),
    [
        (linked, [CARRIED] * 2),
        (of_two, ["the loop has 2 iterations only"] * 2),
        (elementwise, []),
        (over_a_table, [SLICED] * 2),
        (until_a_flag, [ENDLESS] * 2),
        (partly, ["each iteration loads the same: load it before the loop"]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_loop_that_is_left_as_it_is_says_why(loop, why):
    slots, notes = traced(loop)
    assert not slots
    assert [*dict.fromkeys(why)] == [x for x in notes if "another load" not in x]


def test_arguments_of_a_function_may_be_one_reference():
    def body(a, b, changed, o):
        @jax.jit
        def of(x, y):
            def step(i, acc):
                tile = plgpu.ds((i + 1) % 10 * 32, 32)
                y[tile, :] = jnp.full((32, 128), 2, y.dtype)
                return acc + part(a, x, i * 32)

            return lax.fori_loop(0, 10, step, zeros())

        changed[...] = b[...]
        o[...] = of(changed, changed)

    twos = np.full_like(B, 2)
    seen = np.concatenate([B[:32], twos[32:]]).astype(np.float32)
    everywhere.run(body, [A, B], (twos, A.astype(np.float32) @ seen))


def nested_in_one_with_stages(n, a, b):
    @plgpu.loop(0, 2, init_carry=zeros(), num_stages=2)
    def acc(i, acc):
        inner = lambda j, acc: acc + part(a, b, (i * 5 + j) * 32)  # noqa: E731
        # Loads of its own, of which nothing is left.
        own = part(a, b, i * 32)
        return lax.fori_loop(0, 5, inner, acc + own) - own

    return acc


@pytest.mark.parametrize("loop", [nested, nested_in_one_with_stages])
def test_loops_in_loops_fit_into_smem_together(loop):
    def body(n, a, b, o, held):
        held[:8, :] = jnp.zeros((8, 128), held.dtype)
        o[...] = loop(n, a, b) + held[:8, :].sum()

    everywhere.run(body, [N, A, B], EXACT, plgpu.SMEM((760, 128), jnp.bfloat16))


def test_each_of_several_warpgroups_copies_for_itself():
    threads = {"num_threads": 2, "thread_name": "wg"}
    assert traced(fori, **threads) == ([2, 2], [])

    def body(n, a, b, o):
        o[lax.axis_index("wg")] = fori(n, a, b)

    out = jax.ShapeDtypeStruct((2, *OUT.shape), OUT.dtype)
    make = everywhere.kernel(body, out, **threads)
    everywhere.check(make, [N, A, B], np.stack([EXACT] * 2))


def test_buffers_that_leave_an_sm_fewer_blocks_are_not_allocated():
    def body(n, a, b, o, scratch):
        scratch[...] = jnp.zeros(scratch.shape)
        o[...] = fori(n, a, b)

    make = everywhere.kernel(body, OUT, plgpu.SMEM((420, 128), jnp.float32))
    (found,) = offline.kernels_called(make(None), (N, A, B), arch.target("sm_90a"))
    assert "fewer blocks" in found.not_ahead[0][1]


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        (lambda: jnp.broadcast_to(jnp.arange(1) + 1, (8,)), [1] * 8),
        (lambda: jnp.arange(3) * jnp.arange(3), [0, 1, 4]),
        (lambda: jnp.arange(0), []),
        (lambda: np.int32([3, 5, 7]), [3, 5, 7]),
    ],
)
def test_a_scan_takes_each_element_of_what_may_be_a_progression(offsets, expected):
    def taken(n, a, b):
        step = lambda acc, at: (acc + part(a, b, at * 32), None)  # noqa: E731
        return lax.scan(step, zeros(), offsets())[0]

    x, y = A.astype(np.float32), B.astype(np.float32)
    slices = [slice(at * 32, at * 32 + 32) for at in expected]
    exact = sum((x[:, k] @ y[k] for k in slices), np.zeros(OUT.shape, np.float32))
    everywhere.check(kernel(taken), [N, A, B], exact)
