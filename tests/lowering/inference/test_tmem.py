# SPDX-License-Identifier: Apache-2.0
"""How inference lays out arrays in TMEM, and which layouts their loads have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_gpu.layouts import Layout, SmemLayout, TmemLayout, transfers
from pallas_gpu.layouts.registers.placement import place
from pallas_gpu.lowering import inference
from pallas_gpu.mosaic import dialect
from tests.support.inference_bodies import SMEM, Body
from tests.support.refusal import refused_by

TMEM = "#mosaic_gpu.tmem"
ROWS = (128, 64)
HALF = (64, 64)


class TmemBody(Body):
    """Adds the operations on TMEM."""

    def _tmem_type(self, shape: Sequence[int], element: str) -> ir.Type:
        return self.type(f"memref<{'x'.join(map(str, shape))}x{element}, {TMEM}>")

    def tmem(self, shape, element="f32", *, packing=1, collective=False) -> ir.Value:
        with self.at():
            pointer = dialect.ops.slice_smem(self.type(f"memref<i32, {SMEM}>"), 1 << 16)
            type_ = self._tmem_type(shape, element)
            return dialect.ops.tmem_alloc(
                type_, pointer, collective=collective, packing=packing
            )

    def slice_tmem(self, source, offset, shape, element="f32") -> ir.Value:
        with self.at():
            type_ = self._tmem_type(shape, element)
            return dialect.ops.slice_tmem(type_, source, offset)

    def tmem_cast(self, array: ir.Value, layout: TmemLayout) -> ir.Value:
        with self.at():
            attribute = dialect.to_attribute(layout.tiled)
            return dialect.ops.tmem_layout_cast(array, attribute)

    def load_tmem(self, array: ir.Value) -> ir.Value:
        with self.at():
            return dialect.ops.async_load_tmem(array)

    def store_tmem(self, value: ir.Value, array: ir.Value) -> ir.Operation:
        with self.at():
            return dialect.ops.async_store_tmem(value, array).operation

    def mma(self, accumulator, left=None, *, k=64, right=None, **kw) -> ir.Operation:
        rows, columns = ir.MemRefType(accumulator.type).shape
        columns //= 2 if kw.get("collective") else 1
        left = self.smem((rows, k), "f16") if left is None else left
        right = self.smem((k, columns), "f16") if right is None else right
        with self.at():
            condition = self.arguments["condition"]
            return dialect.ops.tcgen05_mma(
                accumulator, left, right, condition, **kw
            ).operation


@pytest.fixture
def b() -> Iterator[TmemBody]:
    with TmemBody().building() as b:
        yield b


# --- layouts of arrays ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "collective", "layout"),
    [
        ((128, 64), False, TmemLayout.default()),
        ((128, 64), True, TmemLayout.default()),
        ((64, 64), False, TmemLayout.half_lane(64)),
        ((64, 64), True, TmemLayout.m64_collective(64)),
    ],
)
def test_an_accumulator_lies_as_the_instruction_leaves_it(b, shape, collective, layout):
    accumulator = b.tmem(shape)
    b.mma(accumulator, collective=collective)
    assert b.infer().tmem(accumulator) == layout


def test_16_bit_accumulators_have_a_column_for_each_element(b):
    accumulator = b.slice_tmem(b.tmem((128, 256), "i32"), 0, ROWS, "f16")
    b.mma(accumulator)
    assert b.infer().tmem(accumulator) == TmemLayout.default(1)


def test_a_left_operand_is_packed(b):
    space = b.tmem((128, 256), "i32")
    left = b.slice_tmem(space, 64, ROWS, "f16")
    accumulator = b.slice_tmem(space, 0, ROWS)
    store = b.store_tmem(b.load(b.gmem(ROWS, "f16")), left)
    b.mma(accumulator, left)
    found = b.infer()
    assert found.tmem(left) == TmemLayout.default(2)
    assert found.tmem(accumulator) == TmemLayout.default()
    assert transfers(found.operand(store, 0), TmemLayout.default(2), 16)


def test_the_packing_of_an_allocation_is_its_arrays(b):
    arrays = [b.tmem(ROWS, "f16", packing=p) for p in (1, 2)]
    found = b.infer()
    for packing, array in enumerate(arrays, 1):
        assert found.tmem(array) == TmemLayout.default(packing)


@pytest.mark.parametrize("collective", [False, True])
def test_an_array_of_64_rows_that_nobody_multiplies_follows_its_allocation(
    b, collective
):
    array = b.tmem(HALF, collective=collective)
    b.store(b.load_tmem(array), b.gmem(HALF))
    make = TmemLayout.m64_collective if collective else TmemLayout.half_lane
    assert b.infer().tmem(array) == make(64)


def test_scales_and_metadata_lie_as_their_operands_do(b):
    space = b.tmem((128, 512), "i32")
    scales = [b.slice_tmem(space, 4 * i, (128, 4), "f8E8M0FNU") for i in (0, 1)]
    metadata = b.slice_tmem(space, 16, (128, 64), "i2")
    accumulator = b.slice_tmem(space, 128, (128, 128))
    b.mma(
        accumulator,
        b.smem((128, 64), "f8E4M3FN"),
        right=b.smem((128, 128), "f8E4M3FN"),
        a_scale=scales[0],
        b_scale=scales[1],
        a_sparse_metadata=metadata,
    )
    b.line = 0
    found = b.infer()
    assert [found.tmem(x) for x in scales] == [TmemLayout.scales()] * 2
    assert found.tmem(metadata) == TmemLayout.sparse_metadata()


def test_scales_of_two_ctas_with_64_rows_each():
    body = TmemBody()
    with body.building(verify=False) as b:
        space = b.tmem((128, 512), "i32")
        left = b.slice_tmem(space, 0, (128, 4), "f8E8M0FNU")
        right = b.slice_tmem(space, 8, (256, 4), "f8E8M0FNU")
        accumulator = b.slice_tmem(space, 128, (64, 256))
        b.mma(
            accumulator,
            b.smem((64, 128), "f8E4M3FN"),
            right=b.smem((128, 128), "f8E4M3FN"),
            collective=True,
            a_scale=left,
            b_scale=right,
        )
    found = body.infer()
    assert found.tmem(left) == TmemLayout.scales()
    assert found.tmem(right) == TmemLayout.scales_m64_collective()


def test_operands_in_smem_are_tiled(b):
    left, right = b.smem(ROWS, "f16"), b.smem((64, 64), "f16")
    b.mma(b.tmem(ROWS), left, right=right)
    found = b.infer()
    assert found.smem(left) == SmemLayout(ROWS, 16, (8, 64), 128)
    assert found.smem(right) == SmemLayout((64, 64), 16, (8, 64), 128)


@pytest.mark.parametrize("layout", [TmemLayout.default(1), TmemLayout.default(2)])
def test_the_authors_layout_is_kept(b, layout):
    space = b.tmem((128, 256), "i32")
    array = b.tmem_cast(b.slice_tmem(space, 0, ROWS, "f16"), layout)
    b.store(b.load_tmem(array), b.gmem(ROWS, "f16"))
    assert b.infer().tmem(array) == layout


def test_a_kernel_text_shows_layouts_in_tmem(b):
    b.mma(b.tmem(HALF))
    text = inference.annotate(b.block, b.infer())
    assert 'layouts.tmem = ["the half-lane layout of 64 columns"]' in text


# --- loads and stores -----------------------------------------------------------------


@pytest.mark.parametrize("element", ["f32", "f16"])
@pytest.mark.parametrize(
    ("shape", "collective"), [(ROWS, False), (HALF, False), (HALF, True)]
)
def test_loads_and_stores_have_layouts_that_transfer(b, element, shape, collective):
    space = b.tmem((128, 256), "i32")
    array = b.slice_tmem(space, 0, shape, element)
    b.mma(array, collective=collective)
    x = b.load_tmem(array)
    store = b.store_tmem(b.op("add", x, b.load(b.gmem(shape, element))), array)
    b.store(x, b.gmem(shape, element))
    found = b.infer()
    bits = int(element[1:])
    for placement in (found.result(x), found.operand(store, 0)):
        assert transfers(placement, found.tmem(array), bits)


@pytest.mark.parametrize(
    "layout", [Layout.TCGEN05, Layout.TCGEN05_TMEM_NATIVE(4)], ids=str
)
def test_a_wish_for_a_register_layout_reaches_the_load(b, layout):
    array = b.tmem(ROWS)
    b.mma(array)
    x = b.load_tmem(array)
    b.store(b.cast(x, layout), b.gmem(ROWS))
    assert b.infer().result(x) == place(layout, ROWS)


def test_other_register_layouts_are_reached_by_a_relayout(b):
    strided = Layout.WG_STRIDED(ROWS, 4)
    array = b.tmem(ROWS)
    x = b.load_tmem(array)
    cast = b.cast(x, strided)
    b.store(cast, b.gmem(ROWS))
    found = b.infer()
    assert transfers(found.result(x), TmemLayout.default(), 32)
    assert found.result(cast) == place(strided, ROWS)


def test_parts_are_loaded_as_arrays_of_their_size(b):
    array = b.tmem((64, 128))
    for start in (0, 64):
        b.mma(b.part(array, [0, start], HALF))
    x = b.load_tmem(array)
    y = b.load_tmem(b.part(array, [0, 64], HALF))
    b.store(x, b.gmem((64, 128)))
    b.store(y, b.gmem(HALF))
    found = b.infer()
    assert found.result(x) == place(Layout.WGMMA, (64, 128))
    assert found.result(y) == place(Layout.WGMMA, HALF)


def test_scales_are_loaded_with_a_copy_in_each_warp(b):
    space = b.tmem((128, 64), "i32")
    array = b.slice_tmem(space, 0, (128, 16), "i8")
    scales = b.tmem_cast(array, TmemLayout.scales())
    x = b.load_tmem(scales)
    b.store(x, b.gmem((128, 16), "i8"))
    found = b.infer()
    assert found.result(x) == TmemLayout.scales().tiled.linear((128, 16))


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_the_order_of_users_does_not_matter(b, order):
    space = b.tmem((128, 256), "i32")
    arrays = [b.slice_tmem(space, 128 * i, HALF) for i in (0, 1)]
    loads = {}
    for i in order:
        b.mma(arrays[i], collective=bool(i))
        loads[i] = b.load_tmem(arrays[i])
        b.store(loads[i], b.gmem(HALF))
    found = b.infer()
    assert found.tmem(arrays[0]) == TmemLayout.half_lane(64)
    assert found.tmem(arrays[1]) == TmemLayout.m64_collective(64)
    assert found.result(loads[0]) == place(Layout.WGMMA, HALF)
    assert found.result(loads[1]) == place(Layout.TCGEN05_M64_COLLECTIVE(64), HALF)


@pytest.mark.parametrize("trips", [4, None])
def test_accumulators_in_loops_are_found(b, trips):
    array = b.tmem(ROWS)

    def step(i, x):
        b.mma(array)
        return [b.op("add", x, b.load_tmem(array))]

    (total,) = b.loop([b.splat(ROWS)], step, trips)
    b.store(total, b.gmem(ROWS))
    found = b.infer()
    assert transfers(found.result(total), TmemLayout.default(), 32)


# --- what does not fit ----------------------------------------------------------------


def infer(make: Callable[[TmemBody], None], *, verify: bool = True) -> None:
    body = TmemBody()
    with body.building(verify=verify) as b:
        make(b)
    body.infer()


@refused_by(infer)
def test_an_accumulator_of_one_cta_and_of_two(b):
    array = b.tmem(HALF)
    b.mma(array)
    b.mma(array, collective=True)


@refused_by(infer)
def test_a_layout_that_the_tensor_core_does_not_read(b):
    space = b.tmem((128, 256), "i32")
    left = b.slice_tmem(space, 128, ROWS, "f16")
    left = b.tmem_cast(left, TmemLayout.default(1))
    b.mma(b.slice_tmem(space, 0, ROWS), left)


@refused_by(infer)
def test_an_allocation_that_is_packed_otherwise(b):
    b.mma(b.tmem(ROWS, "f16", packing=2))


@refused_by(infer)
def test_an_array_beyond_its_allocation(b):
    b.slice_tmem(b.tmem((128, 64), "i32"), 32, (128, 64))


def test_packing_makes_room_in_an_allocation(b):
    array = b.slice_tmem(b.tmem((128, 64), "i32"), 32, (128, 64), "f16")
    assert b.infer().tmem(array) == TmemLayout.default(2)


@pytest.mark.parametrize("rows", [32, 96, 256])
@refused_by(infer)
def test_rows_that_tmem_does_not_have(b, *, rows):
    b.tmem((rows, 64))


@refused_by(infer)
def test_halves_of_partial_tiles(b):
    b.mma(b.tmem((64, 24)), right=b.smem((64, 24), "f16"))


@refused_by(infer)
def test_metadata_is_not_loaded(b):
    space = b.tmem((128, 64), "i32")
    array = b.slice_tmem(space, 0, (128, 64), "i2")
    b.load_tmem(b.tmem_cast(array, TmemLayout.sparse_metadata()))


@refused_by(infer)
def test_a_part_that_cuts_halves(b):
    array = b.tmem((64, 128))
    b.mma(array)
    b.load_tmem(b.part(array, [0, 64], HALF))


@refused_by(infer)
def test_a_part_of_the_rows(b):
    array = b.tmem((128, 128))
    b.load_tmem(b.part(array, [0, 0], HALF))


@refused_by(infer)
def test_a_left_operand_of_64_rows_in_tmem(b):
    space = b.tmem((128, 256), "i32")
    left = b.slice_tmem(space, 128, HALF, "f16")
    b.mma(b.slice_tmem(space, 0, HALF), left)


@refused_by(infer)
def test_loads_that_reduce(b):
    array = b.tmem(ROWS)
    types = [b.vector_type(shape, "f32") for shape in (ROWS, ROWS[:1])]
    kind = ir.IntegerAttr.get(b.type("i32"), 0)
    with b.at():
        dialect.ops.async_load_tmem(array, reduce=kind, results=types)


def halves_at_multiples_of(step: int, b: TmemBody) -> ir.Value:
    index = b.arguments["index"]
    start = arith.muli(index, arith.constant(index.type, step))
    array = b.tmem((64, 128))
    b.mma(b.part(array, [0, start], HALF))
    return array


def test_parts_at_dynamic_starts_that_are_known_to_be_tiles(b):
    array = halves_at_multiples_of(64, b)
    assert b.infer().tmem(array) == TmemLayout.half_lane(64)


@pytest.mark.parametrize("step", [32, 1])
@refused_by(infer)
def test_parts_at_dynamic_starts_that_are_not_known_to_be_tiles(b, *, step):
    halves_at_multiples_of(step, b)


def test_tiles_travel_from_smem_to_tmem(b):
    space = b.tmem((128, 256), "i32")
    source, target = b.smem(ROWS, "f16"), b.slice_tmem(space, 0, ROWS, "f16")
    scales = b.slice_tmem(space, 64, (128, 4), "f8E8M0FNU")
    metadata = b.slice_tmem(space, 72, (128, 64), "i2")
    plain = b.smem((1, 1, 32, 16), "f8E8M0FNU")
    with b.at():
        dialect.ops.async_store_smem_to_tmem(source, target)
        dialect.ops.async_store_scales_smem_to_tmem(plain, scales)
        dialect.ops.async_store_sparse_metadata_smem_to_tmem(
            b.smem((1, 1, 128, 64), "i2"), metadata
        )
    found = b.infer()
    assert found.smem(source) == SmemLayout(ROWS, 16, (8, 64), 128)
    assert found.smem(plain) == SmemLayout((1, 1, 32, 16), 8)
    assert found.tmem(target) == TmemLayout.default(2)
    assert found.tmem(scales) == TmemLayout.scales()
    assert found.tmem(metadata) == TmemLayout.sparse_metadata()
