# SPDX-License-Identifier: Apache-2.0
"""The iterator over equations: order, identity, what inner inputs are outside."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_gpu.entry.trace import trace_body
from pallas_gpu.types import Mesh
from pallas_gpu.walk import bodies, number_jaxprs, walk

F32 = jnp.float32


def sites(f, *args):
    return list(walk(jax.make_jaxpr(f)(*args).jaxpr))


def names(found):
    return [site.eqn.primitive.name for site in found]


def only(found, name):
    return [site for site in found if site.eqn.primitive.name == name]


def test_an_equation_comes_before_those_that_it_runs_and_they_before_the_next():
    def f(x):
        y = lax.cond(x > 0, lambda: lax.fori_loop(0, 2, lambda i, y: jnp.sin(y), x),
                     lambda: jnp.cos(x))  # fmt: skip
        return jnp.exp(y)

    order = [
        n for n in names(sites(f, 1.0)) if n in ("cond", "scan", "sin", "cos", "exp")
    ]
    assert order == ["cond", "cos", "scan", "sin", "exp"]


def test_a_site_knows_what_encloses_it():
    def f(x):
        return jax.jit(lambda y: lax.fori_loop(0, 2, lambda i, z: jnp.sin(z), y))(x)

    (sin,) = only(sites(f, 1.0), "sin")
    assert names(sin.enclosing) == ["jit", "scan"]
    assert sin.is_inside(sin.enclosing[0].eqn.primitive)
    assert not sin.is_inside(lax.cond_p)


def test_two_calls_of_a_function_have_the_same_places():
    inner = jax.jit(jnp.sin)
    first, second = only(sites(lambda x: inner(inner(x)), 1.0), "sin")
    assert first.place == second.place
    assert first.enclosing[0].place != second.enclosing[0].place


def test_equations_of_different_places_differ():
    def f(x):
        for _ in range(3):
            x = lax.fori_loop(0, 2, lambda i, y: jnp.sin(y), x)
        return x

    places = [site.place for site in sites(f, 1.0)]
    assert len(set(places)) == len(places)


def test_places_are_the_same_in_every_trace():
    def f(x):
        y = lax.cond(x > 0, lambda: jnp.sin(x), lambda: jnp.cos(x))
        return lax.while_loop(lambda z: z < 3, lambda z: z + y, x)

    first, second = (sites(lambda x: f(x), 1.0) for _ in range(2))
    assert [s.place for s in first] == [s.place for s in second]


def test_a_site_names_the_jaxprs_around_it_but_the_walked_one():
    jaxpr = jax.make_jaxpr(
        lambda x: lax.fori_loop(0, 2, lambda i, y: jnp.sin(y), jnp.cos(x))
    )(1.0).jaxpr
    (cos,), (sin,) = only(walk(jaxpr), "cos"), only(walk(jaxpr), "sin")
    (body,) = bodies(sin.enclosing[-1].eqn)
    assert cos.within == ()
    assert sin.within == (body.jaxpr,)


def test_a_walk_is_kept_as_long_as_its_jaxpr():
    loop = lambda x: lax.fori_loop(0, 2, lambda _, y: y * 2, x)  # noqa: E731
    jaxpr = jax.make_jaxpr(loop)(1.0).jaxpr
    assert walk(jaxpr)[0] is walk(jaxpr)[0]
    kept = weakref.ref(jaxpr)
    del loop, jaxpr
    gc.collect()
    assert kept() is None


@jax.custom_jvp
def _square(x):
    return x * x


_square.defjvp(lambda primals, tangents: (primals[0], tangents[0]))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: jax.jit(jnp.sin)(x),
        lambda x: lax.cond(x > 0, jnp.sin, jnp.sin, x),
        lambda x: lax.cond(x > 0, lambda: jnp.sin(x), lambda: x),
        lambda x: lax.while_loop(lambda y: y < 3, jnp.sin, x),
        lambda x: lax.while_loop(lambda y: jnp.sin(x) < 3, lambda y: y, 0.0),
        lambda x: lax.fori_loop(0, 2, lambda i, y: y + jnp.sin(x), 0.0),
        lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0],
        lambda x: jax.checkpoint(jnp.sin)(x),
    ],
    ids=["call", "branch", "closure", "while", "condition", "for", "scan", "remat"],
)
def test_an_inner_input_is_the_operand_outside(call):
    jaxpr = jax.make_jaxpr(call)(jnp.zeros(()))
    found = only(walk(jaxpr.jaxpr), "sin")
    assert found
    for site in found:
        assert site.enclosing
        assert site.origin(site.eqn.invars[0]) is jaxpr.jaxpr.invars[0]


def test_a_custom_derivative_is_a_call():
    jaxpr = jax.make_jaxpr(_square)(1.0)
    (mul,) = only(walk(jaxpr.jaxpr), "mul")
    assert mul.origin(mul.eqn.invars[0]) is jaxpr.jaxpr.invars[0]


def test_what_a_scan_slices_has_no_operand():
    f = lambda x: lax.scan(lambda c, y: (c + y, c), 0.0, x)  # noqa: E731
    (scan,) = only(sites(f, jnp.zeros(3)), "scan")
    (body,) = bodies(scan.eqn)
    assert [operand is None for operand in body.inputs] == [False, True]


def _read(ref):
    ref[...]
    return ref


@pytest.mark.parametrize(
    "carry",
    [
        lambda x: lax.fori_loop(0, 2, lambda i, r: _read(r), x),
        lambda x: lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, _read(c[1])), (0, x)
        )[1],
    ],
    ids=["for", "while"],
)
def test_a_reference_that_a_loop_has_carried_is_the_reference_before(carry):
    def body(x, o):
        o[...] = carry(x)[...]

    aval = jax.ShapeDtypeStruct((64, 64), F32)
    jaxpr = trace_body(body, [aval], [aval], Mesh(), "k").jaxpr
    gets = only(walk(jaxpr), "get")
    assert len(gets) == 2
    assert all(get.origin(get.eqn.invars[0]) is jaxpr.invars[0] for get in gets)


def test_an_equation_without_a_line_has_that_of_the_call_around_it():
    def f(x):
        return jnp.clip(x, 0, 1)

    found = sites(f, jnp.zeros(3))
    assert found
    assert all("test_walk.py" in site.where for site in found)


def test_the_numbers_of_jaxprs_are_those_of_the_places():
    def body(x):
        return lax.cond(
            x > 0,
            lambda y: lax.fori_loop(0, 2, lambda _, z: z + 1.0, y),
            lambda y: lax.fori_loop(0, 3, lambda _, z: z * 2.0, y),
            x,
        )

    jaxpr = jax.make_jaxpr(body)(1.0).jaxpr
    numbers = number_jaxprs(jaxpr)
    places = {site.place for site in walk(jaxpr)}
    assert places == {
        (number, i) for inner, number in numbers.items() for i in range(len(inner.eqns))
    }
