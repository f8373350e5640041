# SPDX-License-Identifier: Apache-2.0
"""Parities of barriers: bits of register state, 32 of a declaration in each word."""

from __future__ import annotations

from jaxlib.mlir import ir

from pallas_gpu.emitters import elementwise
from pallas_gpu.emitters.elements import arith
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import KernelState
from pallas_gpu.lowering.references import I32
from pallas_gpu.types.barrier import PARITIES_PER_WORD


def parity(
    kernel: KernelState, handle: vals.BarrierHandle, index: int | ir.Value
) -> ir.Value:
    """Returns the parity of the phase that is waited for next, 0 or 1."""
    words = [vals.scalar_value(kernel.state[key]) for key in handle.keys]
    builder = kernel.builder
    one = builder.i32(1)
    if isinstance(index, int):
        word, shift = divmod(index, PARITIES_PER_WORD)
        return arith.andi(arith.shrui(words[word], builder.i32(shift)), one)
    bits = words[0]
    for i, word in enumerate(words[1:], 1):
        bits = arith.select(_is_word(kernel, index, i), word, bits)
    return arith.andi(arith.shrui(bits, _shift(kernel, handle, index)), one)


def flip(
    kernel: KernelState,
    handle: vals.BarrierHandle,
    index: int | ir.Value,
    where: ir.Value | None = None,
) -> None:
    """Flips the parity of a barrier.

    Args:
      handle: the declaration.
      index: the barrier's index in it, row-major.
      where: i1, whether to flip it; None: always.
    """
    builder, zero = kernel.builder, kernel.builder.i32(0)
    if isinstance(index, int):
        word, shift = divmod(index, PARITIES_PER_WORD)
        last = PARITIES_PER_WORD - 1  # the sign
        masks = {word: builder.i32(-(1 << shift) if shift == last else 1 << shift)}
    else:
        mask = arith.shli(builder.i32(1), _shift(kernel, handle, index))
        masks = dict.fromkeys(range(len(handle.keys)), mask)
    for word, mask in masks.items():
        key = handle.keys[word]
        if len(masks) > 1:
            mask = arith.select(_is_word(kernel, index, word), mask, zero)
        if where is not None:
            mask = arith.select(where, mask, zero)
        bits = arith.xori(vals.scalar_value(kernel.state[key]), mask)
        kernel.state[key] = elementwise.scalar(bits, I32)


def _shift(
    kernel: KernelState, handle: vals.BarrierHandle, index: ir.Value
) -> ir.Value:
    if len(handle.keys) == 1:
        return index
    return arith.andi(index, kernel.builder.i32(PARITIES_PER_WORD - 1))


def _is_word(kernel: KernelState, index: int | ir.Value, word: int) -> ir.Value:
    assert isinstance(index, ir.Value)
    of = arith.divui(index, kernel.builder.i32(PARITIES_PER_WORD))
    return arith.cmpi(arith.CmpIPredicate.eq, of, kernel.builder.i32(word))
