# SPDX-License-Identifier: Apache-2.0
"""How inference stores arrays in SMEM, and what it keeps of the user's transforms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jaxlib.mlir.dialects import arith

from pallas_gpu import errors
from pallas_gpu.layouts import Layout, SmemLayout
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.lowering import memrefs
from pallas_gpu.lowering.inference.spaces import smem
from tests.support.inference_bodies import Body

SQUARE = (64, 64)


@pytest.fixture
def b() -> Iterator[Body]:
    with Body().building() as b:
        yield b


def tiled(shape, bits: int, swizzle: int) -> SmemLayout:
    return SmemLayout(shape, bits, (8, swizzle * 8 // bits), swizzle)


@pytest.mark.parametrize("shape", [SQUARE, (128,)])
def test_an_array_without_needs_lies_row_major(b, shape):
    array, unused = b.smem(shape), b.smem((4, 64, 64), "f16")
    b.store(b.load(b.gmem(shape)), array)
    b.store(b.load(array), b.gmem(shape))
    found = b.infer()
    assert found.smem(array) == SmemLayout(shape, 32)
    assert found.smem(unused) == SmemLayout((4, 64, 64), 16)


@pytest.mark.parametrize(
    ("element", "columns", "swizzle"),
    [
        ("f16", 128, 128),
        ("f16", 64, 128),
        ("f16", 32, 64),
        ("f16", 16, 32),
        ("bf16", 96, 64),
        ("f8E4M3FN", 128, 128),
        ("f8E4M3FN", 64, 64),
        ("f32", 32, 128),
    ],
)
def test_an_operand_of_wgmma_has_the_widest_swizzle_that_fits(
    b, element, columns, swizzle
):
    left = b.smem((64, columns), element)
    right = b.smem((64, columns), element)
    b.wgmma(b.splat(SQUARE), left, b.transposed(right, [1, 0]))
    found = b.infer()
    bits = found.smem(left).itemsize_bits
    assert found.smem(left) == tiled((64, columns), bits, swizzle)
    assert found.smem(right) == tiled((64, columns), bits, swizzle)


def test_a_slice_of_an_operand_narrows_the_swizzle(b):
    left = b.smem((64, 64), "f16")
    part = b.part(left, [0, 32], [64, 32])
    b.wgmma(b.splat(SQUARE), part, b.smem((32, 64), "f16"))
    assert b.infer().smem(left) == tiled(SQUARE, 16, 64)


def test_buffers_of_a_ring_are_tiled_as_one_array(b):
    ring = b.smem((4, 64, 64), "f16")

    def step(i, acc):
        part = b.part(ring, [i, 0, 0], [None, 64, 64])
        b.copy_in(b.part(gmem, [0, i], SQUARE), part)
        return [b.wgmma(acc, part, part)]

    gmem = b.gmem((64, 1024), "f16")
    b.loop([b.splat(SQUARE)], step)
    assert b.infer().smem(ring) == tiled((4, 64, 64), 16, 128)


def test_a_product_is_stored_in_tiles_without_bank_conflicts(b):
    acc = b.wgmma(b.splat(SQUARE), b.smem(SQUARE, "f16"), b.smem(SQUARE, "f16"))
    narrow = b.op("convert_element_type", b.barrier(acc), element="f16")
    out = b.smem(SQUARE, "f16")
    store = b.store(narrow, out)
    b.copy_out(out, b.gmem(SQUARE, "f16"))
    found = b.infer()
    assert found.smem(out) == tiled(SQUARE, 16, 128)
    assert found.operand(store, 0) == place(Layout.WGMMA, SQUARE)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_transforms_of_the_user_are_kept(b, swizzle):
    given = ((8, swizzle // 2), swizzle)
    array = b.smem(SQUARE, "f16", given)
    b.wgmma(b.splat(SQUARE), array, b.smem(SQUARE, "f16"))
    base = array.owner.operands[0]
    assert b.infer().smem(base) == tiled(SQUARE, 16, swizzle)


def test_loads_from_tiles_of_the_user_avoid_bank_conflicts(b):
    array = b.smem(SQUARE, "f32", ((8, 8), 32))
    x = b.load(array)
    b.store(x, b.gmem(SQUARE))
    assert b.infer().result(x) != place(Layout.WG_STRIDED(SQUARE, 4), SQUARE)


@pytest.mark.parametrize(
    "use",
    [lambda b, array: b.load(b.part(array, [3, 5], [1, 1])), Body.pointer],
    ids=["single elements", "the address"],
)
def test_what_needs_rows_keeps_an_array_row_major(b, use):
    array = b.smem(SQUARE, "f16")
    use(b, array)
    x = b.cast(b.load(array), Layout.WGMMA)
    b.store(x, b.gmem(SQUARE, "f16"))
    assert b.infer().smem(array) == SmemLayout(SQUARE, 16)


def test_an_operation_that_takes_the_address_is_trusted_with_the_users_tiles(b):
    array = b.smem(SQUARE, "f16", ((8, 64), 128))
    b.pointer(array)
    base = array.owner.operands[0]
    assert b.infer().smem(base) == tiled(SQUARE, 16, 128)


def test_arrays_at_one_offset_are_stored_each_in_its_own_way(b):
    first = b.smem(SQUARE, "f16")
    b.wgmma(b.splat(SQUARE), first, first)
    b.reuse_smem()
    second = b.smem(SQUARE, "f16")
    b.store(b.load(second), b.gmem(SQUARE, "f16"))
    found = b.infer()
    assert found.smem(first) == tiled(SQUARE, 16, 128)
    assert found.smem(second) == SmemLayout(SQUARE, 16)


def test_a_transposed_view_is_loaded_in_a_layout_that_suits_it(b):
    array = b.smem(SQUARE, "f32", ((8, 32), 128))
    x = b.load(b.transposed(array, [1, 0]))
    acc = b.wgmma(b.splat(SQUARE), b.smem(SQUARE, "f16"), b.smem(SQUARE, "f16"))
    b.store(b.op("add", x, b.barrier(acc)), b.gmem(SQUARE))
    found = b.infer()
    fitting = [place(n, SQUARE) for n in (Layout.WGMMA, Layout.WGMMA_TRANSPOSED)]
    assert found.result(x) in fitting


def test_a_copy_by_hand_moves_runs_of_bytes_on_both_sides(b):
    array = b.smem((64, 64), "f16", ((8, 32), 64))
    x = b.load(array)
    b.store(x, b.gmem(SQUARE, "f16"))
    copy = Layout.SMEM_GMEM_COPY(SQUARE, 16, 64)
    assert b.infer().result(x) == place(copy, SQUARE)


@pytest.mark.parametrize(("ctas", "fits"), [(2, True), (3, False)])
def test_a_copy_for_a_cluster_falls_into_equal_pieces(b, ctas, fits):
    array = b.smem(SQUARE, "f16")
    b.copy_in(b.gmem(SQUARE, "f16"), array, collective=[0])
    if fits:
        assert b.infer(cluster=(ctas,)).smem(array) == SmemLayout(SQUARE, 16)
        return
    with pytest.raises(errors.LayoutError, match="in 3 equal pieces"):
        b.infer(cluster=(ctas,))


def test_a_part_at_an_unknown_start_is_reached_by_narrow_accesses(b):
    array = b.smem((64, 96))
    part = b.part(array, [0, b.arguments["index"]], [64, 64])
    b.store(b.load(part), b.gmem(SQUARE))
    found = memrefs.resolve(part)
    assert found is not None
    assert smem.alignment_bytes(found, SmemLayout((64, 96), 32)) == 4
    assert b.infer().smem(array) == SmemLayout((64, 96), 32)


@pytest.mark.parametrize(
    ("step", "swizzle"), [(64, 128), (32, 64), (16, 32), (None, 128)]
)
def test_dynamic_starts_of_an_operand_narrow_its_tiles(b, step, swizzle):
    """A start of which nothing is known is promised to be that of a tile."""
    array = b.smem((64, 128), "f16")
    start = b.arguments["index"]
    if step is not None:
        start = arith.muli(start, arith.constant(start.type, step))
    part = b.part(array, [0, start], [64, 64])
    b.wgmma(b.splat(SQUARE), part, b.smem(SQUARE, "f16"))
    assert b.infer().smem(array) == tiled((64, 128), 16, swizzle)
