# SPDX-License-Identifier: Apache-2.0
"""`jax.vmap` of kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.support.composition.row import VECTOR, XS, Row, Way, X


def one_axis(way: Way) -> None:
    way.check(jax.vmap(way.make()), XS, expected=2 * XS)


def other_axes(way: Way) -> None:
    f = jax.vmap(way.make(), in_axes=1, out_axes=1)
    way.check(f, XS.T, expected=2 * XS.T)


def nested(way: Way) -> None:
    f = jax.vmap(jax.vmap(way.make()))
    way.check(f, XS[None], expected=2 * XS[None])


def shared(way: Way) -> None:
    k = way.make(lambda x, y, o: o.set(x[...] + y[...]))
    way.check(jax.vmap(k, in_axes=(0, None)), XS, X, expected=XS + X)


def nested_shared(way: Way) -> None:
    k = way.make(lambda x, y, o: o.set(x[...] + y[...]))
    f = jax.vmap(jax.vmap(k, in_axes=(0, None)), in_axes=(None, 0))
    way.check(f, XS, XS, expected=XS[None] + XS[:, None])


def scalars(way: Way) -> None:
    """A scalar argument of each instance."""
    k = way.make(lambda x, s, o: o.set(x[...] * s[0]))
    f = jax.vmap(lambda s: k(X, s[None]))
    s = jnp.float32([2, 3])
    way.check(f, s, expected=s[:, None] * X)


def closures(way: Way) -> None:
    """A scalar of each instance that the body closes over."""

    def f(s):
        return way.make(lambda x, o: o.set(x[...] * s))(X)

    s = jnp.float32([2, 3])
    way.check(jax.vmap(f), s, expected=s[:, None] * X)


def aliases(way: Way) -> None:
    """A result that shares the memory of an argument."""

    def f(x):
        ref = jax.new_ref(x)
        way.in_place(lambda r: r.set(r[...] * 2))(ref)
        return jax.freeze(ref)

    way.check(jax.vmap(f), XS, expected=2 * XS)


def spmd_axis_name(way: Way) -> None:
    f = jax.vmap(way.make(), spmd_axis_name="d")
    way.check(f, XS, expected=2 * XS)


def axis_name(way: Way) -> None:
    def body(x, o):
        o[...] = x[...] + lax.axis_index("b").astype(jnp.float32)

    f = jax.vmap(way.make(body), axis_name="b")
    way.check(f, XS, expected=XS + jnp.arange(3)[:, None])


def nothing(way: Way) -> None:
    assert way.run(jax.vmap(way.make()), XS[:0]).shape == XS[:0].shape


def in_a_body(way: Way) -> None:
    def body(x, o):
        o[...] = jax.vmap(lambda row: row - row.max())(x[...])

    x = X.reshape(4, 32)
    k = way.make(body, jax.ShapeDtypeStruct(x.shape, VECTOR.dtype))
    way.check(k, x, expected=x - x.max(1, keepdims=True))


ROWS = (
    Row("`vmap`", one_axis),
    Row("`vmap(in_axes=1, out_axes=1)`", other_axes),
    Row("nested `vmap`", nested),
    Row("`vmap(in_axes=(0, None))`", shared),
    Row("nested `vmap` over different arguments", nested_shared),
    Row("`vmap` over scalar arguments", scalars),
    Row("`vmap` over scalars that the body closes over", closures),
    Row("`vmap` over `jax.Ref`s, updated in place", aliases),
    Row("`vmap(spmd_axis_name=...)`", spmd_axis_name),
    Row("`vmap(axis_name=...)`, `lax.axis_index` in the body", axis_name),
    Row("`vmap` over no instances", nothing, note="nothing is launched"),
    Row("`vmap` of array code in a body", in_a_body),
)
