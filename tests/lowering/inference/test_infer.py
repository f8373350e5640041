# SPDX-License-Identifier: Apache-2.0
"""Layouts that inference chooses for vectors, through every operation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jaxlib.mlir import ir

from pallas_gpu.layouts import Layout
from pallas_gpu.layouts.registers.placement import Placement, describe, place
from pallas_gpu.lowering.inference import constraints
from tests.support.inference_bodies import Body, operations

SQUARE = (64, 64)
STRIDED = Layout.WG_STRIDED(SQUARE, 4)


@pytest.fixture
def b() -> Iterator[Body]:
    with Body().building() as b:
        yield b


def is_layout(found: Placement | None, layout, shape=SQUARE) -> bool:
    assert found is not None
    assert found == place(layout, shape), describe(found)
    return True


def product(b: Body, acc: ir.Value, *, shape=SQUARE) -> ir.Value:
    """A product that is complete."""
    m, n = shape
    return b.barrier(b.wgmma(acc, b.smem((m, 64), "f16"), b.smem((64, n), "f16")))


def relayouts(body: Body, assignment) -> list[tuple[str, int]]:
    """Operations, with the operand, that take a value in another layout than it has."""
    found: list[tuple[str, int]] = []
    for op in operations(body.block):
        for i, operand in enumerate(op.operands):
            made, taken = assignment.result(operand), assignment.operand(op, i)
            if made is not None and taken is not None and made != taken:
                found.append((op.name, i))
    return found


# --- without constraints --------------------------------------------------------------


def test_arrays_that_nothing_constrains_are_strided(b):
    x = b.load(b.gmem(SQUARE))
    y = b.op("exp", x)
    store = b.store(y, b.gmem(SQUARE))
    found = b.infer()
    assert is_layout(found.result(x), STRIDED)
    assert is_layout(found.result(y), STRIDED)
    assert is_layout(found.operand(store, 0), STRIDED)
    assert found.operand(store, 1) is None


@pytest.mark.parametrize(
    ("element", "vec_size"), [("f16", 4), ("f32", 4), ("f64", 2), ("i8", 4)]
)
def test_the_default_layout_depends_on_the_width_as_it_does_in_memory(
    b, element, vec_size
):
    x = b.load(b.gmem(SQUARE, element))
    b.store(x, b.gmem(SQUARE, element))
    assert is_layout(b.infer().result(x), Layout.WG_STRIDED(SQUARE, vec_size))


def test_splats_iotas_and_what_is_made_of_them_have_no_layout(b):
    splat, iota = b.splat(SQUARE), b.iota(SQUARE, 1)
    row = b.broadcast(b.iota((64,), 0), SQUARE, [1])
    made = b.op("add", iota, row)
    scaled = b.op("mul", splat, b.arguments["scalar"])
    reshaped = b.reshape(splat, (4096,))
    found = b.infer()
    for value in (splat, iota, row, made, scaled, reshaped):
        assert found.result(value) is None
    assert found.operand(made.owner, 0) is None


def test_a_deferred_array_is_made_in_the_layout_that_its_user_wants(b):
    x = b.load(b.gmem(SQUARE))
    y = b.op("mul", x, b.splat(SQUARE))
    store = b.store(b.splat(SQUARE), b.gmem(SQUARE))
    found = b.infer()
    assert found.result(y.owner.operands[1]) is None
    assert is_layout(found.operand(y.owner, 1), STRIDED)
    assert is_layout(found.operand(store, 0), STRIDED)


def test_a_reduction_of_all_axes_gives_no_layout(b):
    x = b.load(b.gmem(SQUARE))
    total = b.reduce(x, [0, 1])
    found = b.infer()
    assert is_layout(found.operand(total.owner, 0), STRIDED)
    assert found.operand(total.owner, 1) is None


# --- the tensor core ------------------------------------------------------------------


def test_products_and_what_follows_them_lie_as_the_tensor_core_wants(b):
    acc = product(b, b.splat(SQUARE))
    y = b.op("exp", acc)
    store = b.store(y, b.gmem(SQUARE))
    found = b.infer()
    for value in (acc, y):
        assert is_layout(found.result(value), Layout.WGMMA)
    assert is_layout(found.operand(store, 0), Layout.WGMMA)


def test_a_softmax_of_a_product_needs_no_relayout(b):
    acc = product(b, b.splat((128, 64)), shape=(128, 64))
    top = b.reduce(acc, [1], "maximumf")
    shifted = b.op("sub", acc, b.broadcast(top, (128, 64), [0]))
    weights = b.op("exp", shifted)
    narrow = b.op("convert_element_type", weights, element="f16")
    b.wgmma(b.splat((128, 64)), narrow, b.smem((64, 64), "f16"))
    found = b.infer()
    assert relayouts(b, found) == []
    assert is_layout(found.result(top), Layout.WGMMA_ROW, (128,))


@pytest.mark.parametrize(
    ("element", "layout"), [("f16", Layout.WGMMA), ("f8E4M3FN", Layout.WGMMA_8BIT)]
)
def test_a_left_operand_in_registers_lies_as_its_width_asks(b, element, layout):
    left = b.op("neg", b.load(b.gmem(SQUARE, element)))
    right = b.transposed(b.smem(SQUARE, element), [1, 0])
    out = b.wgmma(b.splat(SQUARE), left, right)
    found = b.infer()
    assert is_layout(found.operand(out.owner, 1), layout)
    assert is_layout(found.result(left), layout)


def test_an_array_for_two_products_of_different_layouts_moves_once(b):
    x = b.load(b.gmem(SQUARE, "f16"))
    b.wgmma(b.splat(SQUARE), b.op("neg", x), b.smem(SQUARE, "f16"))
    narrow = b.op("convert_element_type", x, element="f8E4M3FN")
    right = b.transposed(b.smem(SQUARE, "f8E4M3FN"), [1, 0])
    b.wgmma(b.splat(SQUARE), b.op("neg", narrow), right)
    found = b.infer()
    assert len(relayouts(b, found)) == 1


def test_an_accumulator_under_way_is_in_no_relayout(b):
    raw = b.wgmma(b.splat(SQUARE), b.smem(SQUARE, "f16"), b.smem(SQUARE, "f16"))
    done = b.barrier(raw)
    b.store(b.cast(done, STRIDED), b.gmem(SQUARE))
    found = b.infer()
    assert is_layout(found.result(done), Layout.WGMMA)
    assert is_layout(found.operand(done.owner, 0), Layout.WGMMA)
    assert relayouts(b, found) == [("mosaic_gpu.layout_cast", 0)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("layout", [Layout.WGMMA_TRANSPOSED, STRIDED])
def test_branches_and_loops_pass_an_accumulator_as_it_is(b, depth, layout):
    """The tensor core may still work on it, so it moves behind its barrier only."""
    passed: list[ir.Value] = []

    def nested(b: Body, acc: ir.Value, depth: int) -> ir.Value:
        if depth == 0:
            return b.wgmma(acc, b.smem(SQUARE, "f16"), b.smem(SQUARE, "f16"))

        def step(_, inner):
            then, other = (lambda: [nested(b, inner, depth - 1)]), (lambda: [inner])
            passed.extend(b.branch(then, other, [acc.type]))
            return [passed[-1]]

        passed.extend(b.loop([acc], step, trips=1))
        return passed[-1]

    acc = nested(b, b.splat(SQUARE), depth)
    done = b.barrier(acc)
    # It would be cheaper to move it once, before the barrier.
    for _ in range(3):
        b.store(b.cast(done, layout), b.gmem(SQUARE))
    found = b.infer()
    for value in passed:
        assert is_layout(found.result(value), Layout.WGMMA)


def test_a_part_of_an_accumulator_is_updated_in_place(b):
    whole = b.splat((64, 128))
    part = b.slice(whole, [0, 64], [64, 64])
    out = b.wgmma(part, b.smem(SQUARE, "f16"), b.smem(SQUARE, "f16"))
    updated = b.update(whole, out, [0, 64])
    done = b.barrier(updated)
    b.store(done, b.gmem((64, 128)))
    found = b.infer()
    assert is_layout(found.result(updated), Layout.WGMMA, (64, 128))
    assert is_layout(found.operand(updated.owner, 0), Layout.WGMMA)
    assert is_layout(found.operand(updated.owner, 1), Layout.WGMMA, (64, 128))
    assert relayouts(b, found) == []


# --- the author's wishes --------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout.WGMMA, Layout.WGMMA_TRANSPOSED, STRIDED])
def test_a_layout_cast_is_obeyed(b, layout):
    casts = [b.cast(x, layout) for x in (b.load(b.gmem(SQUARE)), b.splat(SQUARE))]
    for cast in casts:
        b.store(cast, b.gmem(SQUARE))
    found = b.infer()
    assert all(is_layout(found.result(cast), layout) for cast in casts)
    assert is_layout(found.operand(casts[0].owner, 0), layout)


def test_two_casts_meet_in_one_relayout(b):
    x = b.cast(b.load(b.gmem(SQUARE)), Layout.WGMMA)
    y = b.op("log", b.op("exp", x))
    b.store(b.cast(y, STRIDED), b.gmem(SQUARE))
    assert len(relayouts(b, b.infer())) == 1


def test_of_two_operands_the_result_moves_not_both(b):
    x = b.cast(b.load(b.gmem(SQUARE)), STRIDED)
    y = b.cast(b.load(b.gmem(SQUARE)), STRIDED)
    total = b.cast(b.op("add", x, y), Layout.WGMMA)
    b.store(total, b.gmem(SQUARE))
    found = b.infer()
    assert relayouts(b, found) == [("mosaic_gpu.layout_cast", 0)]


def test_an_array_moves_while_it_is_narrow(b):
    x = b.cast(b.load(b.gmem(SQUARE, "f16")), STRIDED)
    wide = b.op("convert_element_type", x, element="f32")
    b.store(b.cast(wide, Layout.WGMMA), b.gmem(SQUARE))
    found = b.infer()
    assert relayouts(b, found) == [("pallas_gpu.convert_element_type", 0)]


# --- shapes ---------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "dims"), [((64,), [1]), ((1, 64), [0, 1])])
def test_a_broadcast_wants_its_operand_where_the_result_lies(b, shape, dims):
    row = b.load(b.gmem(shape))
    x = b.cast(b.load(b.gmem(SQUARE)), Layout.WGMMA)
    y = b.op("add", x, b.broadcast(row, SQUARE, dims))
    b.store(y, b.gmem(SQUARE))
    found = b.infer()
    column = place(Layout.WGMMA_COL, (64,))
    assert is_layout(found.result(y), Layout.WGMMA)
    assert found.result(row) == (column if len(shape) == 1 else column.insert_axes(0))
    assert relayouts(b, found) == []


def test_layouts_pass_reshapes_transposes_and_slices(b):
    x = b.cast(b.load(b.gmem((128, 64))), Layout.WGMMA)
    stacked = b.reshape(x, (2, 64, 64))
    part = b.reshape(b.slice(stacked, [1, 0, 0], [1, 64, 64]), SQUARE)
    turned = b.transpose(part, [1, 0])
    b.store(turned, b.gmem(SQUARE))
    found = b.infer()
    assert relayouts(b, found) == []
    assert is_layout(found.result(part), Layout.WGMMA)
    assert found.result(turned) == place(Layout.WGMMA, SQUARE).transpose([1, 0])


def test_layouts_travel_against_the_flow_of_values(b):
    x = b.load(b.gmem((64, 128)))
    half = b.slice(x, [0, 64], [64, 64])
    turned = b.reshape(half, (1, 64, 64))
    y = b.cast(b.reshape(turned, SQUARE), Layout.WGMMA)
    b.store(y, b.gmem(SQUARE))
    found = b.infer()
    assert is_layout(found.result(half), Layout.WGMMA)
    assert is_layout(found.result(x), Layout.WGMMA, (64, 128))


def test_a_slice_inside_of_a_tile_moves_its_operand_first(b):
    acc = product(b, b.splat(SQUARE))
    part = b.slice(acc, [0, 0], [32, 64])
    b.store(part, b.gmem((32, 64)))
    found = b.infer()
    assert ("vector.extract_strided_slice", 0) in relayouts(b, found)


def test_arrays_of_rank_three_keep_untiled_leading_axes(b):
    shape = (3, 64, 64)
    x = b.cast(b.load(b.gmem(shape)), Layout.WGMMA)
    total = b.reduce(x, [0])
    b.store(total, b.gmem(SQUARE))
    found = b.infer()
    assert is_layout(found.result(x), Layout.WGMMA, shape)
    assert is_layout(found.result(total), Layout.WGMMA)


def test_a_strided_array_without_linear_form_passes_elementwise_work(b):
    shape = (48, 40)
    x = b.load(b.gmem(shape))
    y = b.op("exp", x)
    b.store(b.reshape(y, (1920,)), b.gmem((1920,)))
    found = b.infer()
    assert relayouts(b, found) == []
    assert is_layout(found.result(y), Layout.WG_STRIDED(shape, 1), shape)


def test_an_odd_shape_is_spread_over_the_threads(b):
    x = b.load(b.gmem((4, 3)))
    b.store(b.op("exp", x), b.gmem((4, 3)))
    found = b.infer()
    assert found.result(x) is not None
    assert relayouts(b, found) == []


def test_a_reduction_that_would_cross_warps_stays_inside_of_one(b):
    shape = (16, 512)
    x = b.load(b.gmem(shape))
    b.store(b.reduce(x, [1]), b.gmem((16,)))
    found = b.infer(0)
    layout = found.result(x)
    assert layout is not None
    assert not any(column[1] for column in layout.thread_columns[5:])


@pytest.mark.parametrize(("sizes", "chosen"), [((2048, 8192), 8192), ((2048,), 2048)])
def test_a_relayout_takes_rounds_only_where_there_is_no_more_scratch(b, sizes, chosen):
    shape = (64, 24)  # 6144 bytes
    x = b.cast(b.load(b.gmem(shape)), Layout.WGMMA)
    b.store(b.cast(x, Layout.WG_STRIDED(shape, 4)), b.gmem(shape))
    assert b.infer(*sizes).scratch_bytes == chosen


# --- loops and branches ---------------------------------------------------------------


def test_a_carry_has_one_layout_and_takes_a_splat_as_it_is(b):
    a, c = b.smem(SQUARE, "f16"), b.smem(SQUARE, "f16")
    (acc,) = b.loop([b.splat(SQUARE)], lambda i, x: [b.wgmma(x, a, c)])
    b.store(b.barrier(acc), b.gmem(SQUARE))
    found = b.infer()
    loop = acc.owner
    inner = loop.regions[0].blocks[0]
    end = inner.operations[len(inner.operations) - 1]
    assert is_layout(found.operand(loop, 3), Layout.WGMMA)
    assert is_layout(found.result(inner.arguments[1]), Layout.WGMMA)
    assert is_layout(found.operand(end, 0), Layout.WGMMA)
    assert is_layout(found.result(acc), Layout.WGMMA)
    assert found.operand(loop, 0) is None


@pytest.mark.parametrize("trips", [8, None], ids=["static", "dynamic"])
def test_a_carry_is_converted_before_the_loop_not_inside(b, trips):
    x = b.cast(b.load(b.gmem(SQUARE)), STRIDED)

    def step(_, value):
        return [b.cast(b.op("exp", value), Layout.WGMMA)]

    (y,) = b.loop([x], step, trips=trips)
    b.store(b.cast(y, STRIDED), b.gmem(SQUARE))
    moved = relayouts(b, b.infer())
    assert moved == [("scf.for", 3), ("mosaic_gpu.layout_cast", 0)]


def test_what_follows_a_loop_weighs_no_more_than_what_precedes_it(b):
    (y,) = b.loop([b.load(b.gmem(SQUARE))], lambda i, x: [b.op("exp", x)], trips=4)
    b.store(y, b.gmem(SQUARE))
    first, *_, last = constraints.collect(b.block).variables
    assert first.weight == last.weight == 1


def test_a_loop_that_runs_once_weighs_no_more_than_what_is_around_it(b):
    """Two relayouts around the loop lose against one inside, which runs once."""
    x = b.cast(b.load(b.gmem(SQUARE)), STRIDED)
    kept = b.cast(b.load(b.gmem(SQUARE)), Layout.WGMMA)

    def inner(i, v, w):
        return [b.op("exp", v), b.op("add", w, b.op("neg", v))]

    y, z = b.loop([x, kept], inner, trips=1)
    b.store(b.cast(y, STRIDED), b.gmem(SQUARE))
    b.store(b.cast(z, Layout.WGMMA), b.gmem(SQUARE))
    moved = relayouts(b, b.infer())
    assert len(moved) == 1
    assert moved[0][0].startswith("pallas_gpu.")


def test_a_value_from_outside_moves_outside_of_the_loop_if_it_is_carried(b):
    x = b.cast(b.load(b.gmem(SQUARE)), STRIDED)
    y = b.op("exp", x)
    kept = b.cast(b.load(b.gmem(SQUARE)), Layout.WGMMA)
    (z,) = b.loop([kept], lambda i, v: [b.cast(b.op("add", v, y), Layout.WGMMA)])
    b.store(z, b.gmem(SQUARE))
    found = b.infer()
    assert is_layout(found.result(y), Layout.WGMMA)
    assert relayouts(b, found) == [("pallas_gpu.exp", 0)]


def test_a_while_loop_carries_layouts_through_both_regions(b):
    x = b.cast(b.load(b.gmem(SQUARE)), STRIDED)
    (y,) = b.while_loop([x], lambda v: [b.cast(b.op("exp", v), Layout.WGMMA)])
    b.store(b.cast(y, Layout.WGMMA), b.gmem(SQUARE))
    found = b.infer()
    loop = y.owner
    before, after = (region.blocks[0] for region in loop.regions)
    condition = before.operations[len(before.operations) - 1]
    assert is_layout(found.operand(loop, 0), Layout.WGMMA)
    assert is_layout(found.result(before.arguments[0]), Layout.WGMMA)
    assert is_layout(found.operand(condition, 1), Layout.WGMMA)
    assert found.operand(condition, 0) is None
    assert is_layout(found.result(after.arguments[0]), Layout.WGMMA)
    assert relayouts(b, found) == [("scf.while", 0)]


def test_both_sides_of_a_branch_give_one_layout(b):
    x = b.cast(b.load(b.gmem(SQUARE)), Layout.WGMMA)
    (y,) = b.branch(
        lambda: [b.op("exp", x)],
        lambda: [b.splat(SQUARE)],
        [x.type],
    )
    b.store(b.cast(y, Layout.WGMMA), b.gmem(SQUARE))
    found = b.infer()
    assert is_layout(found.result(y), Layout.WGMMA)
    for region in y.owner.regions:
        block = region.blocks[0]
        end = block.operations[len(block.operations) - 1]
        assert is_layout(found.operand(end, 0), Layout.WGMMA)
    assert relayouts(b, found) == []
