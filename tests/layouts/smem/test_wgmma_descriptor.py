# SPDX-License-Identifier: Apache-2.0
"""Descriptors of wgmma operands: what the hardware reads is what the array holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_gpu.layouts import SmemLayout
from pallas_gpu.layouts.smem.swizzle import swizzle_bytes
from pallas_gpu.layouts.smem.wgmma_descriptor import (
    K_STEP_BYTES,
    WgmmaOperand,
    encode_address,
    plan_operand,
)
from pallas_gpu.layouts.window import Window


def tiled(shape, bits, swizzle) -> SmemLayout:
    return SmemLayout(shape, bits, (8, swizzle * 8 // bits), swizzle)


def plan(shape, bits=16, swizzle=128, side="a", order=(0, 1)) -> WgmmaOperand:
    layout = tiled(shape, bits, swizzle)
    lead = len(shape) - 2
    sizes = (None,) * lead + tuple(shape[-2:])
    window = Window.whole(shape).slice((0,) * len(shape), sizes)
    return plan_operand(layout, window.transpose(order), side)


def part(shape, starts) -> Window:
    return Window.whole(shape).slice(starts, (64, 64))


def read_address(operand: WgmmaOperand, start: int, mn: int, k: int) -> int:
    """Where an instruction finds element (mn, k), from the descriptor alone.

    PTX ISA, "Shared Memory Matrix Layout", in units of bytes: atoms of 8 rows; the
    swizzle is a function of the address.
    """
    fields, item = operand.fields, operand.itemsize_bits // 8
    leading = (fields >> 16 & 0x3FFF) << 4
    stride = (fields >> 32 & 0x3FFF) << 4
    swizzle = {0: 16, 1: 128, 2: 64, 3: 32}[fields >> 62]
    row = swizzle // item
    if operand.transposed:
        along, across = (stride, leading) if swizzle == 16 else (leading, stride)
        linear = mn // row * along + mn % row * item + k // 8 * across + k % 8 * swizzle
    else:
        chunk = k * item // swizzle * leading if swizzle == 16 else 0
        within = k * item % swizzle if swizzle == 16 else k * item
        linear = mn // 8 * stride + mn % 8 * swizzle + chunk + within
    return swizzle_bytes(start + linear, swizzle)


@st.composite
def operands(draw):
    swizzle = draw(st.sampled_from([16, 32, 64, 128]))
    bits = draw(st.sampled_from([8, 16, 32]))
    minor_is_k = bits != 16 or draw(st.booleans())
    row = swizzle * 8 // bits
    steps = K_STEP_BYTES * 8 // bits
    minor = row * draw(st.integers(1, 4)) * (2 if swizzle == 16 else 1)
    major = (
        64 * draw(st.integers(1, 3)) if minor_is_k else steps * draw(st.integers(1, 4))
    )
    if not minor_is_k:
        minor = -(-minor // 64) * 64
    return (major, minor), bits, swizzle, minor_is_k


@given(operands(), st.sampled_from(["a", "b"]), st.randoms(use_true_random=False))
def test_the_hardware_reads_the_elements_of_the_block(case, side, random):
    shape, bits, swizzle, minor_is_k = case
    straight = minor_is_k == (side == "a")
    operand = plan(shape, bits, swizzle, side, (0, 1) if straight else (1, 0))
    assert operand.major == ("K" if minor_is_k else "MN")
    layout = tiled(shape, bits, swizzle)
    block = random.randrange(0, operand.mn, 64)
    step = random.randrange(0, operand.k, operand.k_step)
    start = operand.offset_bytes(block, step)
    assert start % 16 == 0
    for _ in range(32):
        mn = random.randrange(min(64, operand.mn - block))
        k = random.randrange(operand.k_step)
        at = (block + mn, step + k)
        coordinate = at if minor_is_k else at[::-1]
        assert read_address(operand, start, mn, k) == layout.byte_offset(coordinate)


def test_a_k_major_operand_steps_through_the_swizzle():
    operand = plan((128, 128))
    assert operand.fields == 1 << 62 | (2 * 1024 >> 4) << 32 | 1 << 16
    assert [operand.offset_bytes(0, k) for k in (0, 16, 48, 64)] == [0, 32, 96, 1024]
    assert operand.offset_units(64, 0) == 8 * 2048 // 16
    assert not operand.transposed


def test_an_mn_major_operand_steps_by_atoms():
    operand = plan((64, 128), side="b")
    assert (operand.mn, operand.k, operand.transposed) == (128, 64, True)
    assert operand.leading_offset_bytes == 1024
    assert operand.stride_offset_bytes == 2048
    assert operand.offset_bytes(64, 16) == 1024 + 2 * 2048


def test_a_stage_of_a_buffer_is_an_operand():
    assert plan((3, 128, 64)) == plan((128, 64))


def test_a_slice_keeps_the_strides_of_its_array():
    layout = tiled((256, 128), 16, 128)
    operand = plan_operand(layout, part((256, 128), (64, 64)), "a")
    assert operand.stride_offset_bytes == 2048
    assert (operand.mn, operand.k) == (64, 64)


def test_addresses_lose_their_lowest_bits():
    assert encode_address(1024) == 64
    assert encode_address((1 << 18) + 32) == 2


# (shape, bits, swizzle, order of a left operand, upstream's constant of jax 0.11.2)
UPSTREAM = [
    ((128, 128), 16, 128, (1, 0), 0x4000008000400000),
    ((64, 256), 16, 128, (1, 0), 0x4000010000400000),
    ((128, 64), 16, 32, (1, 0), 0xC000004000100000),
    ((64, 128), 16, 128, (0, 1), 0x4000008000000000),
    ((64, 128), 16, 64, (0, 1), 0x8000008000000000),
    ((128, 256), 8, 128, (0, 1), 0x4000008000000000),
    ((256, 256), 32, 64, (0, 1), 0x8000020000000000),
]


@pytest.mark.parametrize(("shape", "bits", "swizzle", "order", "constant"), UPSTREAM)
def test_the_bits_are_upstreams(shape, bits, swizzle, order, constant):
    operand = plan(shape, bits, swizzle, "a", order)
    # Where the hardware ignores the leading offset, upstream leaves 0 and we 16 bytes.
    ignored = 0 if operand.transposed else 0x3FFF << 16
    assert operand.fields & ~ignored == constant
