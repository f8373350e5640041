# SPDX-License-Identifier: Apache-2.0
"""Random numbers in kernels: the same as outside."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random

import pallas_gpu as plgpu
from tests.support import everywhere
from tests.support.refusal import refused_by

SHAPE = (16, 128)
SEED = np.int32([1234])


def check(
    function: Callable, *, rtol: float = 0.0, atol: float = 0.0, args=(SEED,)
) -> None:
    """Compares a function of scalars and small arrays in a kernel and outside."""
    expected = np.asarray(jax.jit(function)(*(jnp.asarray(x) for x in args)))

    def body(*refs):
        *inputs, out = refs
        values = [ref[0] if len(ref.shape) == 1 else ref[...] for ref in inputs]
        out[...] = function(*([v] if v.shape == () else v for v in values))

    everywhere.run(body, list(args), expected, rtol=rtol, atol=atol)


DRAWS: dict[str, tuple[Callable, float]] = {
    "bits": (lambda key: random.bits(key, SHAPE), 0),
    "bits of 8": (lambda key: random.bits(key, SHAPE, "uint8"), 0),
    "bits of 16": (lambda key: random.bits(key, SHAPE, "uint16"), 0),
    "uniform": (lambda key: random.uniform(key, SHAPE), 0),
    "bfloat16": (lambda key: random.uniform(key, SHAPE, jnp.bfloat16), 0),
    "normal": (lambda key: random.normal(key, SHAPE), 3e-6),
    "bernoulli": (lambda key: random.bernoulli(key, 0.3, SHAPE), 0),
    "randint": (lambda key: random.randint(key, SHAPE, -5, 100), 0),
    "exponential": (lambda key: random.exponential(key, SHAPE), 1e-5),
    "gumbel": (lambda key: random.gumbel(key, SHAPE), 1e-5),
    "one of many": (lambda key: random.bits(random.split(key, 8)[5], SHAPE), 0),
    "words of a key": (lambda key: random.key_data(random.split(key, 4)), 0),
    "rademacher": (lambda key: random.rademacher(key, SHAPE), 0),
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_those_outside(name: str):
    draw, rtol = DRAWS[name]
    check(lambda seed: draw(random.key(seed[0])), rtol=rtol, atol=rtol / 10)


def test_a_seed_may_be_a_constant():
    check(lambda seed: random.bits(random.key(7), SHAPE))
    check(lambda seed: random.bits(random.key(-7), SHAPE))


def test_keys_are_split_and_folded():
    def function(seed):
        first, second, third = random.split(random.key(seed[0]), 3)
        folded = random.fold_in(second, seed[0])
        total = random.bits(first, SHAPE) ^ random.bits(folded, SHAPE)
        return total ^ random.bits(random.clone(third), SHAPE)

    check(function)


def test_keys_of_old_style():
    def function(seed):
        key = random.PRNGKey(seed[0])
        keys = random.split(key, 3)
        return random.bits(random.fold_in(keys[1], 3), SHAPE)

    check(function)


def test_a_loop_carries_a_key():
    def function(seed):
        def step(i, state):
            key, total = state
            key, one = random.split(key)
            return key, total ^ random.bits(one, SHAPE)

        start = (random.key(seed[0]), jnp.zeros(SHAPE, jnp.uint32))
        return lax.fori_loop(0, 3, step, start)[1]

    check(function)


def test_a_while_loop_and_a_branch_carry_a_key():
    def function(seed):
        def step(state):
            key, i = state
            key = lax.cond(i > 1, lambda: random.fold_in(key, i), lambda: key)
            return key, i + 1

        start = (random.key(seed[0]), jnp.int32(0))
        key, _ = lax.while_loop(lambda state: state[1] < 4, step, start)
        return random.bits(key, SHAPE)

    check(function)


def test_keys_are_mapped_over():
    def function(seed):
        keys = random.split(random.key(seed[0]), 16)
        return jax.vmap(lambda key: random.bits(key, (128,)))(keys)

    check(function)


def test_a_key_is_an_argument_as_its_words():
    words = np.asarray(random.key_data(random.key(99)))[None]

    expected = np.asarray(random.bits(random.key(99), SHAPE))

    def body(words_ref, out_ref):
        out_ref[...] = random.bits(random.wrap_key_data(words_ref[0]), SHAPE)

    everywhere.run(body, [words], expected)


def constant(seed, impl=None):
    """A key that a body closes over: the trace does not make it."""
    with jax.ensure_compile_time_eval():
        return random.key(seed, impl=impl)


def keys():
    with jax.ensure_compile_time_eval():
        return random.split(random.key(99), 3)


def drawn(key):
    """A kernel whose body closes over a key."""

    def body(out_ref):
        out_ref[...] = random.bits(key, SHAPE)

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(SHAPE, jnp.uint32))()


def test_a_body_closes_over_keys():
    def function():
        return random.bits(keys()[1], SHAPE) ^ random.bits(constant(7), SHAPE)

    def body(out_ref):
        out_ref[...] = function()

    everywhere.run(body, [], np.asarray(function()))


def test_a_function_in_a_body_closes_over_keys():
    outer = keys()

    def function(i):
        one = jax.jit(lambda i: random.bits(outer[i], SHAPE))(i)
        return one ^ random.randint(outer[0], SHAPE, 0, 9).astype(jnp.uint32)

    def body(i_ref, out_ref):
        out_ref[...] = function(i_ref[0])

    everywhere.run(body, [np.int32([2])], np.asarray(function(2)))


@pytest.mark.parametrize("around", [jax.jit, jax.vmap, lambda f: jax.jit(jax.vmap(f))])
def test_a_body_closes_over_a_traced_key(around):
    given = keys() if around is not jax.jit else keys()[0]
    expected = jax.jit(lambda k: random.bits(k, SHAPE))
    if given.shape:
        expected = jax.vmap(expected)
    np.testing.assert_array_equal(around(drawn)(given), expected(given))


def test_dropout_masks_what_it_masks_outside():
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)

    def function(seed, x):
        kept = random.bernoulli(random.key(seed[0]), 0.9, x.shape)
        return jnp.where(kept, x / 0.9, 0.0)

    check(function, args=(SEED, x), rtol=1e-6)


def test_a_key_in_a_scope():
    def body(seed_ref, out_ref):
        key = random.key(seed_ref[0])

        def scoped(scratch):
            scratch[...] = random.bits(key, SHAPE)
            return random.fold_in(key, 1)

        inner = plgpu.run_scoped(scoped, plgpu.SMEM(SHAPE, jnp.uint32))
        out_ref[...] = random.bits(inner, SHAPE)

    key = random.fold_in(random.key(SEED[0]), 1)
    everywhere.run(body, [SEED], np.asarray(random.bits(key, SHAPE)))


@refused_by(everywhere.emulate, [SEED], jax.ShapeDtypeStruct(SHAPE, jnp.uint32))
def test_another_generator(seed_ref, out_ref):
    key = random.key(seed_ref[0], impl="rbg")  # HERE
    out_ref[...] = random.bits(key, SHAPE)


@refused_by(everywhere.emulate, [], jax.ShapeDtypeStruct(SHAPE, jnp.uint32))
def test_a_captured_key_of_another_generator(out_ref):
    out_ref[...] = random.bits(constant(0, "rbg"), SHAPE)
