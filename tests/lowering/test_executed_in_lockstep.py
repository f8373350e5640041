# SPDX-License-Identifier: Apache-2.0
"""What `everywhere.check` sees of the emitted module on a CPU."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
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


BF16 = ml_dtypes.bfloat16
# Of an instruction the operands, as elements, and the result.
ON_REGISTERS = {
    "max.f32 $0, $1, $2;": (np.float32, [[1, np.nan]], [[2, 2]], [2, 2]),
    "fma.rn.f32 $0, $1, $1, $2;": (np.float32, [[3, 0.5]], [[1, 1]], [10, 1.25]),
    "sub.rn.bf16x2 $0, $1, $2;": (
        BF16,
        [[1, 2, 3, 4]],
        [[4, 4, 4, 4]],
        [-3, -2, -1, 0],
    ),
    "min.s32 $0, $1, $2;": (np.int32, [[-1, 5]], [[0, 3]], [-1, 3]),
    "min.u32 $0, $1, $2;": (np.uint32, [[2**32 - 1, 5]], [[0, 3]], [0, 3]),
    "mul.lo.u32 $0, $1, $2;": (np.uint32, [[2**31, 3]], [[2, 7]], [0, 21]),
    "brev.b32 $0, $1;": (np.uint32, [[1, 3]], [], [2**31, 3 * 2**30]),
    "clz.b32 $0, $1;": (np.uint32, [[1, 0]], [], [31, 32]),
    "not.b32 $0, $1;": (np.uint32, [[0, 1]], [], [2**32 - 1, 2**32 - 2]),
}


@pytest.mark.parametrize("text", ON_REGISTERS)
def test_an_instruction_on_registers_is_that_of_the_isa(text):
    dtype, *operands, expected = ON_REGISTERS[text]
    rows = [
        np.array(x, dtype).reshape(-1).view(np.uint32)
        for rest in operands
        for x in rest
    ]
    got = assembly.register_instruction(text)(*rows)
    np.testing.assert_array_equal(got.view(dtype), np.array(expected, dtype))


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
