# SPDX-License-Identifier: Apache-2.0
"""`jax.Ref`s: in place, and captured."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.composition.row import VECTOR, XS, Refused, Row, Way, X


def twice(r: Any) -> None:
    r[...] = r[...] * 2


def argument(way: Way) -> None:
    ref = jax.new_ref(X)
    way.run(way.in_place(twice), ref)
    np.testing.assert_array_equal(ref[...], 2 * X)


def captured(way: Way) -> None:
    ref = jax.new_ref(X)

    def body(x, o):
        o[...] = ref[...] + x[...]
        ref[...] = x[...] * 4

    way.check(way.make(body), X, expected=2 * X)
    np.testing.assert_array_equal(ref[...], 4 * X)


def in_loops(way: Way) -> None:
    k = way.in_place(twice)

    def f(x):
        ref = jax.new_ref(x)
        lax.scan(lambda c, _: (c, k(ref))[:1] * 2, 0, length=2)
        lax.cond(ref[1] > 0, lambda: k(ref), lambda: ())
        return ref[...]

    way.check(f, X, expected=8 * X)


def run_state(way: Way) -> None:
    def f(ref):
        way.in_place(twice)(ref)

    way.check(plgpu.run_state(f), X, expected=2 * X)


def donated(way: Way) -> None:
    def f(x):
        ref = jax.new_ref(x)
        way.in_place(twice)(ref)
        return jax.freeze(ref)

    x = jax.numpy.array(X)
    if way.jit:
        lowered = jax.jit(f, donate_argnums=0).trace(x)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
        assert "tf.aliasing_output" in text and "operand_index = 0" in text
    way.check(f, x, expected=2 * X)


def aliased(way: Way) -> None:
    f = _aliased(way)
    way.check(f, X, expected=2 * X)
    text = jax.jit(f).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert "operand_index = 0" in text


def vmap_of_aliased(way: Way) -> None:
    way.check(jax.vmap(_aliased(way)), XS, expected=2 * XS)


def _aliased(way: Way) -> Any:
    make: Any = getattr(plgpu, way.entry)
    double = lambda x, o: o.set(x[...] * 2)  # noqa: E731
    return make(double, VECTOR, input_output_aliases={0: 0})


def shared_by_instances(way: Way) -> None:
    ref = jax.new_ref(X)
    k = way.make(lambda x, o: (o.set(x[...]), ref.__setitem__(..., x[...]))[0])
    way.run(jax.vmap(k), XS)


_BY_REF = {
    "kernel": Refused(
        TypeError,
        "unexpected keyword argument 'input_output_aliases'",
        "as upstream's, a `kernel` updates a `jax.Ref` argument in place",
    )
}

ROWS = (
    Row("a `jax.Ref` argument", argument),
    Row("a `jax.Ref` that the body closes over", captured),
    Row("a `jax.Ref` updated in `lax.scan` and `lax.cond`", in_loops),
    Row("`run_state` around kernels", run_state),
    Row("`input_output_aliases`", aliased, _BY_REF),
    Row("`vmap` of `input_output_aliases`", vmap_of_aliased, _BY_REF),
    Row("donation: argument, `jax.Ref` and result in one buffer", donated),
    Row(
        "`vmap` of a kernel that writes a `jax.Ref` it closes over",
        shared_by_instances,
        {
            "all": Refused(
                errors.UnsupportedError,
                "under jax.vmap all instances write the same jax.Ref",
                "the instances run at the same time",
            )
        },
    ),
)
