# SPDX-License-Identifier: Apache-2.0
"""Products with scales of blocks on Blackwell, everywhere but on a card; refusals."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu.ops import BlockScaledMatmulConfig, block_scaled_matmul, quantize_blocks
from pallas_gpu.ops.gemm.blackwell import Schedule
from pallas_gpu.ops.gemm.problem import Problem
from tests.support import emulated, host
from tests.support.semantics import BOTH, Lane, Warpgroup

E4M3, E5M2, E2M1 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn
E8M0 = jnp.float8_e8m0fnu
SMALL = BlockScaledMatmulConfig(tile_n=128, stages=2, blocks=2, strip=2)
# Element types of both operands, the type of scales, and the elements of a block.
MXF8, MXF4, NVF4 = (
    (E4M3, E4M3, E8M0, 32),
    (E2M1, E2M1, E8M0, 32),
    (E2M1, E2M1, E4M3, 16),
)
MXF4_16, MIXED = (E2M1, E2M1, E8M0, 16), (E5M2, E4M3, E8M0, 32)
NAMES = {"mxf8": MXF8, "mxf4": MXF4, "nvf4": NVF4, "mxf4 of 16": MXF4_16, "e5m2": MIXED}


def config(**changes):
    return dataclasses.replace(SMALL, **changes)


def operands(shape, types, batch=()):
    """Both operands and their scales: powers of two, and small integers."""
    (m, n, k), (a, b, held, block) = shape, types
    rng = np.random.default_rng(0)

    def values(rows, dtype):
        return rng.integers(-3, 4, (*batch, rows, k)).astype(jnp.dtype(dtype))

    def scales(rows):
        made = 2.0 ** rng.integers(-2, 3, (*batch, rows, k // block))
        return made.astype(jnp.dtype(held))

    return values(m, a), values(n, b), scales(m), scales(n)


def reference(a, b, a_scales, b_scales):
    """By the definition of jax.nn.scaled_matmul, in float64."""
    left, right = (
        x.astype(np.float64)
        * np.repeat(s.astype(np.float64), x.shape[-1] // s.shape[-1], -1)
        for x, s in ((a, a_scales), (b, b_scales))
    )
    return left @ np.swapaxes(right, -1, -2)


def check(shape, types=MXF8, c=SMALL, out=jnp.float32, rtol=0.0, executed=(Warpgroup,)):
    given = operands(shape, types)

    def make(interpret):
        return functools.partial(
            block_scaled_matmul,
            preferred_element_type=out,
            config=c,
            interpret=interpret,
        )

    # Sums of small multiples of powers of two are exact in float32.
    expected = reference(*given)
    emulated.check(make, given, expected, executed, rtol=rtol, on_gpu=False)


@pytest.mark.parametrize("types", NAMES.values(), ids=NAMES)
def test_every_kind_of_scales(types):
    check((128, 128, 256), types)


@pytest.mark.smoke
def test_several_tiles_in_each_block():
    check((256, 256, 256), c=config(blocks=1), executed=BOTH)


@pytest.mark.parametrize("types", [MXF8, NVF4], ids=["mxf8", "nvf4"])
def test_tiles_of_256_columns_share_half_of_their_accumulators(types):
    # Three tiles for each block.
    c = config(tile_n=256, blocks=1)
    check((128, 768, 256), types, c, executed=[Lane] if types is MXF8 else ())


def shapes(types=MXF8, **changes):
    """Those of a tile of 256 columns."""
    *dtypes, block = types
    a, b, scale, out = (jnp.dtype(x) for x in (*dtypes, jnp.float32))
    problem = Problem(256, 512, 1024, a, out, right=b, scale_dtype=scale, group=block)
    return Schedule(problem, config(tile_n=256, **changes))


@pytest.mark.parametrize("types", NAMES.values(), ids=NAMES)
def test_two_accumulators_and_the_scales_fit_tensor_memory(types):
    made = shapes(types)
    scales = 3 * made.groups * 4
    assert made.tmem_columns == 384
    assert made.tmem_columns + scales <= 512


def test_the_epilogue_reads_the_shared_columns_first():
    schedule = shapes()
    half = range(0, 128, schedule.part_n)
    for which in (0, 1):
        parts = schedule.parts(which)
        columns = [start + 128 * which for start, _ in parts]
        assert columns[: len(half)] == [128 + start for start in half]
        assert sorted(columns) == [128 * which + x for x in range(0, 256, 16)]
        assert [is_free for _, is_free in parts].index(True) == len(half) - 1


def test_many_scales_leave_space_for_one_accumulator():
    changes = {"tile_k": 1024, "stages": 1, "collective": True}
    assert shapes(NVF4, **changes).tmem_columns == 256
    c = config(tile_n=256, **changes)
    check((256, 512, 1024), NVF4, c, executed=())


def test_an_early_release_of_the_shared_columns_is_a_race(monkeypatch):
    right = Schedule.parts

    def early(schedule, which):
        starts = [start for start, _ in right(schedule, which)]
        return [(start, i == 0) for i, start in enumerate(starts)]

    monkeypatch.setattr(Schedule, "parts", early)
    given = operands((128, 512, 128), MXF8)
    c = config(tile_n=256, blocks=1, stages=3)
    with pytest.raises(errors.RaceError, match="TMEM"):
        block_scaled_matmul(*given, config=c, interpret=True)


PAIRS = {"collective": True}
WIDE = PAIRS | {"tile_n": 256}


@pytest.mark.parametrize(
    ("shape", "types", "changes", "executed"),
    [
        # Any size.
        ((64, 64, 32), MXF8, {}, [Lane]),
        ((130, 200, 160), MXF8, {}, [Lane]),
        ((129, 67, 48), NVF4, {}, [Lane]),
        ((1, 300, 96), MXF4, {}, [Lane]),
        *((shape, MXF8, WIDE, ()) for shape in ((100, 300, 160), (300, 72, 96))),
        ((1, 8, 32), MXF8, WIDE, ()),
        # Steps of any depth.
        ((128, 128, 512), NVF4, {"tile_k": 64, "stages": 3}, ()),
        ((128, 128, 512), NVF4, {"tile_k": 128, "stages": 1}, ()),
        ((128, 128, 512), NVF4, {"tile_k": 256, "stages": 3}, ()),
        # The order of tiles covers them all.
        ((512, 256, 128), MXF8, {"minor": "m", "strip": 3, "blocks": 3}, ()),
        ((512, 256, 128), MXF8, {"minor": "n", "strip": 1, "blocks": 3}, ()),
        # Pairs of blocks share tiles; blocks take the next one when they are free.
        ((256, 128, 128), MXF8, PAIRS, [Warpgroup]),
        ((300, 256, 256), NVF4, PAIRS | {"stages": 3, "dynamic": True}, [Warpgroup]),
        ((256, 384, 256), MXF8, {"dynamic": True}, [Warpgroup]),
    ],
)
def test_sizes_and_schedules(shape, types, changes, executed):
    check(shape, types, config(**changes), executed=executed)


@pytest.mark.parametrize("out", [jnp.bfloat16, jnp.float16])
def test_types_of_the_result(out):
    check((128, 128, 128), out=out, rtol=2**-8)


def test_leading_dimensions_are_a_batch():
    given = operands((130, 64, 64), MXF8, batch=(2,))
    got = block_scaled_matmul(*given, config=SMALL)
    np.testing.assert_array_equal(np.asarray(got, np.float64), reference(*given))


def test_it_is_the_product_of_jax():
    given = [jnp.asarray(x) for x in operands((2, 64, 64), MXF8, batch=(1,))]
    np.testing.assert_array_equal(
        block_scaled_matmul(*given, config=SMALL), jax.nn.scaled_matmul(*given)
    )


def test_the_result_is_multiplied_by_a_factor():
    given = operands((128, 128, 128), NVF4)
    got = block_scaled_matmul(*given, scale=jnp.float32(0.5), config=SMALL)
    np.testing.assert_array_equal(np.asarray(got, np.float64), reference(*given) / 2)


# --- rounding -------------------------------------------------------------------------


@pytest.mark.parametrize("types", NAMES.values(), ids=NAMES)
def test_rounding_to_blocks(types):
    """Each value is the nearest one of the type under its block's scale."""
    dtype, _, held, block = types
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4 * block)).astype(np.float32)
    x[0, :block] = 0
    x[1] *= 100
    # Without the emitters that tests/conftest.py chooses: those round twice.
    quantize = jax.jit(
        functools.partial(quantize_blocks, dtype=dtype, scale_dtype=held, block=block),
        compiler_options={"xla_backend_extra_options": ""},
    )
    values, scales = quantize(jnp.asarray(x))
    assert (values.dtype, scales.dtype) == (dtype, held)
    assert scales.shape == (3, 4)
    wide = np.repeat(np.asarray(scales, np.float64), block, -1)
    got = np.asarray(values).astype(np.float64)
    limit = float(jnp.finfo(dtype).max)
    with np.errstate(invalid="ignore"):
        exact = np.clip(np.where(wide > 0, x / wide, 0), -limit, limit)
    rounded = exact.astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(got, rounded.astype(np.float64))
    largest = np.abs(x.reshape(3, 4, block)).max(-1)
    wanted = largest / limit
    if held == E8M0:
        least = np.maximum(wanted, 1e-9)
        wanted = np.where(largest > 0, 2.0 ** np.ceil(np.log2(least)), 1)
    wanted = wanted.astype(jnp.dtype(held)).astype(np.float64)
    np.testing.assert_array_equal(np.asarray(scales, np.float64), wanted)


