# SPDX-License-Identifier: Apache-2.0
"""Plans of rearrangements give what NumPy and lax give, for any shape."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pallas_gpu.layouts import Layout, WGStridedLayout
from pallas_gpu.layouts.moves import rearrange as plans
from pallas_gpu.layouts.registers.placement import default_placement, place

FILL = -1


def simulate(plan, operands, starts=()):
    """What a plan moves, element by element."""
    image = np.full(plan.size, -7)
    for where, x in zip(plan.sources, operands, strict=True):
        for c in np.ndindex(x.shape):
            image[address(where, c)] = x[c]
    added = dict(zip(plan.dynamic, starts, strict=True))
    firsts = [f + added.get(a, 0) for a, f in enumerate(plan.firsts)]
    result = np.full(plan.shape, FILL)
    for c in np.ndindex(*plan.shape):
        parts = [
            divmod(x - f, s) for x, f, s in zip(c, firsts, plan.steps, strict=True)
        ]
        inside = all(
            n is None or (rest == 0 and 0 <= i < n)
            for (i, rest), n in zip(parts, plan.counts, strict=True)
        )
        if inside:
            result[c] = image[address(plan.result, [i for i, _ in parts])]
    return result


def address(where, coordinate):
    return where.offset + sum(
        s * c for s, c in zip(where.strides, coordinate, strict=True)
    )


def numbered(shape):
    return np.arange(math.prod(shape)).reshape(shape)


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_a_reversal_agrees_with_flip(shape, data):
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    x = numbered(shape)
    got = simulate(plans.reversal(shape, tuple(axes)), [x])
    np.testing.assert_array_equal(got, np.flip(x, tuple(axes)))


@given(SHAPES, st.data())
def test_a_transpose_and_a_reshape_with_dimensions_agree_with_numpy(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    x = numbered(shape)
    got = simulate(plans.transpose(shape, order), [x])
    np.testing.assert_array_equal(got, x.transpose(order))
    flat = (math.prod(shape),)
    got = simulate(plans.reshape(shape, flat, order), [x])
    np.testing.assert_array_equal(got, x.transpose(order).reshape(flat))


@given(SHAPES, st.data())
def test_a_slice_with_strides_agrees_with_numpy(shape, data):
    key = []
    for n in shape:
        start = data.draw(st.integers(0, n - 1))
        stop = data.draw(st.integers(start + 1, n))
        key.append(slice(start, stop, data.draw(st.integers(1, 3))))
    x = numbered(shape)
    expected = x[tuple(key)]
    starts, steps = [k.start for k in key], [k.step for k in key]
    plan = plans.part(shape, starts, expected.shape, steps)
    np.testing.assert_array_equal(simulate(plan, [x]), expected)


@given(SHAPES, st.data())
def test_a_concatenation_agrees_with_numpy(shape, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    arrays, shift = [], 0
    for n in sizes:
        part = (*shape[:axis], n, *shape[axis + 1 :])
        arrays.append(numbered(part) + shift)
        shift += 1000
    plan = plans.concatenation([a.shape for a in arrays], axis)
    np.testing.assert_array_equal(simulate(plan, arrays), np.concatenate(arrays, axis))


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.data())
def test_padding_agrees_with_lax(shape, data):
    config = []
    for n in shape:
        interior = data.draw(st.integers(0, 2))
        low = data.draw(st.integers(-n, 3))
        stretched = n + (n - 1) * interior
        high = data.draw(st.integers(max(-n, 1 - stretched - low), 3))
        config.append((low, high, interior))
    x = numbered(shape)
    with jax.ensure_compile_time_eval():
        expected = lax.pad(x, np.asarray(FILL, x.dtype), config)
    got = simulate(plans.padding(shape, config), [x])
    np.testing.assert_array_equal(got, expected)


@given(SHAPES, st.data())
def test_a_dynamic_part_and_an_update_agree_with_numpy(shape, data):
    sizes = tuple(data.draw(st.integers(1, n)) for n in shape)
    starts = [
        data.draw(st.integers(0, n - m)) for n, m in zip(shape, sizes, strict=True)
    ]
    key = tuple(slice(s, s + m) for s, m in zip(starts, sizes, strict=True))
    x = numbered(shape)
    plan = plans.dynamic_part(shape, sizes)
    got = simulate(plan, [x], [-starts[a] for a in plan.dynamic])
    np.testing.assert_array_equal(got, x[key])
    plan = plans.update(shape, sizes)
    got = simulate(plan, [numbered(sizes)], [starts[a] for a in plan.dynamic])
    expected = np.full(shape, FILL)
    expected[key] = numbered(sizes)
    np.testing.assert_array_equal(got, expected)


@given(SHAPES, st.data())
def test_a_broadcast_agrees_with_numpy(shape, data):
    old = tuple(data.draw(st.sampled_from([1, n])) for n in shape)
    plan = plans.broadcast(old, (2, *shape), tuple(range(1, len(shape) + 1)))
    expected = np.broadcast_to(numbered(old), (2, *shape))
    np.testing.assert_array_equal(simulate(plan, [numbered(old)]), expected)


PLACEMENTS = [
    place(Layout.WGMMA, (64, 16)),
    place(Layout.WGMMA_TRANSPOSED, (64, 16)),
    default_placement((4, 3), 32),
    default_placement((8, 8, 16), 16),
    default_placement((24, 16), 32),
    default_placement((100, 77), 32),
]


@given(st.sampled_from(PLACEMENTS), st.data())
def test_addresses_are_those_of_the_elements(layout, data):
    strides = tuple(data.draw(st.integers(-40, 40)) for _ in range(len(layout.shape)))
    strides = data.draw(
        st.sampled_from([strides, plans.row_major_strides(layout.shape)])
    )
    offset, itemsize = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([1, 4]))
    found = plans.addresses(layout, plans.Affine(offset, strides), itemsize)
    if found is None:
        assert isinstance(layout, WGStridedLayout)
        assert strides != plans.row_major_strides(layout.shape)
        return
    wanted = (layout.all_coordinates() @ np.array(strides) + offset) * itemsize
    bits = np.arange(128)[:, None] >> np.arange(7) & 1
    threads = bits @ np.array(found.columns)
    vector = np.arange(found.length) * found.step
    got = threads[:, None, None] + np.array(found.origins)[:, None] + vector
    np.testing.assert_array_equal(got, wanted)
    firsts = wanted[..., :: found.width]
    assert (firsts % (found.width * itemsize) == 0).all() or found.width == 1
    for r in range(layout.num_registers):
        low, high = found.bounds(r)
        assert low <= wanted[:, r].min() and wanted[:, r].max() <= high


def test_extents_contain_all_coordinates():
    for layout in PLACEMENTS:
        coordinates = layout.all_coordinates()
        for r, axis in itertools.product(
            range(layout.num_registers), range(len(layout.shape))
        ):
            low, high = plans.extent(layout, r, axis)
            assert low <= coordinates[:, r, :, axis].min()
            assert coordinates[:, r, :, axis].max() <= high
