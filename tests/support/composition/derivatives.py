# SPDX-License-Identifier: Apache-2.0
"""Derivatives: of kernels with a rule, of kernels without, and in bodies."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pallas_gpu import errors
from tests.support.composition.row import XS, Refused, Row, Way, X


def square(x: Any, o: Any) -> None:
    o[...] = x[...] * x[...]


def square_backward(x: Any, g: Any, o: Any) -> None:
    o[...] = 2 * x[...] * g[...]


def by_vjp(way: Way) -> Any:
    k, backward = way.make(square), way.make(square_backward)
    f = jax.custom_vjp(k)
    f.defvjp(lambda x: (k(x), x), lambda x, g: (backward(x, g),))
    return f


def by_jvp(way: Way) -> Any:
    k = way.make(square)
    f = jax.custom_jvp(k)

    @f.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return f(x), 2 * x * t

    return f


def grad_vjp(way: Way) -> None:
    f = by_vjp(way)
    way.check(jax.grad(lambda x: f(x).sum()), X, expected=2 * X)


def grad_of_vmap(way: Way) -> None:
    f = jax.vmap(by_vjp(way))
    way.check(jax.grad(lambda xs: f(xs).sum()), XS, expected=2 * XS)


def vmap_of_grad(way: Way) -> None:
    f = by_vjp(way)
    way.check(jax.vmap(jax.grad(lambda x: f(x).sum())), XS, expected=2 * XS)


def grad_jvp(way: Way) -> None:
    f = by_jvp(way)
    way.check(jax.grad(lambda x: f(x).sum()), X, expected=2 * X)


def jvp(way: Way) -> None:
    f = by_jvp(way)
    way.check(lambda x: jax.jvp(f, (x,), (x,)), X, expected=(X * X, 2 * X * X))


def hessian(way: Way) -> None:
    """The rule is plain JAX, so that it has derivatives."""
    f, x = by_jvp(way), X[:8]
    padded = lambda v: f(np.zeros_like(X) + 0 * v.sum() + _pad(v)).sum()  # noqa: E731
    way.check(jax.hessian(padded), x, expected=2 * np.eye(8, dtype=np.float32))


def _pad(v: Any) -> Any:
    return jax.numpy.concatenate([v, jax.numpy.zeros(len(X) - len(v), v.dtype)])


def checkpoint(way: Way) -> None:
    f = jax.checkpoint(by_vjp(way))
    way.check(jax.grad(lambda x: f(f(x)).sum()), X[:], expected=4 * X**3)


def without_a_rule(way: Way) -> None:
    k = way.make()
    way.run(jax.grad(lambda x: k(x).sum()), X)


def reverse_of_vjp_forward(way: Way) -> None:
    way.run(lambda x: jax.jvp(by_vjp(way), (x,), (x,)), X)


def in_a_body(way: Way) -> None:
    def body(x, o):
        o[...] = jax.grad(lambda v: (v * v).sum())(x[...])

    way.check(way.make(body), X, expected=2 * X)


def rules_in_a_body(way: Way) -> None:
    @jax.custom_vjp
    def f(v):
        return v * v

    f.defvjp(lambda v: (f(v), v), lambda v, g: (5 * v * g,))

    def body(x, o):
        o[...] = jax.grad(lambda v: f(v).sum())(x[...])

    way.check(way.make(body), X, expected=5 * X)


ROWS = (
    Row("`grad` through `custom_vjp`, backward pass a kernel", grad_vjp),
    Row("`grad` of `vmap` through `custom_vjp`", grad_of_vmap),
    Row("`vmap` of `grad` through `custom_vjp`", vmap_of_grad),
    Row("`grad` through `custom_jvp`", grad_jvp),
    Row("`jvp` through `custom_jvp`", jvp),
    Row("`hessian` through `custom_jvp`", hessian),
    Row("`checkpoint` of a kernel with a rule", checkpoint),
    Row(
        "`grad` without a rule",
        without_a_rule,
        {
            "all": Refused(
                errors.DifferentiationError,
                "a kernel has no derivative",
                "a kernel stores to memory in any order: its author knows the "
                "backward pass, which is a kernel of its own (see below)",
            )
        },
    ),
    Row(
        "`jvp` through `custom_vjp`",
        reverse_of_vjp_forward,
        {
            "all": Refused(
                TypeError,
                "can't apply forward-mode autodiff (jvp) to a custom_vjp",
                "JAX: a `custom_vjp` has reverse mode only; use `custom_jvp`",
            )
        },
    ),
    Row("`grad` of array code in a body", in_a_body),
    Row("`custom_vjp` in a body", rules_in_a_body),
)
