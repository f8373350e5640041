# SPDX-License-Identifier: Apache-2.0
"""What layouts and plans of accesses refuse, and what they say."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu.layouts import (
    Layout,
    LinearLayout,
    Replicated,
    SmemLayout,
    TiledLayout,
    Tiling,
    TmemLayout,
    WGSplatLayout,
    WGStridedLayout,
    plan_access,
    plan_copy,
)
from pallas_gpu.layouts.gmem.thread_copy import plan_threads
from pallas_gpu.layouts.moves.reductions import plan_reduction
from pallas_gpu.layouts.moves.relayout import plan_relayout
from pallas_gpu.layouts.registers import catalogue, placement
from pallas_gpu.layouts.registers.defaults import spread_layout
from pallas_gpu.layouts.smem import swizzle, wgmma_descriptor
from pallas_gpu.layouts.tmem import layout as tmem
from pallas_gpu.layouts.tmem.mma_instruction import Instruction
from pallas_gpu.layouts.tmem.scaled_instruction import ScaledInstruction
from pallas_gpu.layouts.tmem.transfer import plan_transfer
from pallas_gpu.layouts.window import Window
from tests.support.refusal import refused

WGMMA = catalogue.WGMMA.linear((128, 64))
SQUARE = catalogue.WGMMA.linear((64, 64))
ODD = Layout.WG_STRIDED((384, 3), vec_size=1)


def partition(*dims):
    """A tiled layout with the tiles of WGMMA."""
    return TiledLayout(catalogue.WGMMA.tiling, *dims)


def instruction(*types, m=128, n=64, ctas=1):
    """An instruction, which has types that exist if they are left out."""
    return Instruction(m, n, *(types or ("f32", "f16", "f16")), ctas=ctas)


def tiled(shape, bits=16):
    """SMEM with a swizzle of 128 bytes."""
    return SmemLayout(shape, bits, (8, 1024 // bits), 128)


def operand(layout, window=None, side="a"):
    """A plan of an operand of wgmma."""
    window = window or Window.whole(layout.shape)
    return wgmma_descriptor.plan_operand(layout, window, side)


def part(shape, starts):
    return Window.whole(shape).slice(starts, (64, 64))


REGISTERS = {
    "an element without an owner": lambda: LinearLayout.create(
        (128, 64), WGMMA.thread_columns, WGMMA.origins[:-1], 2, 1
    ),
    "axes that do not fit": lambda: WGMMA.broadcast_matches(WGMMA.reduce(1), (1,)),
    "half of a thread tile": lambda: WGMMA.slice((0, 0), (32, 64)),
    "a start inside of a thread tile": lambda: WGMMA.slice((8, 0), (64, 64)),
    "a slice outside": lambda: WGMMA.slice((64, 0), (128, 64)),
    "a reshape that breaks bits": lambda: catalogue.WGMMA.linear((64, 24)).reshape(
        (3, 512)
    ),
    "an axis outside": lambda: WGMMA.reduce(2),
    "padding merged into an axis": lambda: spread_layout((2, 1001)).reshape((2002,)),
    "padding of an axis of size 1": lambda: spread_layout((129,)).slice((128,), (1,)),
    "a register of padding": lambda: LinearLayout.create(
        (129,), spread_layout((129,)).thread_columns, [(0,), (128,), (256,)]
    ),
    "a placement of another shape": lambda: placement.place(SQUARE, (64, 128)),
    "a strided layout of another shape": lambda: placement.place(ODD, (3, 384)),
    "a splat of an array": lambda: placement.place_registers(Layout.WG_SPLAT, (64, 64)),
    "tiles that are cut": lambda: placement.reshape_placement(
        placement.place_registers(Layout.WGMMA, (64, 24)), (48, 32)
    ),
    "a reduction of all axes": lambda: catalogue.WGMMA.reduce((0, 1)),
    "no whole tiles": lambda: catalogue.WGMMA.linear((63, 8)),
    "no tiles": lambda: Tiling(()),
    "a tile without axes": lambda: Tiling(((),)),
    "a tile of more axes": lambda: Tiling(((8,), (8, 8))),
    "a tile of no elements": lambda: Tiling(((8, 0),)),
    "a tile that does not divide": lambda: Tiling(((8, 8), (3, 8))),
    "an axis twice": lambda: partition((-7,), (-3, -3), -1),
    "an axis that is not negative": lambda: partition((-7,), (0, -2), -1),
    "an axis outside of the tiles": lambda: partition((-8,), (-3, -2), -1),
    "too few warps": lambda: partition((-5,), (-3, -2), -1),
    "too few lanes": lambda: partition((-7,), (-3,), -1),
    "a vector that is not adjacent": lambda: partition(
        (-7,), (-3, -1, Replicated(2)), -2
    ),
    "no multiple of 128": lambda: WGStridedLayout.default((100,), 32),
    "no linear form": lambda: WGStridedLayout.default((128, 96), 32).linear(),
    "a splat of several": lambda: WGSplatLayout((8,)).linear(),
    "a fragment of 64-bit elements": lambda: Layout.MMA_LHS(jnp.float64),
    "another one": lambda: Layout.MMA_RHS(jnp.float64),
    "parameters that there are not": lambda: Layout.WGMMA(3),
    "parameters that are missing": lambda: Layout.WG_STRIDED.to_layout(),
    "a reduced splat": lambda: Layout.WG_SPLAT.reduce(0),
    "a reduction without a linear form": lambda: plan_reduction(
        placement.place(ODD, (384, 3)), (0,)
    ),
    "a relayout to another shape": lambda: plan_relayout(WGMMA, SQUARE, 32),
    "a relayout of 4 bits": lambda: plan_relayout(SQUARE, SQUARE, 4),
}

MEMORY = {
    "a window of parts of tiles": lambda: plan_access(
        catalogue.WGMMA.linear((64, 32)), tiled((64, 64)), kind="load", window=(64, 32)
    ),
    "a window of another shape": lambda: plan_access(
        SQUARE, SmemLayout((64, 128), 16), kind="load"
    ),
    "bank conflicts": lambda: plan_access(
        catalogue.WGMMA.linear((128, 128)).transpose((1, 0)),
        SmemLayout((128, 128), 16),
        kind="load",
    ),
    "an unknown swizzle": lambda: swizzle.swizzle_bytes(0, 48),
    "a tile that does not divide": lambda: SmemLayout((12, 64), 16, (8, 64)),
    "a tile that is not the swizzle's": lambda: SmemLayout((8, 64), 16, (8, 32), 128),
    "8 bits the other way": lambda: operand(tiled((64, 128), 8), side="b"),
    "32 bits the other way": lambda: operand(tiled((64, 128), 32), side="b"),
    "an operand that is not tiled": lambda: operand(SmemLayout((64, 64), 16)),
    "an operand of parts of tiles": lambda: operand(
        tiled((64, 128)), part((64, 128), (0, 32))
    ),
    "an operand of three axes": lambda: operand(tiled((2, 64, 64))),
    "an operand of parts of steps of K": lambda: operand(
        tiled((8, 64)), Window.whole((8, 64)).transpose((1, 0))
    ),
    "a block inside an atom": lambda: operand(tiled((64, 128)), side="b").offset_bytes(
        32, 0
    ),
    "elements that share bytes": lambda: plan_threads(
        Window.whole((8, 9)).slice((0, 1), (8, 3)),
        SmemLayout((8, 3), 4),
        Window.whole((8, 3)),
        store=False,
    ),
    "a minor dimension of 8 bytes": lambda: plan_copy(
        (64, 64), 16, (64, 4), (), SmemLayout((64, 4), 16)
    ),
    "an odd row stride": lambda: plan_copy(
        (64, 100), 8, (64, 64), (), SmemLayout((64, 64), 8)
    ),
    "a slice of another shape": lambda: plan_copy(
        (64, 64), 16, (32, 64), (), SmemLayout((64, 64), 16)
    ),
    "a window without a range for each axis": lambda: Window(
        (64, 8), (0,), (64, 8), (0, 1), (0, 0)
    ),
}

TENSOR_CORES = {
    "a packing of 3": lambda: TmemLayout.default(3),
    "a packing of 16": lambda: TmemLayout.default(16),
    "a packing of 2 scales": lambda: TmemLayout(tmem.TmemKind.SCALES, 2),
    "a tile width": lambda: TmemLayout(tmem.TmemKind.DEFAULT, 1, 32),
    "24 columns": lambda: TmemLayout.half_lane(24),
    "no columns": lambda: TmemLayout.m64_collective(0),
    "64 rows": lambda: TmemLayout.default().columns((64, 32)),
    "256 rows": lambda: TmemLayout.default().columns((256, 32)),
    "6 columns in fours": lambda: TmemLayout.default(4).columns((128, 6)),
    "one axis": lambda: TmemLayout.default().columns((128,)),
    "48 columns in tiles of 32": lambda: TmemLayout.half_lane(32).columns((64, 48)),
    "64 rows of scales": lambda: TmemLayout.scales().columns((64, 4)),
    "more columns than TMEM": lambda: TmemLayout.default().columns((128, 1024)),
    "tiles of registers": lambda: TmemLayout.from_tiled(catalogue.WGMMA),
    "a transfer without an instruction": lambda: plan_transfer(
        placement.place_registers(Layout.WGMMA, (128, 64)), TmemLayout.default(), 32
    ),
    "f16 by bf16": lambda: instruction("f32", "f16", "bf16"),
    "e4m3 by s8": lambda: instruction("f32", "e4m3", "s8"),
    "f64": lambda: instruction("f32", "f64", "f64"),
    "bf16 to f16": lambda: instruction("f16", "bf16", "bf16"),
    "s8 to f32": lambda: instruction("f32", "s8", "s8"),
    "tf32 to f16": lambda: instruction("f16", "tf32", "tf32"),
    "m of 32": lambda: instruction(m=32),
    "n of 264": lambda: instruction(n=264),
    "n of 12": lambda: instruction(n=12),
    "m of 256": lambda: instruction(m=256),
    "m of 64 in a pair": lambda: instruction(m=64, ctas=2),
    "n of 24 in a pair": lambda: instruction(n=24, ctas=2),
    "n of 272 in a pair": lambda: instruction(m=256, n=272, ctas=2),
    "n of 48 integers in a pair": lambda: instruction(
        "s32", "s8", "s8", m=256, n=48, ctas=2
    ),
    "n of 0, scaled": lambda: ScaledInstruction(0, "e4m3", "e4m3", "ue8m0", 32),
    "n of 12, scaled": lambda: ScaledInstruction(12, "e4m3", "e4m3", "ue8m0", 32),
    "n of 264, scaled": lambda: ScaledInstruction(264, "e4m3", "e4m3", "ue8m0", 32),
    "m of 64, scaled": lambda: ScaledInstruction(
        64, "e4m3", "e4m3", "ue8m0", 32, rows=64
    ),
    "scaled f16": lambda: ScaledInstruction(64, "f16", "f16", "ue8m0", 32),
    "e4m3 by e2m1": lambda: ScaledInstruction(64, "e4m3", "e2m1", "ue8m0", 32),
    "blocks of 16": lambda: ScaledInstruction(64, "e4m3", "e4m3", "ue8m0", 16),
    "other scales": lambda: ScaledInstruction(64, "e4m3", "e4m3", "ue4m3", 32),
    "blocks of 32": lambda: ScaledInstruction(64, "e2m1", "e2m1", "ue4m3", 32),
}

DRAWINGS = {
    "a part of one axis": lambda: Layout.WGMMA.draw((64, 8), part=(0,)),
    "an index outside": lambda: Layout.WGMMA.draw((64, 8), part=(0, 64)),
    "an empty part": lambda: Layout.WGMMA.draw((64, 8), part=(slice(5, 5), 0)),
    "a text as a part": lambda: Layout.WGMMA.draw((64, 8), part="x"),
    "a part with a step": lambda: Layout.WGMMA.draw((64, 8), part=(slice(0, 8, 2), 0)),
    "a fraction": lambda: Layout.WGMMA.draw((64, 8), part=(1.5, 0)),
    "a list": lambda: Layout.WGMMA.draw((64, 8), part=[1, 2]),
    "no shape": lambda: Layout.WGMMA.draw(),
    "another shape": lambda: WGStridedLayout((128,), 1).draw((256,)),
    "GMEM": lambda: plgpu.GMEM((8, 128), jnp.float32).draw(),
}


@pytest.mark.parametrize("case", REGISTERS)
@refused
def test_a_layout_of_registers_is_refused(case):
    REGISTERS[case]()


@pytest.mark.parametrize("case", MEMORY)
@refused
def test_an_access_of_memory_is_refused(case):
    MEMORY[case]()


@pytest.mark.parametrize("case", TENSOR_CORES)
@refused
def test_a_layout_or_an_instruction_of_tensor_cores_is_refused(case):
    TENSOR_CORES[case]()


@pytest.mark.parametrize("case", DRAWINGS)
@refused
def test_a_drawing_is_refused(case):
    DRAWINGS[case]()
