# SPDX-License-Identifier: Apache-2.0
"""Parts of arrays behind memrefs."""

from __future__ import annotations

import pytest
from jaxlib.mlir.dialects import arith

from pallas_gpu.lowering.inference import views
from tests.support.inference_bodies import Body


@pytest.fixture
def body() -> Body:
    return Body()


def test_a_whole_array(body: Body):
    with body.building() as b:
        view = views.resolve(b.smem((4, 128, 64), "f16"))
    assert view is not None
    assert view.in_smem
    assert view.view_shape == (4, 128, 64)
    assert view.strides == (8192, 64, 1)
    assert view.bits == 16


def test_an_array_with_transforms_is_the_array_itself(body: Body):
    with body.building() as b:
        array = b.smem((64, 64), "f16", ((8, 64), 128))
        view = views.resolve(array)
    assert view is not None
    assert view.base == array.owner.operands[0]
    assert views.user_transforms(view.base) == array.owner


def test_bools_take_a_byte(body: Body):
    with body.building() as b:
        view = views.resolve(b.smem((64, 64), "i1"))
    assert view is not None
    assert view.bits == 8


def test_a_part_knows_what_is_known_of_its_starts(body: Body):
    with body.building() as b:
        array = b.gmem((512, 512), "f16")
        index = b.arguments["index"]
        times = arith.muli(index, arith.constant(index.type, 64))
        more = arith.addi(times, arith.constant(index.type, 32))
        view = views.resolve(b.part(array, [more, 128], [64, 64]))
    assert view is not None
    assert view.starts == (None, 128)
    assert view.start_multiples == (32, 128)
    assert view.view_shape == (64, 64)
    assert view.strides == (512, 1)


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ([None, 64, 64], (False, True, True)),
        ([1, 64, 64], (True, True, True)),
        ([1, None, 64], (True, False, True)),
        ([None, 1, 64], (False, True, True)),
        ([2, None, None], (True, False, False)),
    ],
)
def test_integer_indices_drop_the_axis_they_stand_on(body: Body, sizes, kept):
    with body.building() as b:
        array = b.smem((4, 128, 64), "f16")
        part = b.part(array, [b.arguments["index"], 0, 0], sizes)
        view = views.resolve(part)
    assert view is not None
    assert view.kept == kept
    assert view.view_shape == tuple(part.type.shape)


def test_a_transposed_part_keeps_the_arrays_strides(body: Body):
    with body.building() as b:
        array = b.smem((4, 128, 64), "f16")
        part = b.part(array, [1, 0, 0], [None, 128, 64], permutation=[1, 0])
        view = views.resolve(part)
    assert view is not None
    assert view.order == (1, 0)
    assert view.is_transposed
    assert view.view_shape == (64, 128)
    assert view.strides == (1, 64)


def test_a_part_of_a_part_adds_its_indices(body: Body):
    with body.building() as b:
        array = b.gmem((8, 512, 512), "f16")
        part = views.resolve(b.part(array, [1, 64, 0], [None, 128, 512]))
        assert part is not None
        i32 = b.type("i32")
        indices = [arith.constant(i32, 64), b.arguments["i32"]]
        moved = part.moved(indices, [64, -1])
    assert moved.starts == (1, 128, None)
    assert moved.kept == (False, True, False)
    assert moved.view_shape == (64,)


def test_what_is_no_array_has_no_view(body: Body):
    assert views.resolve(body.arguments["i32"]) is None
