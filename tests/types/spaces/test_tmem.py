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
        ((128, 512), F32, {}, TmemLayout.default(), 512),
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


def tmem(*shape, dtype=F32, **options):
    return lambda: plgpu.TMEM(shape, dtype, **options)  # HERE


SCALES, DEFAULT = TmemLayout.scales(), TmemLayout.default()
MISTAKES = {
    "narrow elements without packed or a layout": tmem(128, 64, dtype=BF16),
    "complex elements": tmem(128, 64, dtype=jnp.complex64, packed=False),
    "bools": tmem(128, 64, dtype=jnp.bool_, packed=False),
    "elements of 64 bits": tmem(128, 64, dtype=jnp.float64, packed=False),
    "packed and a layout": tmem(128, 64, dtype=BF16, packed=True, layout=DEFAULT),
    "a text as layout": tmem(128, 64, layout="nonsense"),
    "a layout of registers": tmem(128, 64, layout=plgpu.Layout.TCGEN05),
    "packed is no bool": tmem(128, 64, packed="yes"),
    "collective is no bool": tmem(128, 64, collective="yes"),
    "1 row": tmem(1, 64),
    "32 rows": tmem(32, 64),
    "63 rows": tmem(63, 64),
    "256 rows": tmem(256, 64),
    "no columns": tmem(128),
    "no columns with a layout": tmem(128, layout=DEFAULT),
    "64 rows in the default layout": tmem(64, 64, layout=DEFAULT),
    "128 rows in half the lanes": tmem(128, 64, layout=TmemLayout.half_lane(64)),
    "fewer columns": tmem(64, 64, layout=TmemLayout.m64_collective(48)),
    "wide elements in a packed layout": tmem(128, 64, layout=TmemLayout.default(2)),
    "scales of 16 bits": tmem(128, 64, dtype=BF16, layout=SCALES),
    "scales of 4 bits": tmem(128, 64, dtype=jnp.int4, layout=SCALES),
    "64 rows of 24 columns": tmem(64, 24),
    "64 rows of 8 columns": tmem(64, 8),
    "more columns than there are": tmem(128, 513),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
@refused
def test_what_tensor_memory_does_not_hold_is_refused(mistake):
    mistake()
