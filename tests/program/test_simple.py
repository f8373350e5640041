# SPDX-License-Identifier: Apache-2.0
"""Which arithmetic of indices a program has."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax

from pallas_gpu.program.build import region_of

INT = np.int32


def names(body, dtype=np.int32):
    x = jax.ShapeDtypeStruct((), dtype)
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
