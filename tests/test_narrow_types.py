# SPDX-License-Identifier: Apache-2.0
"""Narrow types: conversions to them round once, and their elements move.

Integers of 2 and 4 bits, float8, float4_e2m1fn and float8_e8m0fnu: in the emulator, and
as emitted code on the CPU under both semantics.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support.everywhere import check, elementwise, run
from tests.support.semantics import Warpgroup

INTEGERS = ["int4", "uint4", "int2", "uint2"]
FLOATS = ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "float8_e8m0fnu"]
NARROW = [*INTEGERS, *FLOATS]
PACKED = [*INTEGERS, "float4_e2m1fn"]


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def bits(dtype: str) -> int:
    return 8 if dtype.startswith("float8") else 2 if dtype.endswith("2") else 4


def values(dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Every value of a type, as often as fit into a shape, in a mixed order."""
    codes = np.arange(np.prod(shape)) * 37 % (1 << bits(dtype))
    raw = codes.astype(np.uint8).reshape(shape)
    if "uint" in dtype:
        return raw.astype(dtype)
    if dtype in INTEGERS:
        sign = 1 << bits(dtype) - 1
        return ((raw.astype(np.int8) ^ sign) - sign).astype(dtype)
    return raw.view(dtype)


def by_jax(function: Callable[..., Any], *args: Any) -> np.ndarray:
    # Without the emitters of old that tests/conftest.py chooses: they take NaN and
    # subnormal numbers to other values of narrow types.
    options = {"xla_backend_extra_options": ""}
    return np.asarray(jax.jit(function, compiler_options=options)(*args))


def to_each(dtypes: Sequence[str]) -> Callable[[Any], Callable[..., Any]]:
    """A kernel that converts an array to several types; each CTA has 8192 elements."""

    def body(x, *outs):
        rows = plgpu.ds(lax.axis_index("i") * 64, 64)
        for out in outs:
            out[rows, :] = x[rows, :].astype(out.dtype)

    def make(interpret):
        def call(x):
            out = [jax.ShapeDtypeStruct(x.shape, d) for d in dtypes]
            grid = (x.shape[0] // 64,)
            return plgpu.kernel(
                body, out_type=out, grid=grid, grid_names=("i",), interpret=interpret
            )(x)

        return call

    return make


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_converts_to_every_narrow_float_as_in_jax(dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(512, 128)
    expected = [by_jax(lambda a, t=t: a.astype(t), x) for t in FLOATS]
    check(to_each(FLOATS), [x], expected, executed=[Warpgroup])


def numbers(dtype: str) -> np.ndarray:
    """Numbers of all sizes, and those at and beside ties and limits."""
    rng = np.random.default_rng(0)
    sizes = 2.0 ** rng.uniform(-30, 20, 8192) * rng.choice([-1, 1], 8192)
    edges = [1.125, 1.0625, 2.5, 464, 61440, 1.5, 3, 0.25, 5, 1.25, 0.75, 448, 6]
    steps = np.array([0, 1e-3, -1e-3, 1e-5, -1e-5, 1e-9, -1e-9, 1e-12, -1e-12])
    exact = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e38, -1e38, 2.0**-126, 2.0**127 * 1.6]
    special = [*(np.array(edges)[:, None] * (1 + steps)).ravel(), *exact]
    sizes[: len(special)] = special
    return sizes.astype(dtype).reshape(64, 128)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_floats_convert_to_narrow_ones_with_one_rounding(dtype):
    x = numbers(dtype)
    expected = [by_jax(lambda a, t=t: a.astype(t), x) for t in NARROW]
    check(to_each(NARROW), [x], expected, executed=[Warpgroup])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_convert_to_narrow_types_as_in_jax(dtype):
    rng = np.random.default_rng(0)
    x = rng.integers(-(2**31), 2**31, (64, 128))
    x.reshape(-1)[:512] = np.arange(-256, 256)
    x = x.astype(dtype)
    expected = [by_jax(lambda a, t=t: a.astype(t), x) for t in NARROW]
    check(to_each(NARROW), [x], expected, executed=[Warpgroup])


# --- reductions -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int4", "uint2", "float8_e5m2", "float4_e2m1fn"])
def test_reductions_and_scans(dtype):
    x = values(dtype, (64, 128))
    if dtype in FLOATS:
        # Exact sums: they do not depend on the order.
        x = (np.arange(64 * 128).reshape(64, 128) % 3 == 0).astype(dtype)
    wide = np.float32 if dtype in FLOATS else np.int64

    def body(x, total, rows, low, sums):
        total[...] = jnp.broadcast_to(jnp.max(x[...]), (128,))
        rows[...] = lax.reduce_sum(x[...], (0,))
        low[...] = lax.reduce_min(x[...], (1,))
        sums[...] = lax.cumsum(x[...], axis=0)

    numbers = x.astype(wide)
    expected = [
        np.full(128, numbers.max()),
        numbers.sum(0),
        numbers.min(1),
        numbers.cumsum(0),
    ]
    run(body, [x], [by_jax(lambda a: a.astype(dtype), e) for e in expected])


# --- memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int4", "uint2"])
@pytest.mark.parametrize("combine", ["add", "max"])
def test_updates_of_chosen_elements_are_combined(dtype, combine):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 3, (5, 9)), dtype)

    def update(x):
        return getattr(x.at[jnp.array([1, 1, 2])], combine)(x[:3])

    def body(x, o):
        o[...] = update(x[...])

    wide = update(x.astype(np.int32)).astype(dtype)
    run(body, [np.asarray(x)], np.asarray(wide))