def test_powers_of_two_are_represented_exactly():
    x = jnp.asarray([[448.0, 7.0] * 16, [2.0**-140] * 32, [2.0**100] * 32])
    values, scales = quantize_blocks(x)
    np.testing.assert_array_equal(np.asarray(scales[0], np.float32), 1.0)
    np.testing.assert_array_equal(np.asarray(values[0], np.float32), x[0])
    got = np.asarray(values[2], np.float64) * np.asarray(scales[2], np.float64)
    np.testing.assert_array_equal(got, 2.0**100)


@pytest.mark.parametrize("dtype", [E4M3, E2M1])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_block_with_what_is_not_finite_is_not_a_number(dtype, bad):
    x = jnp.ones((1, 64)).at[0, 3].set(bad)
    _, scales = quantize_blocks(x, dtype)
    nan = np.isnan(np.asarray(scales, np.float32))
    assert nan[0, 0] and not nan[0, 1:].any()


def test_rounded_operands_multiply():
    rng = np.random.default_rng(1)
    x, w = (host.array(rng.standard_normal((s, 256)), jnp.float32) for s in (64, 96))
    wide = np.asarray(x) @ np.asarray(w).T
    for dtype, most in ((E4M3, 0.05), (E2M1, 0.2)):
        (a, a_scales), (b, b_scales) = (quantize_blocks(v, dtype) for v in (x, w))
        got = block_scaled_matmul(a, b, a_scales, b_scales, config=SMALL)
        given = map(np.asarray, (a, b, a_scales, b_scales))
        np.testing.assert_allclose(got, reference(*given), atol=1e-4)
        assert np.linalg.norm(got - wide) < most * np.linalg.norm(wide)
