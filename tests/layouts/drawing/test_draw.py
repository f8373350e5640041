# SPDX-License-Identifier: Apache-2.0
"""Drawings of layouts, as text and as SVG."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.errors import LayoutError
from pallas_gpu.layouts import (
    Layout,
    SmemLayout,
    TmemLayout,
    WGSplatLayout,
    WGStridedLayout,
    default_layout,
    draw,
)

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def rows(drawing):
    """The lines of the table, without title, head and legend."""
    return str(drawing).splitlines()[2:-1]


# --- registers ------------------------------------------------------------------------


def test_a_drawing_names_warp_lane_register_and_place():
    lines = rows(draw(Layout.WGMMA, (64, 8)))
    assert lines[0].startswith(" 0 | 0:0 r0.0   0:0 r0.1   0:1 r0.0")
    assert lines[0].endswith("0:3 r0.1")
    assert lines[25].startswith("25 | 1:4 r1.0")
    assert len(lines) == 64


def test_title_head_and_legend_say_what_is_drawn():
    title, head, *_, legend = str(Layout.WGMMA.draw((64, 8))).splitlines()
    assert title == "Layout.WGMMA, shape (64, 8)"
    assert head.split() == ["|", *map(str, range(8))]
    assert legend == "warp:lane, register.position in it"


@pytest.mark.parametrize(
    "layout",
    [m for m in Layout if m.name.startswith(("WGMMA", "TCGEN05", "MMA", "TMA"))],
)
def test_every_element_is_where_the_layout_puts_it(layout):
    parameters = {
        "TCGEN05_M64_COLLECTIVE": (16,),
        "TCGEN05_M64_COLLECTIVE_NATIVE": (16,),
        "MMA_LHS": (jnp.float16,),
        "MMA_RHS": (jnp.float16,),
    }
    made = layout(*parameters[layout.name]) if layout.name in parameters else layout
    shape = plgpu.layouts.to_layout(made).base_tile_shape
    linear = plgpu.layouts.to_layout(made).linear(shape)
    cells = [cell for row in made.draw(shape).cells for cell in row]
    first = {}
    for thread, register, position in np.ndindex(linear.all_coordinates().shape[:3]):
        element = tuple(linear.all_coordinates()[thread, register, position].tolist())
        warp, lane = divmod(thread, 32)
        first.setdefault(element, f"{warp}:{lane} r{register}.{position}")
    expected = [first[i] for i in np.ndindex(shape)]
    assert [cell.text.removesuffix("+") for cell in cells] == expected


def test_copies_are_marked():
    text = str(draw(Layout.WGMMA_COL, (8,)))
    assert "0:0 r0.0+" in text
    assert text.endswith("+ the first of 32 threads that hold it")


def test_strided_layouts_are_drawn_even_if_not_linear():
    lines = rows(WGStridedLayout((6, 64), 1).draw())
    assert lines[-1].endswith("3:31 r2.0")


def test_an_axis_alone_is_drawn_in_rows():
    lines = str(Layout.WG_STRIDED((256,), 2).draw()).splitlines()
    assert lines[1].split()[:3] == ["|", "+0", "+1"]
    assert lines[3].startswith(" 16 | 0:8 r0.0")


def test_padding_is_not_drawn():
    lines = rows(default_layout((7, 5), 32).draw((7, 5)))
    assert len(lines) == 7
    assert all(len(re.findall(r"r\d", line)) == 5 for line in lines)


def test_all_threads_hold_a_splat():
    drawing = draw(WGSplatLayout(), (4, 2))
    assert rows(drawing)[3] == "3 | all r0.0  all r0.0"


# --- SMEM -----------------------------------------------------------------------------


@pytest.mark.parametrize("transforms", [(), SWIZZLED])
def test_a_drawing_of_smem_has_banks_and_addresses(transforms):
    declaration = plgpu.SMEM((16, 64), jnp.float16, transforms=transforms)
    layout = SmemLayout((16, 64), 16, *(((8, 64), 128) if transforms else ()))
    for i, row in enumerate(declaration.draw().cells):
        for j, cell in enumerate(row):
            address = layout.byte_offset((i, j))
            assert cell.text == f"b{address // 4 % 32} {address:#06x}"


def test_the_title_of_smem_names_the_transforms():
    title = str(plgpu.SMEM((16, 64), jnp.float16, transforms=SWIZZLED).draw())
    assert title.startswith("SMEM, elements of 16 bits, tiling (8, 64), 128-byte swi")
    assert "row-major" in str(plgpu.SMEM((16, 64), jnp.float16).draw())


# --- TMEM -----------------------------------------------------------------------------


def test_a_drawing_of_tmem_has_lanes_and_columns():
    layout = TmemLayout.half_lane(32)
    part = (slice(14, 18), slice(14, 18))
    drawing = layout.draw((64, 32), part)
    for i, row in zip(range(14, 18), drawing.cells, strict=True):
        for j, cell in zip(range(14, 18), row, strict=True):
            place = layout.place((64, 32), i, j)
            assert cell.text == f"L{place.lanes[0]} c{place.column}"


def test_packed_and_copied_elements_of_tmem_are_marked():
    drawing = TmemLayout.scales().draw((128, 8), part=(slice(40, 42), slice(5, 6)))
    assert rows(drawing)[0] == "40 | L8+ c5.1"  # as in the docstring of `scales`
    assert str(drawing).endswith("+ the first of 4 lanes that hold it")
    declared = plgpu.TMEM((128, 64), jnp.bfloat16, packed=True)
    assert "L3 c1.1" in str(declared.draw(part=(3, slice(0, 4))))


# --- SVG ------------------------------------------------------------------------------


def drawings():
    part = (slice(0, 12), slice(0, 16))
    return [
        Layout.WGMMA.draw((64, 16), part),
        plgpu.SMEM((16, 64), jnp.float16, transforms=SWIZZLED).draw(part=part),
        TmemLayout.default().draw((128, 32), part),
        Layout.WG_SPLAT((4,)).draw(),
    ]


@pytest.mark.parametrize("drawing", drawings(), ids=lambda d: d.title.split(",")[0])
def test_svg_has_a_cell_for_each_element_with_its_texts(drawing):
    assert drawing.svg == drawing._repr_svg_()
    root = ElementTree.fromstring(drawing.svg)
    name = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{name}text")]
    boxes = list(root.iter(f"{name}rect"))
    cells = [cell for row in drawing.cells for cell in row]
    assert len(boxes) == len(cells) + 1
    assert texts[0] == drawing.title
    assert texts[-1] == drawing.legend
    assert [t for c in cells for t in (c.upper, c.lower)] == texts[
        1 + len(drawing.rows) + len(drawing.columns) : -1
    ]
    width, height = (float(root.get(x)) for x in ("width", "height"))
    for element in root.iter(f"{name}text"):
        assert 0 <= float(element.get("x")) <= width
        assert 0 <= float(element.get("y")) <= height


def test_neighbours_of_one_thread_have_no_line_between_them():
    root = ElementTree.fromstring(Layout.WGMMA.draw((64, 8)).svg)
    (path,) = root.iter("{http://www.w3.org/2000/svg}path")
    # The left edge, three lines between four threads, the right edge, in 64 rows.
    assert path.get("d").count("v") == 5 * 64


# --- parts ----------------------------------------------------------------------------


def test_a_part_is_that_part_of_the_whole():
    whole = Layout.WGMMA.draw((64, 16))
    part = Layout.WGMMA.draw((64, 16), part=(slice(8, 12), slice(4, 8)))
    assert part.title.endswith("a part of it")
    assert part.rows == ("8", "9", "10", "11")
    assert part.cells == tuple(row[4:8] for row in whole.cells[8:12])


def test_an_integer_selects_one_index():
    strided = WGStridedLayout((4, 8, 16), 4)
    drawing = strided.draw(part=(3, slice(0, 2), slice(0, 16)))
    assert drawing.rows == ("0", "1")
    assert drawing.cells[0][0].text == "3:0 r0.0"


def test_a_large_array_is_refused_with_a_part_that_can_be_drawn():
    with pytest.raises(LayoutError, match="too large to draw") as caught:
        Layout.WGMMA.draw((64, 128))
    part = re.search(r"part=(\(.*\))$", caught.value.hint)[1]
    assert len(Layout.WGMMA.draw((64, 128), part=eval(part)).rows) == 16
