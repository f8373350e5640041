# SPDX-License-Identifier: Apache-2.0
"""Declarations of arrays in tensor memory: layout, packing, pairs of CTAs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.layouts import TmemLayout
from pallas_gpu.types import KernelRef, describe
from tests.support.refusal import refused

F32, BF16 = jnp.float32, jnp.bfloat16
F8 = jnp.float8_e4m3fn


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "layout", "columns"),
    [
        ((128, 64), F32, {}, TmemLayout.default(), 64),
        ((128, 64), BF16, {"packed": True}, TmemLayout.default(2), 32),
        ((128, 64), BF16, {"packed": False}, TmemLayout.default(), 64),
        ((128, 64), F8, {"packed": True}, TmemLayout.default(4), 16),
        ((64, 64), F32, {}, TmemLayout.half_lane(64), 32),
        ((64, 64), F32, {"collective": True}, TmemLayout.m64_collective(64), 32),
        ((2, 128, 64), F32, {}, TmemLayout.default(), 128),
        ((256, 8), F8, {"layout": TmemLayout.scales()}, TmemLayout.scales(), 16),
    ],
)
def test_a_declaration_has_a_layout_and_columns(shape, dtype, options, layout, columns):
    ref = plgpu.TMEM(shape, dtype, **options).to_ref()
    assert ref.storage.layout == layout
    assert ref.storage.packed == (layout.packing > 1)
    assert ref.storage.collective == options.get("collective", False)
    assert plgpu.TMEM.size(ref) == columns


def test_references_of_different_declarations_differ():
    declarations = [
        plgpu.TMEM((64, 64), BF16, packed=True),
        plgpu.TMEM((64, 64), BF16, packed=False),
        plgpu.TMEM((64, 64), BF16, packed=False, collective=True),
        plgpu.TMEM((64, 64), BF16, layout=TmemLayout.half_lane(64, 2), collective=True),
    ]
    assert len({d.to_ref() for d in declarations}) == len(declarations)
    assert declarations[0].to_ref() == declarations[0].to_ref()
    by_layout = plgpu.TMEM((64, 64), BF16, layout=TmemLayout.half_lane(64, 2))
    assert by_layout.to_ref() == declarations[0].to_ref()


def test_an_update_keeps_the_declaration():
    ref = plgpu.TMEM((128, 64), BF16, packed=True, collective=True).to_ref()
    part = ref.update(inner_aval=jax.core.ShapedArray((128, 32), BF16))
    assert isinstance(part, KernelRef) and part.memory_space is plgpu.TMEM
    assert (part.shape, part.storage) == ((128, 32), ref.storage)


def test_the_declaration_shows_in_jaxprs_and_messages():
    ref = plgpu.TMEM((128, 64), BF16, packed=True, collective=True).to_ref()
    layout = "the default layout with 2 elements per column, collective"
    assert str(ref) == f"Ref<tmem>{{bfloat16[128,64], {layout}}}"
    assert describe(ref) == f"TMEM bfloat16[128, 64] in {layout}"


# --- refusals -------------------------------------------------------------------------


def test_narrow_elements_need_packed_or_a_layout():
    with refused(
        errors.ArgumentError,
        "TMEM: an element type narrower than a column needs packed or layout",
        expected="packed=True",
        got="bfloat16 without either",
        hint="operands",
    ):
        plgpu.TMEM((128, 64), BF16)  # HERE


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.bool_, jnp.float64])
def test_an_element_fits_a_column(dtype):
    with refused(
        errors.DTypeError,
        "TMEM: an element does not fit a column",
        expected="at most 32 bits",
        got=jnp.dtype(dtype).name,
        hint="float32",
    ):
        plgpu.TMEM((128, 64), dtype, packed=False)  # HERE


def test_packed_and_layout_exclude_each_other():
    with refused(
        errors.ArgumentError,
        "TMEM: packed and layout exclude each other",
        got="packed=True, layout=the default layout",
        hint="drop packed",
    ):
        plgpu.TMEM((128, 64), BF16, packed=True, layout=TmemLayout.default())  # HERE


@pytest.mark.parametrize("layout", ["nonsense", plgpu.Layout.TCGEN05])
def test_a_layout_is_one_of_tensor_memory(layout):
    with refused(
        errors.ArgumentTypeError,
        "TMEM: layout is not a layout of tensor memory",
        expected="a TmemLayout",
        got=repr(layout),
    ):
        plgpu.TMEM((128, 64), F32, layout=layout)  # HERE


@pytest.mark.parametrize("name", ["packed", "collective"])
def test_flags_are_bools(name):
    with refused(errors.ArgumentTypeError, f"TMEM: {name} is not a bool", got="'yes'"):
        plgpu.TMEM((128, 64), F32, **{name: "yes"})  # HERE


@pytest.mark.parametrize("rows", [1, 32, 63, 256])
def test_rows_are_those_of_an_accumulator(rows):
    with refused(
        errors.ShapeError,
        "TMEM: an array has an unsupported number of rows",
        expected="128 or 64 rows",
        got=f"{rows} rows",
        hint="128",
    ):
        plgpu.TMEM((rows, 64), F32)  # HERE


@pytest.mark.parametrize("options", [{}, {"layout": TmemLayout.default()}], ids=str)
def test_an_array_has_rows_and_columns(options):
    with refused(
        errors.ShapeError,
        "TMEM: an array needs rows and columns",
        expected="two dimensions",
        got="(128,)",
    ):
        plgpu.TMEM((128,), F32, **options)  # HERE


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((64, 64), TmemLayout.default()),
        ((128, 64), TmemLayout.half_lane(64)),
        ((64, 64), TmemLayout.m64_collective(48)),
    ],
)
def test_a_layout_fits_the_shape(shape, layout):
    with refused(
        errors.LayoutError,
        f"the {layout.kind.value} layout of TMEM does not support this shape",
        got=str(shape),
    ):
        plgpu.TMEM(shape, F32, layout=layout)  # HERE


@pytest.mark.parametrize(
    ("dtype", "layout", "expected"),
    [
        (F32, TmemLayout.default(2), "at most 16 bits"),
        (BF16, TmemLayout.scales(), "8 bits"),
        (jnp.int4, TmemLayout.scales(), "8 bits"),
    ],
)
def test_the_elements_fit_the_packing_of_the_layout(dtype, layout, expected):
    with refused(
        errors.DTypeError,
        "TMEM: the element type does not fit the layout",
        expected=expected,
        got=jnp.dtype(dtype).name,
    ):
        plgpu.TMEM((128, 64), dtype, layout=layout)  # HERE


@pytest.mark.parametrize("shape", [(64, 24), (64, 8)])
def test_the_columns_of_64_rows_are_halved(shape):
    with refused(
        errors.LayoutError,
        "the half-lane layout of TMEM halves whole 8-column tiles",
        expected="a multiple of 16 columns",
        got=str(shape[1]),
        hint="pad",
    ):
        plgpu.TMEM(shape, F32)  # HERE


def test_one_array_has_at_most_all_columns():
    assert plgpu.TMEM.size(plgpu.TMEM((128, 512), F32).to_ref()) == 512
    with refused(
        errors.LayoutError,
        "an array has more columns than TMEM",
        expected="512",
        got="513 columns",
    ):
        plgpu.TMEM((128, 513), F32)  # HERE
