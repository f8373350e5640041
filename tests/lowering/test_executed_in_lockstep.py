# SPDX-License-Identifier: Apache-2.0
"""What `everywhere.check` sees of the emitted module on a CPU."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxlib.mlir.dialects import arith, math

from pallas_gpu.emitters.elements import row as rows
from pallas_gpu.emitters.elements import table
from pallas_gpu.lockstep import assembly
from tests.support import everywhere

SHAPE = (64, 64)
X = np.random.default_rng(0).standard_normal(SHAPE, np.float32)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("row", "wrong", "body"),
    [
        ("sub", arith.addf, lambda x: x - 2 * x),
        ("exp", math.sin, jnp.exp),
    ],
)
def test_an_instruction_that_is_not_the_operations_is_found(
    monkeypatch, row, wrong, body
):
    make = everywhere.elementwise(body, jnp.float32, shape=SHAPE)
    everywhere.check(make, [X], body(X), rtol=1e-5, atol=1e-5)
    case = rows.Case(lambda dtype, *values: wrong(*values))
    monkeypatch.setitem(table.TABLE, row, rows.Row(row, floating=case))
    with pytest.raises(AssertionError, match="Mismatched elements"):
        everywhere.check(make, [X], body(X), rtol=1e-5, atol=1e-5)


def test_an_approximation_is_computed_from_its_text():
    x = np.array([3.0, 0.25], np.float32).view(np.uint32)
    text = "{}.approx.ftz.f32 $0, $1;"
    got = {
        name: assembly.register_instruction(text.format(name))(x)
        .view(np.float32)
        .tolist()
        for name in ("ex2", "lg2", "rcp", "rsqrt")
    }
    assert got["ex2"] == [8.0, np.float32(2**0.25)]
    assert got["lg2"] == [np.float32(np.log2(3)), -2.0]
    assert got["rcp"] == [np.float32(1 / 3), 4.0]
    assert got["rsqrt"] == [np.float32(3**-0.5), 2.0]


def test_a_flushing_instruction_takes_subnormals_for_zero():
    x = np.array([-1e-40], np.float32).view(np.uint32)
    flushed = assembly.register_instruction("rcp.approx.ftz.f32 $0, $1;")(x)
    assert flushed.view(np.float32)[0] == -np.inf
    kept = assembly.register_instruction("rsqrt.approx.f32 $0, $1;")(x & 0x7FFFFFFF)
    assert np.isfinite(kept.view(np.float32)[0])


@pytest.mark.parametrize("text", ["mad.lo.s32 $0, $1, $1;", "nop;", "ex2.approx.f32;"])
def test_other_text_is_not_computed(text):
    assert assembly.register_instruction(text) is None


def test_an_expression_without_a_layout_is_visited_once():
    """Its operands are shared: visits would double with each of the 64 steps."""

    def body(x_ref, o_ref):
        count = lax.broadcasted_iota(jnp.int32, (64, 128), 1)
        for _ in range(64):
            count = count * 3 + count
        o_ref[...] = x_ref[...] + count

    x = np.arange(64 * 128, dtype=np.int32).reshape(64, 128)
    # 4**64 is 0 in 32 bits.
    everywhere.run(body, [x], x)
