# SPDX-License-Identifier: Apache-2.0
"""Register layouts and transforms survive the way through MLIR's attributes."""

from __future__ import annotations

import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from pallas_gpu.layouts import Layout, Tiling, TmemLayout, WGStridedLayout
from pallas_gpu.mosaic import dialect, module
from tests.support.refusal import refused

_PARAMETERS = {
    "TILED": (Tiling(((64, 8), (16, 8), (8, 8), (2,))), (-7,), (-3, -2), -1),
    "WG_STRIDED": ((64, 48), 4),
    "WG_SPLAT": ((64, 64),),
    "SMEM_GMEM_COPY": ((64, 128), "float16", 64),
    "TCGEN05_M64_COLLECTIVE": (64,),
    "TCGEN05_M64_COLLECTIVE_NATIVE": (64,),
    "MMA_LHS": ("float16",),
    "MMA_RHS": ("float16", 2),
    "MMA_ACC": (1,),
}


@pytest.fixture
def context():
    context = module.make_context()
    with context, ir.Location.unknown():
        yield context


def catalogue_layout(name: Layout):
    if name.name in _PARAMETERS:
        return name(*_PARAMETERS[name.name])
    return name.to_layout()


@pytest.mark.parametrize("name", Layout)
def test_a_layout_of_the_catalogue_is_the_same_after_a_round_trip(context, name):
    layout = catalogue_layout(name)
    attribute = dialect.to_attribute(layout)
    assert dialect.from_attribute(attribute) == layout
    assert dialect.from_attribute(ir.Attribute.parse(str(attribute))) == layout


@pytest.mark.parametrize(
    "layout", [Layout.WGMMA.to_layout(), WGStridedLayout((64, 64), 2)]
)
def test_the_verifier_of_layout_cast_takes_the_attribute(context, layout):
    vector = ir.VectorType.get([64, 64], ir.F32Type.get())
    body = ir.Module.create()
    with ir.InsertionPoint(body.body):
        block = func.FuncOp("f", ([vector], [])).add_entry_block()
    with ir.InsertionPoint(block):
        cast = dialect.ops.layout_cast(block.arguments[0], dialect.to_attribute(layout))
        func.ReturnOp([])
    assert body.operation.verify()
    assert dialect.from_attribute(cast.owner.attributes["new_layout"]) == layout


@refused
def test_an_attribute_of_another_kind_is_our_bug(context):
    dialect.from_attribute(ir.StringAttr.get("WGMMA"))


@pytest.mark.parametrize(
    ("tiling", "swizzle"), [((8, 64), 128), (None, 16), ((2, 8, 32), 64), (None, 128)]
)
def test_transforms_are_the_same_after_a_round_trip(context, tiling, swizzle):
    attributes = dialect.transforms_to_attributes(tiling, swizzle)
    array = ir.ArrayAttr.get(attributes)
    assert dialect.transforms_from_attribute(array) == (tiling, swizzle)
    assert dialect.transforms_from_attribute(ir.ArrayAttr.get([])) == (None, 16)


@refused
def test_two_tilings_are_our_bug(context):
    twice = dialect.transforms_to_attributes((8, 64), 128) * 2
    dialect.transforms_from_attribute(ir.ArrayAttr.get(twice))


@pytest.mark.parametrize(
    "layout",
    [
        TmemLayout.default(2),
        TmemLayout.half_lane(32),
        TmemLayout.m64_collective(32, 2),
        TmemLayout.scales(),
        TmemLayout.scales_m64_collective(),
        TmemLayout.sparse_metadata(),
    ],
    ids=str,
)
def test_layouts_of_tmem_are_kept(context, layout):
    attribute = dialect.to_attribute(layout.tiled)
    assert dialect.tmem_from_attribute(attribute) == layout


@refused
def test_strided_layouts_are_none_of_tmem(context):
    layout = WGStridedLayout((128, 64), 2)
    dialect.tmem_from_attribute(dialect.to_attribute(layout))
