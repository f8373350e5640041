# SPDX-License-Identifier: Apache-2.0
"""Values without elements are made by JAX's code, and mean what they mean in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.entry_kernels import f32, numbers


def check(function, x, **options):
    """Compares a kernel that applies `function` to an array with JAX."""
    expected = np.asarray(function(jnp.asarray(x)))
    everywhere.run(lambda x, o: o.set(function(x[...])), [x], expected, **options)


@pytest.mark.parametrize(
    ("n", "reverse"), [(1, False), (2, True), (5, False), (8, True), (13, False)]
)
@pytest.mark.parametrize("axis", [0, 1])
def test_an_associative_scan_is_that_of_jax(n, axis, reverse):
    shape = (n, 32) if axis == 0 else (16, n)
    x = numbers(*shape)

    def scan(x):
        return lax.associative_scan(jnp.add, x, axis=axis, reverse=reverse)

    check(scan, x)


def linear(a, b):
    return a[0] * b[0], a[1] * b[0] + b[1]


def test_an_associative_scan_of_pairs_is_that_of_jax():
    def recurrence(x):
        decay = jnp.where(x > 2, 0.5, 2.0).astype(x.dtype)
        return lax.associative_scan(linear, (decay, x), axis=1)[1]

    check(recurrence, numbers(4, 9) % 5)


@jax.custom_jvp
def beside_nothing(x, nothing):
    return x + 1, nothing


beside_nothing.defjvp(lambda x, dx: (beside_nothing(*x), dx))


def through_a_loop(x):
    def step(i, state):
        total, nothing = state
        return total + x * i + nothing.sum(), jnp.concatenate([nothing, nothing])

    return lax.fori_loop(0, 3, step, (jnp.zeros_like(x), x[:0]))[0]


def through_a_while(x):
    def goes_on(state):
        return state[0] + state[1].shape[0] < 3

    def step(state):
        i, nothing, total = state
        return i + 1, nothing, total + x

    return lax.while_loop(goes_on, step, (jnp.int32(0), x[:, :0], x))[2]


def through_a_scan(x):
    def step(total, nothing):
        return total + x + nothing.sum(), None

    return lax.scan(step, x, jnp.zeros((3, 0)))[0]


def through_a_branch(x):
    def double(x, nothing):
        return jnp.concatenate([2 * x, nothing]), nothing

    def same(x, nothing):
        return x, nothing

    large = jnp.max(x) > 3
    y, nothing = lax.cond(large, double, same, x, x[:0])
    return jnp.concatenate([nothing, y])


def through_jit(x):
    nothing, y = jax.jit(lambda x, nothing: (nothing, x + nothing.sum()))(x, x[:0])
    return jnp.concatenate([nothing, y, nothing])


def through_custom_jvp(x):
    y, nothing = beside_nothing(x, x[:0])
    return y + nothing.sum()


OPERATIONS = {
    "concatenate": lambda x: jnp.concatenate([x[:0], x, x[5:5]]),
    "concatenate of two parts": lambda x: jnp.concatenate([x, x[:0], x[:2]]),
    "pad": lambda x: jnp.pad(x[:, :0], ((0, 0), (3, 5)), constant_values=7),
    "roll by nothing": lambda x: jnp.roll(x, 0, 1),
    "split": lambda x: jnp.split(x, [0, 4], axis=0)[2],
    "sum": lambda x: x + x[:0].sum(0),
    "max": lambda x: x + jnp.maximum(jnp.max(x[:0], 0, initial=-2), -5),
    "all": lambda x: jnp.where(jnp.all(x[:0] > 3, 0), x, 0),
    "any": lambda x: jnp.where(jnp.any(x[:0] > 3, 0), x, 0),
    "product": lambda x: x + x[:, :0] @ x[:0],
    "update of nothing": lambda x: x.at[2:2].set(1),
    "dynamic update": lambda x: lax.dynamic_update_slice(x, x[:0], (3, 0)),
    "update of everything": lambda x: x.at[:].set(x * 2),
    "update of everything, added": lambda x: x.at[...].add(x * 2),
    "take nothing": lambda x: jnp.concatenate(
        [jnp.take(x, jnp.zeros((0,), jnp.int32), axis=0), x]
    ),
    "sort": lambda x: jnp.concatenate([jnp.cumsum(x[:0], 0), x]),
    "loop": through_a_loop,
    "while": through_a_while,
    "scan": through_a_scan,
    "scan of no steps": lambda x: lax.scan(
        lambda total, part: (total + part, part), x, jnp.zeros((0, 8, 16))
    )[0],
    "branch": through_a_branch,
    "jit": through_jit,
    "custom_jvp": through_custom_jvp,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_lose_what_has_no_elements(name):
    check(OPERATIONS[name], numbers(8, 16))


X = numbers(8, 16)


@everywhere.gives([X], X)
def test_values_without_elements_in_a_scope_of_the_kernel(x, o):
    def scope(tile):
        tile[...] = jnp.concatenate([x[:4], x[...][:0], x[4:]])
        o[...] = tile[...]

    plgpu.run_scoped(scope, plgpu.SMEM((8, 16), jnp.float32))


def test_a_kernel_over_an_associative_scan_is_traced_once_for_both():
    """The emulator gets the body that the compiler gets."""

    def body(x, o):
        o[...] = lax.associative_scan(jnp.add, x[...])

    text = str(jax.make_jaxpr(plgpu.kernel(body, f32(2, 16)))(numbers(2, 16)))
    assert "f32[0" not in text


@everywhere.gives([X], 2 * X + 1, plgpu.SMEM((8, 16), jnp.float32))
def test_an_update_between_two_scopes_keeps_its_order(x, o, tile):
    """The trace without empty values has the effects of the first one, in order."""
    tile[...] = x[...]
    o[...] = jnp.concatenate([tile[...], x[...][:0]])
    tile[...] = tile[...] + 1
    o[...] += jnp.concatenate([tile[...][:0], tile[...]])


def write(x, o, nothing):
    nothing[...] = x[...][:0]


def show(x, o, nothing):
    plgpu.debug_print("{}", x[...][:0])


@pytest.mark.parametrize(("use", "what"), [(write, "a write"), (show, "debug_print")])
def test_what_has_no_elements_is_neither_stored_nor_printed(use, what):
    def body(x, o, nothing):
        use(x, o, nothing)
        o[...] = x[...]

    kernel = plgpu.kernel(body, (f32(8, 16), f32(0, 16)))
    with pytest.raises(errors.ShapeError, match=f"^{what} without") as caught:
        jax.make_jaxpr(kernel)(numbers(8, 16))
    assert f"({use.__name__})" in caught.value.where
