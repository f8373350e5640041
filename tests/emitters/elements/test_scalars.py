# SPDX-License-Identifier: Apache-2.0
"""What is known of an index before the kernel runs."""

import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu.emitters.elements.scalars import divisor, known
from pallas_gpu.emitters.module import make_context


def integer(bits):
    return ir.IntegerType.get_signless(bits)


@pytest.fixture
def unknown():
    """Makes scalars of which nothing is known, of some width."""
    with make_context(), ir.Location.unknown():
        module = ir.Module.create()
        block = module.body

        def make(bits=32):
            wide = arith.constant(integer(64), 1)
            return arith.trunci(integer(bits), wide)

        with ir.InsertionPoint(block):
            yield make


def constant(value, bits=32):
    return arith.constant(integer(bits), value)


@pytest.mark.parametrize("number", [0, 3, 64])
@pytest.mark.parametrize("cast", [arith.index_cast, arith.index_castui])
def test_a_number_is_known_and_divides_itself(cast, number, unknown):
    index = cast(ir.IndexType.get(), constant(number))
    for value in (number, constant(number), index):
        assert known(value) == number
        assert divisor(value) == number


def test_nothing_is_known_of_other_values(unknown):
    assert known(unknown()) is None
    assert divisor(unknown()) == 1


def test_products_and_sums_tell_what_divides_them(unknown):
    rows = arith.muli(unknown(), constant(64))
    assert divisor(rows) == 64
    assert divisor(arith.addi(rows, constant(24))) == 8
    assert divisor(arith.muli(rows, constant(3))) == 192


def test_a_constant_is_extended_with_its_sign_or_without(unknown):
    byte = constant(-56, bits=8)
    assert known(arith.extsi(integer(32), byte)) == -56
    assert known(arith.extui(integer(32), byte)) == 200


@pytest.mark.parametrize("extend", [arith.extsi, arith.extui])
def test_a_narrow_product_keeps_only_powers_of_two(extend, unknown):
    """11 * 24 is 8 in eight bits."""
    narrow = arith.muli(unknown(8), constant(24, bits=8))
    assert divisor(extend(integer(32), narrow)) == 8
