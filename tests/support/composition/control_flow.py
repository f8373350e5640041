# SPDX-License-Identifier: Apache-2.0
"""Kernels in JAX's control flow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.support.composition.row import XS, Row, Way, X


def scan(way: Way) -> None:
    k = way.make()
    f = lambda x: lax.scan(lambda c, _: (k(c), c), x, length=2)  # noqa: E731
    way.check(f, X, expected=(4 * X, jnp.stack([X, 2 * X])))


def scan_over_slices(way: Way) -> None:
    k = way.make()
    f = lambda xs: lax.scan(lambda c, x: (c, k(x)), 0, xs)[1]  # noqa: E731
    way.check(f, XS, expected=2 * XS)


def grad_of_scan(way: Way) -> None:
    k = way.make()
    rule = jax.custom_vjp(k)
    rule.defvjp(lambda x: (k(x), None), lambda _, g: (k(g),))
    f = lambda x: lax.scan(lambda c, _: (rule(c), None), x, length=3)[0].sum()  # noqa: E731
    way.check(jax.grad(f), X, expected=jnp.full_like(X, 8))


def while_loop(way: Way) -> None:
    k = way.make()

    def f(x):
        return lax.while_loop(lambda c: c[1] < 100, k, x)

    way.check(f, X, expected=128 * X)


def fori_loop(way: Way) -> None:
    k = way.make()
    f = lambda x, n: lax.fori_loop(0, n, lambda _, c: k(c), x)  # noqa: E731
    way.check(f, X, 3, expected=8 * X)


def cond(way: Way) -> None:
    k = way.make()
    f = lambda x, taken: lax.cond(taken, k, lambda x: x, x)  # noqa: E731
    way.check(f, X, True, expected=2 * X)
    way.check(f, X, False, expected=X)


def switch(way: Way) -> None:
    branches = [way.make(lambda x, o, n=n: o.set(x[...] * n)) for n in range(3)]
    f = lambda x, which: lax.switch(which, branches, x)  # noqa: E731
    way.check(f, X, 2, expected=2 * X)


def vmap_of_cond(way: Way) -> None:
    k = way.make()
    f = jax.vmap(lambda x: lax.cond(x[0] > 0, k, lambda x: x, x))
    way.check(f, XS, expected=jnp.stack([X, 2 * XS[1], 2 * XS[2]]))


def associative_scan(way: Way) -> None:
    k = jax.vmap(way.make(lambda x, y, o: o.set(x[...] + y[...])))
    f = lambda xs: lax.associative_scan(k, xs)  # noqa: E731
    way.check(f, XS, expected=jnp.cumsum(XS, 0))


ROWS = (
    Row("`lax.scan`", scan),
    Row("`lax.scan` over slices", scan_over_slices),
    Row("`grad` of `lax.scan`", grad_of_scan),
    Row("`lax.while_loop`", while_loop),
    Row("`lax.fori_loop`, its bound traced", fori_loop),
    Row("`lax.cond`", cond),
    Row("`lax.switch`", switch),
    Row("`vmap` of `lax.cond`", vmap_of_cond),
    Row("`lax.associative_scan`", associative_scan),
)
