# SPDX-License-Identifier: Apache-2.0
"""Modules in which one field of tcgen05's descriptors is wrong: each is found out.

The machine reports the field, or the product is another one.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir

from pallas_gpu.errors import PtxError
from pallas_gpu.lockstep.not_modelled import NotModelled
from tests.support.lockstep import faults
from tests.support.operand_copies import Copied
from tests.support.scaled_pairs import ScaledPair
from tests.support.scaled_products import E2M1, ScaledProduct
from tests.support.semantics import BOTH, under
from tests.support.sparse_products import SparseProduct
from tests.support.tensor_pairs import PairProduct
from tests.support.tensor_products import F32, Product

I8, I32 = jnp.int8, jnp.int32

# Operands of the emitted assembly.
A, B, INSTRUCTION = 1, 2, 3
# And of that of copies.
SOURCE = 1
# Two atoms along K and along N, so that every offset counts.
CASE = Product(n=64, k=64, swizzle=64)


def constant_of(value):
    """The operation of the constant in an operand, or in its descriptor."""
    owner = value.owner
    if owner.name == "arith.constant":
        return owner
    assert owner.name == "arith.ori"
    return owner.operands[1].owner


def flip(position, bits, opcode="tcgen05.mma"):
    """A constant of the product, or of the first copy, has some bits inverted."""

    def fault(module):
        op, *_ = [
            op
            for op in faults._operations(module, "llvm.inline_asm")
            if opcode in ir.StringAttr(op.attributes["asm_string"]).value
        ]
        old = constant_of(op.operands[position])
        attribute = old.attributes["value"]
        width = ir.IntegerType(attribute.type).width
        value = (ir.IntegerAttr(attribute).value ^ bits) & (1 << width) - 1
        value -= (1 << width) * (value >> width - 1)
        made = ir.Operation.create(
            "arith.constant",
            results=[old.results[0].type],
            attributes={"value": ir.IntegerAttr.get(attribute.type, value)},
            ip=ir.InsertionPoint(old),
        )
        user = op.operands[position].owner
        if user.name == "arith.ori":
            user.operands[1] = made.results[0]
        else:
            op.operands[position] = made.results[0]

    return fault


@functools.cache
def prepared(case):
    """What runs the kernel of a case with a fault, and the right result."""
    operands = case.operands()
    kernel = under(BOTH[0], case.make())
    return faults.prepared(kernel, operands), case.expected(*operands)


def is_right(case, fault=None):
    run, expected = prepared(case)
    return bool((run(fault) == expected).all())


def is_found(fault, case=CASE):
    """Whether the machine reports the fault, or the result shows it."""
    try:
        return not is_right(case, fault)
    except (PtxError, NotModelled):
        return True


def test_without_a_fault_the_product_is_right():
    assert is_right(CASE)


INSTRUCTION_FIELDS = {
    "sparsity selector": 1 << 0,
    "upper half of the sparsity selector": 1 << 1,
    "sparse": 1 << 2,
    "saturate": 1 << 3,
    "type of D": 1 << 4,
    "D of integers": 3 << 4,
    "a reserved bit": 1 << 6,
    "type of A": 1 << 7,
    "type of B": 1 << 10,
    "negate A": 1 << 13,
    "negate B": 1 << 14,
    "transpose A": 1 << 15,
    "transpose B": 1 << 16,
    "half of N": 12 << 17,
    "twice N": 24 << 17,
    "another reserved bit": 1 << 23,
    "half of M": 12 << 24,
    "twice M": 24 << 24,
    "a reserved bit behind M": 1 << 29,
    "shift of B, which is of .ws": 1 << 30,
    "upper half of the shift of B": 1 << 31,
}


@pytest.mark.parametrize("bits", INSTRUCTION_FIELDS.values(), ids=INSTRUCTION_FIELDS)
def test_fields_of_the_instruction_descriptor(bits):
    assert is_found(flip(INSTRUCTION, bits))


# The other forms of the descriptor, each bit of which is inverted.
FORMS = {
    "i8": Product(a=I8, b=I8, acc=I32, b_stored=True, k=64, n=32, swizzle=64),
    "mxf8": ScaledProduct(n=16, k=256),
    "mxf4": ScaledProduct(n=16, k=128, a=E2M1, b=E2M1, swizzle=64),
    "sparse": SparseProduct(n=16, k=128),
    "sparse tf32": SparseProduct(a=F32, b=F32, n=16, k=64),
    "sparse, 64 rows": SparseProduct(m=64, n=16),
    "a pair": PairProduct(n=32, k=32, swizzle=64, tracked=False),
    "a pair of 64 rows, mxf8": ScaledPair(ScaledProduct(n=64), 64),
}


@pytest.mark.parametrize("case", FORMS.values(), ids=FORMS)
def test_each_bit_of_other_forms_of_the_instruction_descriptor(case):
    assert is_right(case)
    found = [is_found(flip(INSTRUCTION, 1 << bit), case) for bit in range(32)]
    assert found == [True] * 32


SMEM_FIELDS = {
    "start address": 1 << 0,
    "stride dimension byte offset": 1 << 37,
    "version": 1 << 46,
    "base offset": 1 << 49,
    "leading dimension mode": 1 << 52,
    "no swizzle": 4 << 61,
    "128-byte swizzle": 6 << 61,
    "32-byte swizzle": 2 << 61,
    "an invalid swizzle": 1 << 61,
}


@pytest.mark.parametrize("operand", [A, B], ids=["a", "b"])
@pytest.mark.parametrize("bits", SMEM_FIELDS.values(), ids=SMEM_FIELDS)
def test_fields_of_shared_memory_descriptors(operand, bits):
    assert is_found(flip(operand, bits))


COPIES = {
    "a left operand": Copied(n=16, k=64, b_stored=True, swizzle=64),
    "scales": FORMS["mxf8"],
    "metadata": FORMS["sparse"],
}


@pytest.mark.parametrize("bits", SMEM_FIELDS.values(), ids=SMEM_FIELDS)
@pytest.mark.parametrize("case", COPIES.values(), ids=COPIES)
def test_fields_of_the_descriptors_of_copies(case, bits):
    assert is_found(flip(SOURCE, bits, "tcgen05.cp"), case)


def test_the_leading_dimension_byte_offset_of_an_operand_along_n():
    assert is_found(flip(B, 1 << 21))


def test_the_leading_dimension_byte_offset_of_an_operand_along_k_is_not_read():
    """PTX ISA, "Canonical layouts": with a swizzle it is taken as 1."""
    assert not is_found(flip(A, 1 << 21))


# --- addresses ------------------------------------------------------------------------

HALVES = Product(m=64, n=32, k=32, b_stored=True, swizzle=64)
IN_TMEM = Product(n=16, k=32, b_stored=True, swizzle=64, a_in_tmem=True)
ADDRESSES = {
    "the lane group of the right half": (HALVES, r"\$0, 1048576;", "$0, 16;"),
    "the column of the right half": (HALVES, r"\$0, 1048576;", "$0, 1048592;"),
    "columns of b of the right half": (
        HALVES,
        r"add\.u32 d, \$0, 1048576;\n(.*?)add\.u64 b, \$2, \d+;",
        r"add.u32 d, $0, 1048576;\n\1add.u64 b, $2, 0;",
    ),
    "the K step of a in TMEM": (IN_TMEM, r"add\.u32 a, \$1, 8;", "add.u32 a, $1, 0;"),
    "the K step of b": (IN_TMEM, r"add\.u64 b, \$2, 2;", "add.u64 b, $2, 4;"),
    "the second step overwrites": (CASE, r"\$3, rest;", "$3, first;"),
    "the first step accumulates": (CASE, r"\$3, first;", "$3, rest;"),
    "the kind": (CASE, "kind::f16", "kind::tf32"),
    "repetitions of a load": (CASE, r"16x256b\.x8", "16x256b.x4"),
    "the shape of a load": (CASE, r"16x256b\.x8", "32x32b.x32"),
    "lanes of a store": (IN_TMEM, r"st\.sync\.aligned\.32x32b", "st.16x256b"),
}


@pytest.mark.parametrize(("case", "pattern", "text"), ADDRESSES.values(), ids=ADDRESSES)
def test_addresses_and_shapes(case, pattern, text):
    assert is_right(case)
    assert is_found(faults.edit_text(pattern, text), case)


# --- 16 bits --------------------------------------------------------------------------

PACKED = {
    "pack::16b": (r"\.pack::16b", ""),
    "the columns of a part": (r"16x128b\.x\d+", "16x128b.x1"),
}


@pytest.mark.parametrize(("pattern", "text"), PACKED.values(), ids=PACKED)
def test_loads_of_16_bit_accumulators(pattern, text):
    case = Product(acc=np.float16, n=16, k=32, b_stored=True, swizzle=64)
    assert is_found(faults.edit_text(pattern, text), case)
