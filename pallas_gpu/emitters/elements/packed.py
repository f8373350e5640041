# SPDX-License-Identifier: Apache-2.0
"""Elements of 2 and 4 bits: packed in memory, one byte each in registers.

The bits of a register's byte above the element are undefined: what loads, stores and
wraps does not touch them, and what depends on them extends first. A conversion of
elements that were just loaded starts from the packed words, where the bits of a whole
word become mantissas at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, math

from pallas_gpu.emitters.elements import arith, dtypes
from pallas_gpu.emitters.elements.arithmetic import resize_float

# On the operation that makes a register of unpacked elements.
_UNPACKED = "pallas_gpu.unpacked"
_WORD_BITS = 32


def memory_type(dtype: np.dtype, count: int) -> ir.Type:
    """The type of `count` elements in memory: a vector of bytes if they are packed."""
    return dtypes.vector_type(item_dtype(dtype), count // elements_per_item(dtype))


def elements_per_item(dtype: np.dtype) -> int:
    """The elements in an item of memory: a byte if packed, else an element."""
    return 8 // dtypes.stored_bits(dtype) if dtypes.is_packed(dtype) else 1


# --- packing and unpacking ------------------------------------------------------------


def unpack(raw: ir.Value, dtype: np.dtype) -> ir.Value:
    """The elements of a vector of bytes as they are in memory.

    PTX: a shift for each position in a byte, `prmt.b32` for every two bytes of them.
    """
    bits = dtypes.stored_bits(dtype)
    size = dtypes.length(raw) or 1
    if size == 2 and bits == 4:
        half = dtypes.extract(dtypes.bitcast(raw, dtypes.U16), 0)
        spread = _spread(resize_float("arith.extui", dtypes.U32, half), bits)[:1]
        return _marked(dtypes.bitcast(dtypes.pack(spread), dtypes.U8))
    if size % 4:
        items = [dtypes.extract(raw, i) for i in range(size)]
        return dtypes.pack(
            [_down(x, at, dtypes.U8) for x in items for at in range(0, 8, bits)]
        )
    words = dtypes.bitcast(raw, dtypes.U32)
    spread = [
        part
        for i in range(size // 4)
        for part in _spread(dtypes.extract(words, i), bits)
    ]
    return _marked(dtypes.bitcast(dtypes.pack(spread), dtypes.U8))


def _marked(unpacked: ir.Value) -> ir.Value:
    unpacked.owner.attributes[_UNPACKED] = ir.UnitAttr.get()
    return unpacked


def _spread(word: ir.Value, bits: int) -> list[ir.Value]:
    """The bytes of the elements of a word, as words."""
    at = [_down(word, shift, dtypes.U32) for shift in range(0, 8, bits)]
    if bits == 4:
        return [_prmt(at[0], at[1], selector) for selector in (0x5140, 0x7362)]
    result = []
    for byte in range(4):
        # Byte `byte` of each of the two words, in the lower half.
        pair = (4 + byte) << 4 | byte
        halves = [_prmt(at[i], at[i + 1], pair) for i in (0, 2)]
        result.append(_prmt(halves[0], halves[1], 0x5410))
    return result


def pack(value: ir.Value, dtype: np.dtype) -> ir.Value:
    """The bytes in memory of a vector of elements, which fill whole bytes."""
    bits = dtypes.stored_bits(dtype)
    count = dtypes.length(value) or 1
    per_byte = 8 // bits
    if count * bits % _WORD_BITS:
        items = [dtypes.extract(value, i) for i in range(count)]
        return dtypes.pack(
            [
                _joined(items[i : i + per_byte], bits, dtypes.U8)
                for i in range(0, count, per_byte)
            ]
        )
    words = dtypes.bitcast(value, dtypes.U32)
    spread = [dtypes.extract(words, i) for i in range(count // 4)]
    return dtypes.bitcast(
        dtypes.pack(
            [
                _gathered(spread[i : i + per_byte], bits)
                for i in range(0, len(spread), per_byte)
            ]
        ),
        dtypes.U8,
    )


def _gathered(words: Sequence[ir.Value], bits: int) -> ir.Value:
    """The packed word of the bytes of elements in several words."""
    if bits == 4:
        at = [_prmt(words[0], words[1], selector) for selector in (0x6420, 0x7531)]
    else:
        # Words have 4 bytes of one packed byte each; `at[k]` has the k-th of each.
        pairs = [
            [_prmt(words[i], words[i + 1], s) for s in (0x5140, 0x7362)] for i in (0, 2)
        ]
        at = [
            _prmt(pairs[0][half], pairs[1][half], selector)
            for half in (0, 1)
            for selector in (0x5410, 0x7632)
        ]
    return _joined(at, bits, dtypes.U32)


def _joined(items: Sequence[ir.Value], bits: int, dtype: np.dtype) -> ir.Value:
    """Elements of one byte or word each, one above the other."""
    ones = int.from_bytes(bytes([(1 << bits) - 1] * dtype.itemsize))
    mask = dtypes.constant(ones, dtype)
    result = None
    for i, item in enumerate(items):
        part = arith.andi(item, mask)
        if i:
            part = arith.shli(part, dtypes.constant(i * bits, dtype))
        result = part if result is None else arith.ori(result, part)
    assert result is not None
    return result


def _down(value: ir.Value, shift: int, dtype: np.dtype) -> ir.Value:
    return arith.shrui(value, dtypes.constant(shift, dtype)) if shift else value


def _prmt(low: ir.Value, high: ir.Value, selector: int) -> ir.Value:
    """PTX: `prmt.b32`: byte i of the result is that of nibble i of the selector."""
    i32 = ir.IntegerType.get_signless(32)
    chosen = dtypes.constant(selector, dtypes.U32)
    return llvm.call_intrinsic(i32, "llvm.nvvm.prmt", [low, high, chosen], [], [])


# --- integers -------------------------------------------------------------------------


def extended(
    value: ir.Value, dtype: np.dtype, *, signed: bool | None = None
) -> ir.Value:
    """The elements as integers of 8 bits.

    Args:
      value: elements of `dtype`, an integer of 2 or 4 bits.
      signed: repeat the sign's bit; if None, as the dtype says.
    """
    bits = dtypes.stored_bits(dtype)
    if signed is None:
        signed = dtypes.kind(dtype) == "signed"
    count = dtypes.length(value)
    if count is None or count % 4:
        return _extended(value, bits, signed, dtypes.U8)
    words = dtypes.bitcast(value, dtypes.U32)
    return dtypes.bitcast(_extended(words, bits, signed, dtypes.U32), dtypes.U8)


def _extended(value: ir.Value, bits: int, signed: bool, dtype: np.dtype) -> ir.Value:
    """Each byte of bytes or of words."""

    def every(byte: int) -> ir.Value:
        number = int.from_bytes(bytes([byte] * dtype.itemsize))
        return dtypes.constant(number, dtype, value)

    low = arith.andi(value, every((1 << bits) - 1))
    if not signed:
        return low
    # The sign's bit, times what repeats it in all bits above: no carry to other bytes.
    sign = arith.andi(value, every(1 << bits - 1))
    repeated = dtypes.constant((1 << 9 - bits) - 2, dtype, value)
    return arith.addi(low, arith.muli(sign, repeated))


# --- from packed words to floats ------------------------------------------------------

# The bits of a float whose last bit of the mantissa counts one: a small integer in
# these bits is added to the number. (2**7, 2**10 and 2**23.)
_ONES = {dtypes.BF16: 0x4300, dtypes.F16: 0x6400, dtypes.F32: 0x4B000000}


def converted(value: ir.Value, src: np.dtype, dst: np.dtype) -> ir.Value | None:
    """A conversion that starts from the packed words; None where there is none."""
    words = _packed_words(value)
    if not words or dtypes.stored_bits(src) != 4 or dst not in _ONES:
        return None
    emit = _to_single if dst == dtypes.F32 else _to_half
    signed = dtypes.kind(src) == "signed"
    # The elements of a register of two bytes are the first four of their word.
    each = min(dtypes.length(value) or 0, 8)
    return dtypes.pack([x for word in words for x in emit(word, signed, dst, each)])


def _packed_words(value: ir.Value) -> list[ir.Value] | None:
    """The words that `unpack` made a register of 4-bit elements from."""
    owner = value.owner
    if not isinstance(owner, (ir.Operation, ir.OpView)):
        return None
    if _UNPACKED not in owner.operation.attributes:
        return None
    spread = owner.operation.operands[0].owner.operation.operands
    # Two words of bytes are made from one, which is the first operand of both.
    return [made.owner.operation.operands[0] for made in list(spread)[::2]]


def _to_half(word: ir.Value, signed: bool, dst: np.dtype, count: int) -> list[ir.Value]:
    """The first elements of a word as bf16 or f16, two at a time.

    PTX: for each pair `prmt.b32`, `lop3.b32` and a packed subtraction.
    """
    shifted = _down(word, 4, dtypes.U32)
    # The sign's bit flipped is the number plus 8.
    flipped = 8 if signed else 0
    mask = dtypes.constant(0x000F000F, dtypes.U32)
    ones = dtypes.constant((_ONES[dst] ^ flipped) * 0x10001, dtypes.U32)
    offset = float(np.array(_ONES[dst], np.uint16).view(dst)) + flipped
    result = []
    for k in range(count // 2):
        # The even element in the lower half, the odd one in the upper.
        pair = _prmt(word, shifted, (4 + k) * 0x1100 | k * 0x11)
        bits = arith.xori(arith.andi(pair, mask), ones)
        raised = dtypes.bitcast(dtypes.splat(bits, 1), dst)
        exact = arith.subf(raised, dtypes.constant(offset, dst, raised))
        result += [dtypes.extract(exact, i) for i in range(2)]
    return result


def bytes_to_half(value: ir.Value, src: np.dtype, dst: np.dtype) -> ir.Value | None:
    """Integers of 8 bits as f16 or bf16; None where there are no pairs of them.

    PTX: for each pair `prmt.b32` and a packed subtraction; for f16 `xor.b32` for each
    word, for bf16 two `lop3.b32` for each pair, and of unsigned ones an addition.
    """
    count = dtypes.length(value)
    if count is None or count % 2:
        return None
    held, each = (dtypes.U16, 2) if count % 4 else (dtypes.U32, 4)
    words = dtypes.bitcast(value, held)
    signed = dtypes.kind(src) == "signed"
    # The sign's bit flipped is the number plus 128.
    flipped = 128 if signed and dst == dtypes.F16 else 0
    ones = dtypes.constant(_ONES[dst] >> 8, dtypes.U32)
    result = []
    for i in range(count // each):
        word = dtypes.extract(words, i)
        if held == dtypes.U16:
            word = arith.extui(ones.type, word)
        if flipped:
            word = arith.xori(word, dtypes.constant(flipped * 0x1010101, dtypes.U32))
        for selector in (0x4140, 0x4342)[: each // 2]:
            pair = _prmt(word, ones, selector)
            if dst == dtypes.F16:
                raised = dtypes.bitcast(dtypes.splat(pair, 1), dst)
                offset = dtypes.constant(float(1024 + flipped), dst, raised)
                exact = arith.subf(raised, offset)
            else:
                exact = _to_bfloat16(pair, signed)
            result += [dtypes.extract(exact, half) for half in range(2)]
    return dtypes.pack(result)


def _to_bfloat16(pair: ir.Value, signed: bool) -> ir.Value:
    """Two bytes as bf16: seven bits in a mantissa of 128, the upper one in another."""
    low, high = (
        dtypes.bitcast(
            dtypes.splat(arith.andi(pair, dtypes.constant(mask, dtypes.U32)), 1),
            dtypes.BF16,
        )
        for mask in (0xFF7FFF7F, 0xFF80FF80)
    )
    # 128 plus the lower seven bits, and 128 or, if the upper bit is set, 256.
    if signed:
        return arith.subf(low, high)
    return arith.addf(arith.subf(low, dtypes.constant(256.0, dtypes.BF16, low)), high)


def _to_single(
    word: ir.Value, signed: bool, dst: np.dtype, count: int
) -> list[ir.Value]:
    """The first elements of a word as f32. PTX: `lop3.b32`, `fma.rn.f32` for each."""
    result = []
    for i in range(count):
        # The mantissa contains the first five elements where they are.
        place = i if i < 5 else i - 5
        source = word if i < 5 else _down(word, 20, dtypes.U32)
        flipped = 8 << 4 * place if signed else 0
        kept = arith.andi(source, dtypes.constant(15 << 4 * place, dtypes.U32))
        raised = arith.xori(kept, dtypes.constant(_ONES[dst] ^ flipped, dtypes.U32))
        number = dtypes.bitcast(raised, dst)
        scale = 2.0 ** (-4 * place)
        offset = -(2.0**23 + flipped) * scale
        result.append(
            math.fma(number, dtypes.constant(scale, dst), dtypes.constant(offset, dst))
        )
    return result


# --- memory ---------------------------------------------------------------------------


def item_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of an item of memory: a byte of packed elements, else an element."""
    return dtypes.U8 if dtypes.is_packed(dtype) else dtypes.memory_dtype(dtype)


def from_memory(items: ir.Value, dtype: np.dtype) -> ir.Value:
    """The elements in registers of the items of an access."""
    if dtypes.is_packed(dtype):
        return unpack(items, dtype)
    if dtype == dtypes.BOOL:
        return arith.cmpi(
            arith.CmpIPredicate.ne, items, dtypes.constant(0, dtypes.U8, items)
        )
    return items


def to_memory(value: ir.Value, dtype: np.dtype) -> ir.Value:
    """The items in memory of the elements of a register."""
    if dtypes.is_packed(dtype):
        return pack(value, dtype)
    if dtype == dtypes.BOOL:
        return resize_float("arith.extui", dtypes.U8, value)
    return value
