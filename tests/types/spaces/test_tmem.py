# SPDX-License-Identifier: Apache-2.0
"""Declarations of arrays in tensor memory: layout, packing, pairs of CTAs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
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


@refused
def test_narrow_elements_need_packed_or_a_layout():
    plgpu.TMEM((128, 64), BF16)  # HERE


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.bool_, jnp.float64])
@refused
def test_an_element_fits_a_column(dtype):
    plgpu.TMEM((128, 64), dtype, packed=False)  # HERE


@refused
def test_packed_and_layout_exclude_each_other():
    plgpu.TMEM((128, 64), BF16, packed=True, layout=TmemLayout.default())  # HERE


@pytest.mark.parametrize("layout", ["nonsense", plgpu.Layout.TCGEN05])
@refused
def test_a_layout_is_one_of_tensor_memory(layout):
    plgpu.TMEM((128, 64), F32, layout=layout)  # HERE


@pytest.mark.parametrize("name", ["packed", "collective"])
@refused
def test_flags_are_bools(name):
    plgpu.TMEM((128, 64), F32, **{name: "yes"})  # HERE


@pytest.mark.parametrize("rows", [1, 32, 63, 256])
@refused
def test_rows_are_those_of_an_accumulator(rows):
    plgpu.TMEM((rows, 64), F32)  # HERE


@pytest.mark.parametrize("options", [{}, {"layout": TmemLayout.default()}], ids=str)
@refused
def test_an_array_has_rows_and_columns(options):
    plgpu.TMEM((128,), F32, **options)  # HERE


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((64, 64), TmemLayout.default()),
        ((128, 64), TmemLayout.half_lane(64)),
        ((64, 64), TmemLayout.m64_collective(48)),
    ],
)
@refused
def test_a_layout_fits_the_shape(shape, layout):
    plgpu.TMEM(shape, F32, layout=layout)  # HERE


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (F32, TmemLayout.default(2)),
        (BF16, TmemLayout.scales()),
        (jnp.int4, TmemLayout.scales()),
    ],
)
@refused
def test_the_elements_fit_the_packing_of_the_layout(dtype, layout):
    plgpu.TMEM((128, 64), dtype, layout=layout)  # HERE


@pytest.mark.parametrize("shape", [(64, 24), (64, 8)])
@refused
def test_the_columns_of_64_rows_are_halved(shape):
    plgpu.TMEM(shape, F32)  # HERE


@refused
def test_one_array_has_at_most_all_columns():
    assert plgpu.TMEM.size(plgpu.TMEM((128, 512), F32).to_ref()) == 512
    plgpu.TMEM((128, 513), F32)  # HERE
