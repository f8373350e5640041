# SPDX-License-Identifier: Apache-2.0
"""Which arithmetic of a program is left out, since it is known or computed already."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gpu.program.build import region_of

INT, ONES = np.int32, np.ones((4, 4), np.float32)


def names(body, dtype=np.int32, shape=()):
    x = jax.ShapeDtypeStruct(shape, dtype)
    region = region_of(jax.make_jaxpr(body)(x).jaxpr)
    return [op.name for op in region.ops]


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (lambda x: lax.add(lax.mul(x, INT(1)), INT(0)), []),
        (lambda x: lax.sub(lax.div(x, INT(1)), INT(0)), []),
        (lambda x: lax.sub(INT(0), x), ["sub"]),
        (lambda x: lax.div(INT(1), x), ["div"]),
        (lambda x: lax.mul(lax.rem(x, INT(4)), lax.rem(x, INT(4))), ["rem", "mul"]),
        (
            lambda x: lax.mul(lax.rem(x, INT(4)), lax.rem(x, INT(5))),
            ["rem", "rem", "mul"],
        ),
        # A chain is unused if its end is.
        (lambda x: (lax.max(lax.add(x, INT(3)), INT(2)), x)[1], []),
    ],
)
def test_integers_that_are_unused_repeated_or_trivial_are_left_out(body, kept):
    assert names(body) == kept


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (lambda x: lax.mul(lax.exp(x), lax.exp(x)), ["exp", "mul"]),
        (lambda x: lax.sub(x, jnp.zeros_like(x)) + jnp.zeros_like(x),
         ["broadcast_in_dim", "sub", "add"]),
        (lambda x: lax.add(lax.sub(x, ONES), lax.sub(x, ONES)), ["sub", "add"]),
        (lambda x: lax.add(lax.sub(x, ONES), lax.sub(x, 2 * ONES)),
         ["sub", "sub", "add"]),
        (lambda x: lax.add(jnp.sum(x, 0), jnp.sum(x, 1)),
         ["reduce_sum", "reduce_sum", "add"]),
        (lambda x: lax.exp(jax.lax.optimization_barrier(x))
         + lax.exp(jax.lax.optimization_barrier(x)),
         [*("optimization_barrier", "exp") * 2, "add"]),
        # What a program computes and does not use is checked as well.
        (lambda x: (lax.exp(x), x)[1], ["exp"]),
    ],
)  # fmt: skip
def test_arrays_that_are_computed_twice_are_computed_once(body, kept):
    assert names(body, np.float32, (4, 4)) == kept


def test_what_a_program_reads_twice_may_have_changed():
    def body(x):
        ref = jax.new_ref(x)
        return ref[...] + ref[...]

    assert names(body, np.float32).count("get") == 2


def test_zeros_of_two_signs_differ():
    def body(x):
        return lax.lt(x, np.float32(0.0)), lax.lt(x, np.float32(-0.0))

    assert names(body, np.float32) == ["lt", "lt"]


def test_an_index_of_constants_alone_stays_dynamic():
    # Its author promises at which tiles it starts; a static one is checked.
    assert names(lambda x: lax.add(x, lax.rem(INT(0), INT(2)))) == ["rem", "add"]


def test_floats_are_computed_as_they_are_written():
    one = np.float32(1)
    assert names(lambda x: lax.mul(x, one), np.float32) == ["mul"]
