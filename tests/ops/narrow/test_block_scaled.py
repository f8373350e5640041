# SPDX-License-Identifier: Apache-2.0
"""Products with scales of blocks on Blackwell, everywhere but on a card; refusals."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.ops import BlockScaledMatmulConfig, block_scaled_matmul, quantize_blocks
from pallas_gpu.ops.gemm.blackwell import Schedule
from pallas_gpu.ops.narrow.block_scaled_blackwell import Problem, Shapes
from tests.support import everywhere, host
from tests.support.refusal import refused

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


def check(shape, types=MXF8, c=SMALL, out=jnp.float32, rtol=0.0, **how):
    given = operands(shape, types)

    def make(interpret):
        return functools.partial(
            block_scaled_matmul,
            preferred_element_type=out,
            config=c,
            interpret=interpret,
        )

    # Sums of small multiples of powers of two are exact in float32.
    everywhere.check(make, given, reference(*given), rtol=rtol, on_gpu=False, **how)


@pytest.mark.parametrize("types", NAMES.values(), ids=NAMES)
def test_every_kind_of_scales(types):
    check((128, 128, 256), types)


@pytest.mark.slow
@pytest.mark.smoke
def test_several_tiles_in_each_block():
    check((256, 256, 256), c=config(blocks=1))


@pytest.mark.parametrize("types", [MXF8, NVF4], ids=["mxf8", "nvf4"])
def test_tiles_of_256_columns_share_half_of_their_accumulators(types):
    # Three tiles for each block.
    c = config(tile_n=256, blocks=1)
    lane = [plgpu.LoweringSemantics.Lane]
    check((128, 768, 256), types, c, executed=lane if types is MXF8 else ())


def shapes(types=MXF8, **changes):
    """Those of a tile of 256 columns."""
    *dtypes, block = types
    a, b, scale, out = (jnp.dtype(x) for x in (*dtypes, jnp.float32))
    problem = Problem(256, 512, 1024, a, b, scale, out, block, False)
    return Shapes(problem, config(tile_n=256, **changes))


@pytest.mark.parametrize("types", NAMES.values(), ids=NAMES)
def test_two_accumulators_and_the_scales_fit_tensor_memory(types):
    made = shapes(types)
    scales = 3 * made.groups * 4
    assert made.schedule.tmem_columns == 384
    assert made.schedule.tmem_columns + scales <= 512


def test_the_epilogue_reads_the_shared_columns_first():
    schedule = shapes().schedule
    half = range(0, 128, schedule.part_n)
    for which in (0, 1):
        parts = schedule.parts(which)
        columns = [start + 128 * which for start, _ in parts]
        assert columns[: len(half)] == [128 + start for start in half]
        assert sorted(columns) == [128 * which + x for x in range(0, 256, 16)]
        assert [is_free for _, is_free in parts].index(True) == len(half) - 1


def test_many_scales_leave_space_for_one_accumulator():
    changes = {"tile_k": 1024, "stages": 1, "collective": True}
    assert shapes(NVF4, **changes).schedule.tmem_columns == 256
    c = config(tile_n=256, **changes)
    check((256, 512, 1024), NVF4, c, semantics=())


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


@pytest.mark.parametrize(
    ("shape", "types"),
    [
        ((64, 64, 32), MXF8),
        ((130, 200, 160), MXF8),
        ((129, 67, 48), NVF4),
        ((1, 300, 96), MXF4),
    ],
)
def test_any_size(shape, types):
    check(shape, types, executed=[plgpu.LoweringSemantics.Lane])


@pytest.mark.parametrize("out", [jnp.bfloat16, jnp.float16])
def test_types_of_the_result(out):
    check((128, 128, 128), out=out, rtol=2**-8)


@pytest.mark.parametrize(("k", "stages"), [(64, 3), (128, 1), (256, 3)])
def test_steps_of_any_depth(k, stages):
    check((128, 128, 512), NVF4, config(tile_k=k, stages=stages), executed=())


@pytest.mark.parametrize("minor", ["m", "n"])
@pytest.mark.parametrize("strip", [1, 3])
def test_the_order_of_tiles_covers_them_all(minor, strip):
    c = config(minor=minor, strip=strip, blocks=3)
    check((512, 256, 128), MXF8, c, executed=())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "types", "changes"),
    [
        ((256, 128, 128), MXF8, {}),
        ((768, 256, 256), NVF4, {"stages": 3, "dynamic": True}),
    ],
)
def test_pairs_of_blocks_share_tiles(shape, types, changes):
    check(shape, types, config(collective=True, **changes))


@pytest.mark.parametrize("shape", [(100, 300, 160), (300, 72, 96), (1, 8, 32)])
def test_pairs_and_any_size(shape):
    check(shape, MXF8, config(collective=True, tile_n=256), executed=())


@pytest.mark.slow
def test_blocks_take_the_next_tile_when_they_are_free():
    check((256, 384, 256), MXF8, config(dynamic=True))


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


@pytest.mark.parametrize("asynchrony", ["eager", "late", "random"])
def test_no_schedule_has_a_race(asynchrony):
    # Three tiles for each block.
    given = operands((256, 384, 256), MXF8)
    interpret = plgpu.InterpretParams(
        asynchrony=asynchrony, detect_races=True, schedules=6
    )
    for tile_n in (128, 256):
        c = config(stages=3, tile_n=tile_n, collective=tile_n == 256)
        got = block_scaled_matmul(*given, config=c, interpret=interpret)
        np.testing.assert_array_equal(np.asarray(got, np.float64), reference(*given))


# --- compiled -------------------------------------------------------------------------


@pytest.mark.offline
@pytest.mark.parametrize("semantics", plgpu.LoweringSemantics)
@pytest.mark.parametrize("collective", [False, True])
@pytest.mark.parametrize(
    ("types", "kind", "steps", "copies"),
    [
        (MXF8, "mxf8f6f4.block_scale.scale_vec::1X", 4, 3),
        (MXF4, "mxf4nvf4.block_scale.scale_vec::2X", 4, 6),
        (NVF4, "mxf4nvf4.block_scale.scale_vec::4X", 4, 12),
    ],
    ids=["mxf8", "mxf4", "nvf4"],
)
def test_a_large_product_compiles_without_spills(
    types, kind, steps, copies, collective, semantics
):
    """In a step: an instruction for each 32 bytes of K, a copy for each 512 scales."""
    a, b, held, block = types
    params = plgpu.CompilerParams(lowering_semantics=semantics)
    given = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((4096, 4096), a),
            ((4096, 4096), b),
            ((4096, 4096 // block), held),
            ((4096, 4096 // block), held),
        )
    ]
    product = functools.partial(
        block_scaled_matmul,
        preferred_element_type=jnp.bfloat16,
        config=BlockScaledMatmulConfig(collective=collective),
        compiler_params=params,
    )
    (report,) = plgpu.offline.compile(product, *given, target="sm_100a")
    used = report.resources
    assert used.spill_store_bytes == used.spill_load_bytes == 0
    group = f"cta_group::{1 + collective}"
    found = re.findall(rf"tcgen05\.mma\.{group}\.kind::([\w.:]+)", report.ptx)
    assert found == [kind] * steps
    assert report.ptx.count(f"tcgen05.cp.{group}.32x128b.warpx4 ") == copies
    assert report.instruction_counts["tcgen05.commit"] == 2


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


@pytest.mark.slow
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


# --- refusals -------------------------------------------------------------------------


def zeros(shape, dtype):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("shapes", "types"),
    [
        (((8, 32), (8, 64), (8, 1), (8, 1)), MXF8),
        (((2, 8, 32), (8, 32), (2, 8, 1), (8, 1)), MXF8),
        (((8, 64), (8, 64), (8, 4), (8, 4)), MXF8),
        (((8, 40), (8, 40), (8, 1), (8, 1)), MXF8),
        (((8, 32), (8, 32), (8, 1), (8, 1)), (E4M3, E2M1, E8M0, 32)),
        (((8, 32), (8, 32), (8, 1), (8, 1)), (E4M3, E4M3, jnp.float32, 32)),
        (((8, 32), (8, 32), (8, 2), (8, 2)), (E4M3, E4M3, E4M3, 16)),
    ],
)
@refused
def test_operands_match_each_other(shapes, types):
    a, b, held, _ = types
    given = [zeros(s, t) for s, t in zip(shapes, (a, b, held, held), strict=True)]
    block_scaled_matmul(*given)


def small():
    return [jnp.asarray(x) for x in operands((8, 8, 64), MXF8)]


HOPPER = plgpu.CompilerParams(target="sm_90a")
CALLS = {
    "no other target": lambda: block_scaled_matmul(*small(), compiler_params=HOPPER),
    "no other target offline": lambda: plgpu.offline.lower(
        block_scaled_matmul, *small(), target="sm_90a"
    ),
    "the result is wide": lambda: block_scaled_matmul(*small(), jnp.int8),
    "one factor": lambda: block_scaled_matmul(*small(), scale=jnp.ones(2)),
    "a float factor": lambda: block_scaled_matmul(*small(), scale=jnp.int32(2)),
    "whole tiles of scales": lambda: block_scaled_matmul(
        *small(), config=config(tile_k=64)
    ),
    "whole blocks": lambda: quantize_blocks(jnp.zeros((2, 40)), E4M3),
    "floats of 4 or 8 bits": lambda: quantize_blocks(jnp.zeros((2, 64)), jnp.int8),
    "a type of scales": lambda: quantize_blocks(
        jnp.zeros((2, 64)), E4M3, scale_dtype=jnp.float32
    ),
    "blocks of an instruction": lambda: quantize_blocks(
        jnp.zeros((2, 64)), E4M3, block=16
    ),
    "scales of an instruction": lambda: quantize_blocks(
        jnp.zeros((2, 64)), E5M2, scale_dtype=E4M3
    ),
    "no integers": lambda: quantize_blocks(jnp.zeros((2, 64), jnp.int32)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@refused
def test_what_is_refused(call):
    call()


def test_a_derivative_is_refused():
    a, b, a_scales, b_scales = small()

    def total(x):
        product = block_scaled_matmul(x.astype(E4M3), b, a_scales, b_scales)
        return product.sum()

    with pytest.raises(errors.UnsupportedError, match="there is no derivative"):
        jax.grad(total)(a.astype(jnp.float32))


@pytest.mark.parametrize(
    "changes",
    [
        {"tile_n": 192},
        {"tile_k": 96},
        {"minor": "k"},
        {"strip": 0},
        {"stages": 0},
        {"blocks": 0},
    ],
    ids=str,
)
@refused
def test_a_configuration_fits_the_tensor_core_and_itself(changes):
    config(**changes)