@pytest.mark.parametrize("dtype", PACKED)
def test_tma_copies_packed_arrays(dtype):
    x = values(dtype, (64, 256))

    def body(x_ref, out, smem, barrier):
        source = x_ref.at[plgpu.ds(8, 32), plgpu.ds(128, 128)]
        plgpu.copy_gmem_to_smem(source, smem, barrier)
        plgpu.barrier_wait(barrier)
        smem[...] = smem[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out)
        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM((32, 128), x.dtype)
    run(body, [x], x[8:40, 128:], tile, plgpu.Barrier())


@pytest.mark.parametrize("dtype", ["int4", "float4_e2m1fn"])
def test_tma_tiles_and_swizzles_packed_arrays(dtype):
    x = values(dtype, (64, 256))
    transforms = (plgpu.TilingTransform((8, 256)), plgpu.SwizzleTransform(128))

    def body(x_ref, out, smem, barrier):
        plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
        plgpu.barrier_wait(barrier)
        out[...] = plgpu.load(smem, layout=plgpu.Layout.WGMMA, optimized=False)

    tile = plgpu.SMEM(x.shape, x.dtype, transforms=transforms)
    run(body, [x], x, tile, plgpu.Barrier())


@pytest.mark.parametrize("dtype", ["int4", "uint2"])
@pytest.mark.parametrize("shape", [(1,), (5, 7), (33, 3), (129,), (7, 128)])
def test_rows_that_do_not_fill_bytes(dtype, shape):
    x = values(dtype, shape)
    check(elementwise(lambda a: a, dtype, shape=shape), [x], x)


@pytest.mark.parametrize("dtype", ["int4", "uint2"])
def test_parts_at_odd_starts_of_gmem_and_smem(dtype):
    x = values(dtype, (16, 33))

    def body(x_ref, out, smem):
        row = lax.axis_index("i")
        smem[...] = jnp.zeros_like(smem)
        smem[3, 1:30] = x_ref[row, 3:32]
        out[row, 2:31] = smem[3, 1:30]
        out[row, 0] = smem[3, 2]
        out[row, 1] = x_ref[row, row]
        out[row, 31:33] = smem[0, 0:2]

    expected = np.zeros_like(x)
    expected[:, 2:31] = x[:, 3:32]
    expected[:, 0] = x[:, 4]
    expected[:, 1] = np.diagonal(x)
    run(body, [x], expected, plgpu.SMEM((5, 31), x.dtype), grid={"i": 16})


LAYOUTS = [
    plgpu.Layout.WGMMA,
    plgpu.Layout.WGMMA_UPCAST_2X,
    plgpu.Layout.WGMMA_UPCAST_4X,
    plgpu.Layout.WG_STRIDED((64, 128), 1),
]


@pytest.mark.parametrize("dtype", ["int4", "int2"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_relayouts(dtype, layout):
    x = values(dtype, (64, 128))

    def body(x_ref, out):
        cast = plgpu.layout_cast(x_ref[...], layout)
        out[...] = plgpu.layout_cast(cast, plgpu.Layout.WGMMA).astype(out.dtype)

    run(body, [x], x.astype(np.float32))


@pytest.mark.parametrize("dtype", ["int4", "float4_e2m1fn", "float8_e8m0fnu"])
def test_loops_branches_and_blocks(dtype):
    x = values(dtype, (128, 64))

    def body(x_ref, o_ref):
        def step(i, carry):
            return jnp.where(carry == carry, carry, jnp.ones_like(carry))

        held = lax.fori_loop(0, 3, step, x_ref[...])
        o_ref[...] = lax.cond(
            plgpu.program_id(0) >= 0, lambda: held, lambda: jnp.ones_like(held)
        )

    def make(interpret):
        block = plgpu.BlockSpec((64, 64), lambda i: (i, 0))
        return plgpu.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(2,),
            in_specs=[block],
            out_specs=block,
            interpret=interpret,
        )

    expected = by_jax(lambda a: jnp.where(a == a, a, jnp.ones_like(a)), x)
    check(make, [x], expected)


# --- instructions ---------------------------------------------------------------------


@pytest.mark.offline
@pytest.mark.parametrize(
    ("source", "target", "most"),
    [
        ("int4", "bfloat16", {"prmt": 32, "add": 32, "shr": 17, "cvt": 0}),
        ("uint4", "float16", {"prmt": 32, "add": 32, "shr": 17, "cvt": 0}),
        ("int4", "float32", {"fma": 48, "add": 16, "shr": 1, "cvt": 0}),
        ("int4", "int8", {"prmt": 16, "mad": 16, "shr": 17, "cvt": 0}),
    ],
)
def test_loaded_words_convert_without_an_instruction_for_each_shift(
    source, target, most
):
    make = elementwise(lambda a: a.astype(target), target)
    x = jax.ShapeDtypeStruct((64, 128), source)
    (report,) = plgpu.offline.compile(make(None), x)
    # 64 elements a thread, in registers of four. Addresses are 64-bit sums.
    opcodes = re.findall(r"^\s+([a-z]\w*)(?:\.\w+)*?\.(\w+)\s", report.ptx, re.M)
    counts = collections.Counter(name for name, kind in opcodes if kind != "s64")
    assert {name: counts[name] for name in most} == {
        name: counts[name] for name in most if counts[name] <= most[name]
    }
