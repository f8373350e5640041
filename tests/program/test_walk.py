# SPDX-License-Identifier: Apache-2.0
"""The iterator over operations: order, identity, what inner inputs are outside."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_gpu.entry.trace import Arrays, trace_body
from pallas_gpu.program.build import region_of
from pallas_gpu.program.walk import uses, walk
from pallas_gpu.types import Mesh

F32 = jnp.float32


def sites(f, *args):
    return list(walk(jax.make_jaxpr(f)(*args)))


def names(found):
    return [site.op.name for site in found]


def only(found, name):
    return [site for site in found if site.op.name == name]


def test_an_operation_comes_before_those_that_it_runs_and_they_before_the_next():
    def f(x):
        y = lax.cond(x > 0, lambda: lax.fori_loop(0, 2, lambda i, y: jnp.sin(y), x),
                     lambda: jnp.cos(x))  # fmt: skip
        return jnp.exp(y)

    order = [
        n for n in names(sites(f, 1.0)) if n in ("cond", "scan", "sin", "cos", "exp")
    ]
    assert order == ["cond", "cos", "scan", "sin", "exp"]


def test_a_site_knows_what_encloses_it_calls_aside():
    def f(x):
        return jax.jit(lambda y: lax.fori_loop(0, 2, lambda i, z: jnp.sin(z), y))(x)

    (sin,) = only(sites(f, 1.0), "sin")
    assert names(sin.enclosing) == ["scan"]
    assert sin.is_inside(sin.enclosing[0].op.primitive)
    assert not sin.is_inside(lax.cond_p)


def test_two_calls_of_a_function_have_the_same_equations():
    inner = jax.jit(jnp.sin)
    first, second = only(sites(lambda x: inner(inner(x)), 1.0), "sin")
    assert first.eqn is second.eqn
    assert first.op is not second.op


def test_a_walk_is_kept_as_long_as_its_jaxpr():
    loop = lambda x: lax.fori_loop(0, 2, lambda _, y: y * 2, x)  # noqa: E731
    jaxpr = jax.make_jaxpr(loop)(1.0).jaxpr
    assert walk(jaxpr)[0] is walk(jaxpr)[0]
    kept = weakref.ref(jaxpr)
    del loop, jaxpr
    gc.collect()
    assert kept() is None


def test_the_primitives_of_inner_regions_are_used():
    jaxpr = jax.make_jaxpr(lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x))(1.0)
    assert uses(jaxpr, lax.exp_p, lax.sin_p)
    assert not uses(jaxpr, lax.exp_p)


@jax.custom_jvp
def _square(x):
    return x * jnp.sin(x)


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
        _square,
    ],
    ids=[
        *("call", "branch", "closure", "while", "condition"),
        *("for", "scan", "remat", "derivative"),
    ],
)
def test_an_inner_input_is_the_operand_outside(call):
    jaxpr = jax.make_jaxpr(call)(jnp.zeros(()))
    found = only(walk(jaxpr), "sin")
    assert found
    for site in found:
        assert site.origin(site.op.inputs[0]) is region_of(jaxpr).inputs[0]


def test_what_a_scan_slices_is_made_by_it():
    f = lambda x: lax.scan(lambda c, y: (c + y, c), 0.0, x)  # noqa: E731
    (scan,) = only(sites(f, jnp.zeros(3)), "scan")
    assert scan.op.made == scan.op.regions[0].inputs[1:]


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
    jaxpr = trace_body(body, Arrays.of([aval], [aval]), Mesh(), "k")[0].jaxpr
    gets = only(walk(jaxpr), "get")
    assert len(gets) == 2
    argument = region_of(jaxpr).inputs[0]
    assert all(get.origin(get.op.accesses[0].buffer) is argument for get in gets)


def test_an_operation_without_a_line_has_that_of_the_call_around_it():
    def f(x):
        return jnp.clip(x, 0, 1)

    found = sites(f, jnp.zeros(3))
    assert found
    assert all("test_walk.py" in site.where for site in found)
