# SPDX-License-Identifier: Apache-2.0
"""Parts of arrays as memrefs: what is recorded is what is read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_gpu import types
from pallas_gpu.layouts.window import Window
from pallas_gpu.lowering import memrefs
from tests.support.inference_bodies import Body
from tests.support.refusal import refused


@pytest.fixture
def b() -> Iterator[Body]:
    with Body().building() as b:
        yield b


@pytest.mark.parametrize(("element", "bits"), [("f16", 16), ("i1", 8)])
def test_an_array_is_the_whole_of_itself(b, element, bits):
    array = b.smem((4, 128, 64), element)
    whole = Window.whole((4, 128, 64))
    part = memrefs.Part(array, types.SMEM, bits, whole, array)
    assert memrefs.resolve(array) == part


def test_an_array_with_transforms_is_the_array_itself(b):
    array = b.smem((64, 64), "f16", ((8, 64), 128))
    part = memrefs.resolve(array)
    assert part is not None
    assert part.base == array.owner.operands[0]
    assert memrefs.user_transforms(part.base) == array.owner


WINDOWS = {
    "a stage": Window.whole((4, 128, 64)).slice((2, 0, 0), (None, 128, 64)),
    "an axis of size one": Window.whole((4, 128, 64)).slice((2, 0, 0), (1, 128, 64)),
    "one of two axes of size one": Window.whole((4, 1, 64)).slice(
        (1, 0, 32), (None, 1, 32)
    ),
    "the other": Window.whole((4, 1, 64)).slice((1, 0, 32), (1, None, 32)),
    "transposed": Window.whole((4, 128, 64))
    .slice((1, 64, 0), (None, 64, 64))
    .transpose((1, 0)),
    "permuted": Window.whole((4, 128, 64)).transpose((2, 0, 1)),
    "over the edge": Window.whole((4, 128, 64)).slice((2, 0, 0), (None, 128, 128)),
    "before the array": Window.whole((4, 128, 64)).slice((0, -8, 0), (4, 64, 64)),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_a_part_is_the_window_that_it_was_made_from(b, case):
    window = WINDOWS[case]
    array = b.smem(window.array_shape, "f16")
    ref = memrefs.subview(array, window)
    part = memrefs.resolve(ref)
    assert part == memrefs.Part(array, types.SMEM, 16, window, array)
    assert tuple(ref.type.shape) == window.shape
    strides, _ = ref.type.get_strides_and_offset()
    assert tuple(strides) == window.strides


def test_a_dynamic_start_keeps_its_value_and_what_is_known_of_it(b):
    array = b.gmem((512, 512), "f16")
    index = b.arguments["i32"]
    start = arith.muli(index, arith.constant(index.type, 64))
    window = Window.whole((512, 512)).slice((start, 128), (64, 64), (64, 128))
    part = memrefs.resolve(memrefs.subview(array, window))
    assert part is not None
    assert part.window == window
    assert part.window.starts[0] == start
    assert part.window.multiples == (64, 128)


@refused
def test_a_subview_that_records_nothing_is_a_bug_of_ours(b):
    array = b.gmem((64, 64), "f32")
    part = memrefs.subview(array, Window.whole((64, 64)).slice((0, 0), (32, 64)))
    del part.owner.attributes["pallas_gpu.window"]
    memrefs.resolve(part)


@refused
def test_a_part_of_a_part_is_a_bug_of_ours(b):
    window = Window.whole((64, 64)).slice((0, 0), (32, 64))
    part = memrefs.subview(b.gmem((64, 64), "f32"), window)
    again = Window.whole((32, 64)).slice((0, 0), (16, 64))
    memrefs.resolve(memrefs.subview(part, again))


def test_what_is_no_array_of_ours_has_no_part(b):
    other = memref.AllocaOp(ir.MemRefType.get([4], ir.F32Type.get()), [], [])
    assert memrefs.resolve(other.result) is None
    assert memrefs.resolve(b.arguments["i32"]) is None
