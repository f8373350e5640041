# SPDX-License-Identifier: Apache-2.0
"""What wgmma, its waits and its reads refuse, and what they say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support.entry_kernels import make, numbers, run
from tests.support.products import F16, F32, attempt, tiles
from tests.support.refusal import refused

# --- what is multiplied ---------------------------------------------------------------


def test_the_accumulator_is_one():
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(sa, sa, sb)  # HERE

    with refused(
        errors.ArgumentTypeError,
        "wgmma: not an accumulator",
        expected="plgpu.ACC",
        got="SMEM float16[64, 64]",
        hint="scratch_types (pallas_call: scratch_shapes), run_scoped or run_state",
    ):
        attempt(multiply)


def test_the_accumulator_is_a_reference_not_its_value():
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc[...], sa, sb)  # HERE

    with refused(errors.ArgumentTypeError, "wgmma: not an accumulator"):
        attempt(multiply)


def test_the_right_operand_is_a_reference():
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, sa, sb[...])  # HERE

    with refused(
        errors.ArgumentTypeError, "wgmma: b is not a reference", hint=".at[...]"
    ):
        attempt(multiply)


@pytest.mark.parametrize("side", ["a", "b"])
def test_operands_in_memory_lie_in_smem(side):
    def multiply(acc, sa, sb, x):
        part = x.at[:, 0:64]
        plgpu.wgmma(acc, *((part, sb) if side == "a" else (sa, part)))  # HERE

    with refused(
        errors.MemorySpaceError,
        f"wgmma: {side} is in the wrong memory space",
        expected="SMEM",
        got="GMEM float32[64, 64]",
        hint="plgpu.SMEM(shape, dtype)",
    ):
        attempt(multiply)


def test_an_accumulator_is_no_operand():
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, acc, sb)  # HERE

    with refused(
        errors.MemorySpaceError,
        "wgmma: a is in the wrong memory space",
        got="REGS float32[64, 64]",
    ):
        attempt(multiply)


# --- element types --------------------------------------------------------------------


def test_both_operands_have_one_type():
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, sa, sb)  # HERE

    with refused(
        errors.DTypeError,
        "wgmma: the operands have different element types",
        expected="one type for both, or two 8-bit types, both floats or integers",
        got="float16 and bfloat16",
        hint="convert",
    ):
        attempt(multiply, b=tiles(dtype=jnp.bfloat16))


def test_float8_does_not_mix_with_int8():
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, sa, sb.T)  # HERE

    with refused(
        errors.DTypeError,
        "wgmma: the operands have different element types",
        got="float8_e4m3fn and int8",
    ):
        eight_bit = [tiles((64, 128), t) for t in (jnp.float8_e4m3fn, jnp.int8)]
        attempt(multiply, *eight_bit)


@pytest.mark.parametrize("dtype", [jnp.int16, jnp.int32, jnp.float8_e4m3b11fnuz])
def test_the_tensor_core_has_the_type(dtype):
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, sa, sb)  # HERE

    shape = (64, 128 // jnp.dtype(dtype).itemsize)
    with refused(
        errors.DTypeError,
        "wgmma: the tensor core does not support this operand type",
        expected="float16, bfloat16, float32, float8_e4m3fn, float8_e5m2, int8",
        got=jnp.dtype(dtype).name,
    ):
        attempt(multiply, tiles(shape, dtype), tiles(shape, dtype))


@pytest.mark.parametrize(
    ("dtype", "acc", "expected"),
    [
        (jnp.bfloat16, F16, "float32"),
        (jnp.float16, jnp.int32, "float32 or float16"),
        (jnp.int8, F32, "int32"),
        (jnp.float32, F16, "float32"),
        (jnp.float8_e5m2, jnp.int32, "float32 or float16"),
    ],
)
def test_the_accumulator_has_a_type_of_the_operands(dtype, acc, expected):
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, sa, sb.T)  # HERE

    name = jnp.dtype(dtype).name
    operands = [tiles((64, 128 // jnp.dtype(dtype).itemsize), dtype)] * 2
    with refused(
        errors.DTypeError,
        f"wgmma: {name} operands cannot accumulate in this type",
        expected=expected,
        got=jnp.dtype(acc).name,
        hint="plgpu.ACC(shape, dtype)",
    ):
        attempt(multiply, *operands, acc=plgpu.ACC((64, 64), acc))


# --- shapes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "acc"),
    [
        ((64, 64), (128, 64), (64, 64)),
        ((128, 64), (64, 64), (64, 64)),
        ((64, 64), (64, 128), (64, 64)),
        ((2, 64, 64), (64, 64), (64, 64)),
    ],
)
def test_the_shapes_form_a_product(a, b, acc):
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, sa, sb)  # HERE

    with refused(
        errors.ShapeError,
        "wgmma: the shapes do not form a product",
        expected="acc (M, N), a (M, K), b (K, N)",
        got=f"acc {acc}, a {a}, b {b}",
        hint="ref.T",
    ):
        attempt(multiply, tiles(a), tiles(b), plgpu.ACC(acc))


def test_k_comes_in_steps_of_an_instruction():
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, sa.at[:, 0:8], sb.at[0:8])  # HERE

    with refused(
        errors.ShapeError,
        "wgmma: K is not a multiple of the instruction's K",
        expected="a multiple of 16 (32 bytes)",
        got="8",
        hint="pad K",
    ):
        attempt(multiply)


def test_n_is_at_most_256():
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, sa, sb)  # HERE

    with refused(
        errors.ShapeError,
        "wgmma: the tensor core has no instruction of this shape",
        expected="up to 256",
        got="M = 64, N = 320",
        hint="acc.at[:, :n]",
    ):
        attempt(multiply, b=tiles((64, 320)), acc=plgpu.ACC((64, 320)))


# --- storage --------------------------------------------------------------------------

PLAIN = plgpu.SMEM((64, 64), F16)
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


@pytest.mark.parametrize(
    ("stored", "got"),
    [
        (PLAIN, "no transforms"),
        (
            plgpu.SMEM((64, 64), F16, transforms=(plgpu.TilingTransform((8, 64)),)),
            "tiling (8, 64)",
        ),
        (tiles(columns=32, swizzle=64), None),
        (
            plgpu.SMEM(
                (64, 64),
                F16,
                transforms=(
                    plgpu.TilingTransform((16, 64)),
                    plgpu.SwizzleTransform(128),
                ),
            ),
            "tiling (16, 64), 128-byte swizzle",
        ),
    ],
    ids=["plain", "not-swizzled", "right", "16-rows"],
)
@pytest.mark.parametrize("side", ["a", "b"])
def test_operands_are_tiled_and_swizzled(stored, got, side):
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, sa, sb)  # HERE

    operands = {"a": tiles(), "b": tiles(), side: stored}
    if got is None:
        attempt(multiply, **operands)
        return
    with refused(
        errors.LayoutError,
        f"wgmma: {side} is not stored in a layout that the tensor core reads",
        expected="TilingTransform((8, n)) and SwizzleTransform(s)",
        got=got,
        hint="plgpu.TilingTransform((8, 64))",
    ):
        attempt(multiply, compiler_params=LANE, **operands)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8, jnp.float8_e5m2])
@pytest.mark.parametrize("side", ["a", "b"])
def test_only_16_bit_operands_may_lie_either_way(side, dtype):
    def multiply(acc, sa, sb, x):
        left = sa.T if side == "a" else sa
        plgpu.wgmma(acc, left, sb.T if side == "a" else sb)  # HERE

    n = 128
    acc = plgpu.ACC((n, n), jnp.int32 if dtype == jnp.int8 else F32)
    with refused(
        errors.LayoutError,
        f"wgmma: {side} is stored with K in the major dimension",
        expected="16-bit types only",
        got=f"SMEM {jnp.dtype(dtype).name}[128, 128]",
        hint="(N, K)" if side == "b" else "(M, K)",
    ):
        attempt(multiply, tiles((n, n), dtype), tiles((n, n), dtype), acc)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8, jnp.float8_e5m2])
@pytest.mark.parametrize("side", ["a", "b"])
def test_so_may_those_whose_storage_is_inferred(side, dtype):
    def multiply(acc, sa, sb, x):
        left = sa.T if side == "a" else sa
        plgpu.wgmma(acc, left, sb.T if side == "a" else sb)  # HERE

    plain = plgpu.SMEM((128, 128), dtype)
    acc = plgpu.ACC((128, 128), jnp.int32 if dtype == jnp.int8 else F32)
    with refused(
        errors.LayoutError,
        f"wgmma: {side} is stored with K in the major dimension",
        expected="16-bit types only",
    ):
        attempt(multiply, plain, plain, acc)


def test_some_storage_fits_where_it_is_inferred():
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, sa, sb)  # HERE

    with refused(
        errors.LayoutError,
        "wgmma: b does not consist of whole tiles",
        expected="(8, 16) or (8, 32) or (8, 64)",
        got="sizes (64, 8) of (64, 8)",
    ):
        attempt(multiply, b=plgpu.SMEM((64, 8), F16), acc=plgpu.ACC((64, 8)))


def test_parts_of_operands_are_whole_tiles():
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, sa.at[:, 32:64], sb.at[32:64])  # HERE

    with refused(
        errors.LayoutError,
        "wgmma: a does not consist of whole tiles",
        expected="multiples of (8, 64)",
        got="starts (0, 32), sizes (64, 32) of (64, 64)",
        hint="narrower swizzle",
    ):
        attempt(multiply)


def test_parts_with_a_start_that_is_a_value_have_the_size_of_whole_tiles():
    def multiply(acc, sa, sb, x):
        @plgpu.loop(0, 2)
        def _(k):
            part = plgpu.ds(k * 32, 32)
            plgpu.wgmma(acc, sa.at[:, part], sb.at[part])  # HERE

    with refused(
        errors.LayoutError,
        "wgmma: a does not consist of whole tiles",
        got="sizes (64, 32)",
    ):
        attempt(multiply)


def test_operands_are_the_last_two_dimensions_of_their_array():
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, sa.at[:, 0], sb)  # HERE

    with refused(
        errors.LayoutError,
        "wgmma: a is not a matrix of the last two dimensions of its array",
        got="dimensions [0, 2] of (64, 8, 64)",
    ):
        attempt(multiply, tiles((64, 8, 64)))


# --- parts of accumulators ------------------------------------------------------------


def test_a_part_of_an_accumulator_stays_inside():
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc.at[:, plgpu.ds(32, 64)], sa, sb)  # HERE

    with refused(errors.OutOfBoundsError, "wgmma outside the reference"):
        attempt(multiply)


@pytest.mark.parametrize("use", ["wgmma", "load", "get"])
def test_an_accumulator_is_not_indexed_with_a_value(use):
    def multiply(acc, sa, sb, x):
        part = acc.at[:, plgpu.ds(lax.axis_index("i") * 64, 64)]
        uses = {
            "wgmma": lambda: plgpu.wgmma(part, sa, sb),
            "load": lambda: plgpu.wgmma_accumulator_load(part),
            "get": lambda: part[...],
        }
        uses[use]()

    with pytest.raises(errors.UnsupportedError) as caught:
        attempt(multiply, acc=plgpu.ACC((64, 128)), grid=(2,), grid_names=("i",))
    assert caught.value.what == ("an accumulator is transposed or indexed dynamically")
    assert caught.value.got == "[0 to 64, a value] of (64, 128)"
    assert "acc[...]" in caught.value.hint
    assert "test_wgmma.py" in caught.value.where


@pytest.mark.parametrize(
    ("part", "got"),
    [
        (lambda acc: acc.T, "[0 to 64, 0 to 64] of (64, 64), transposed"),
        (lambda acc: acc.at[3], "[3, 0 to 64] of (64, 64)"),
    ],
)
def test_an_accumulator_is_not_transposed_or_read_row_by_row(part, got):
    def multiply(acc, sa, sb, x):
        part(acc)[...]  # HERE

    with refused(
        errors.UnsupportedError,
        "an accumulator is transposed or indexed dynamically",
        expected="acc.at[:, 0:64]",
        got=got,
        hint="store the value to SMEM",
    ):
        attempt(multiply)


def test_a_part_of_an_accumulator_is_made_of_tiles():
    def multiply(acc, sa, sb, x):
        acc[:, 4:12]  # HERE

    with refused(
        errors.LayoutError,
        "a part of an accumulator does not consist of whole tiles",
        expected="multiples of (64, 8)",
        got="[0 to 64, 4 to 12]",
    ):
        attempt(multiply)


def test_a_part_of_an_accumulator_is_not_stored_into():
    def multiply(acc, sa, sb, x):
        acc[:, 0:32] = jnp.zeros((64, 32))  # HERE

    with refused(
        errors.UnsupportedError,
        "a store to a part of an accumulator",
        expected="acc[...] = value",
        got="a part of shape (64, 32) of (64, 64)",
        hint="one accumulator for each part",
    ):
        attempt(multiply)


def test_a_part_of_an_accumulator_is_not_added_to():
    def multiply(acc, sa, sb, x):
        jax.ref.addupdate(acc, (slice(None), slice(0, 32)), jnp.zeros((64, 32)))

    with pytest.raises(
        errors.UnsupportedError, match="a store to a part of an accumulator"
    ):
        attempt(multiply)


def test_a_store_has_the_accumulators_type():
    def multiply(acc, sa, sb, x):
        acc[...] = jnp.zeros((64, 64), F16)  # HERE

    with refused(
        errors.DTypeError,
        "a value is stored into a reference of another element type",
        expected="REGS float32[64, 64]",
        got="float16[64, 64]",
    ):
        attempt(multiply)


def test_load_is_for_memory():
    def multiply(acc, sa, sb, x):
        plgpu.load(acc)  # HERE

    with refused(
        errors.MemorySpaceError,
        "load: the source cannot be loaded",
        expected="SMEM or GMEM",
        got="REGS float32[64, 64]",
        hint="acc[...]",
    ):
        attempt(multiply)


def test_a_copy_does_not_take_an_accumulator():
    def multiply(acc, sa, sb, x):
        plgpu.copy_smem_to_gmem(acc, x.at[:, 0:64])  # HERE

    with refused(
        errors.MemorySpaceError,
        "copy_smem_to_gmem: the source is in the wrong memory space",
        got="REGS float32[64, 64]",
    ):
        attempt(multiply)


# --- targets --------------------------------------------------------------------------


def test_blackwell_has_no_wgmma():
    def body(x, o):
        plgpu.run_scoped(lambda acc: None, plgpu.ACC((64, 64)))  # HERE

    with refused(
        errors.TargetError,
        "an accumulator (ACC) needs wgmma, which sm_100a does not have",
        expected="sm_90a",
        got="sm_100a",
    ):
        plgpu.offline.lower(make(body), numbers(), target="sm_100a")


def test_the_emulator_refuses_wgmma_for_blackwell_too():
    def body(x, o):
        plgpu.run_state(lambda acc: None)(plgpu.ACC((64, 64)))  # HERE

    with refused(
        errors.TargetError,
        "an accumulator (ACC) needs wgmma, which sm_100a does not have",
    ):
        run(body, compiler_params=plgpu.CompilerParams(target="sm_100a"))


@pytest.mark.parametrize("semantics", plgpu.LoweringSemantics)
def test_every_operation_of_wgmma_needs_it(semantics):
    def body(x, o):
        plgpu.wgmma_wait(0)  # HERE

    params = plgpu.CompilerParams(lowering_semantics=semantics)
    with refused(
        errors.TargetError, "wgmma_wait needs wgmma, which sm_100a does not have"
    ):
        plgpu.offline.lower(
            make(body, compiler_params=params), numbers(), target="sm_100a"
        )


def test_wgmma_is_part_of_a_kernel():
    with pytest.raises(errors.PallasGpuError):
        plgpu.wgmma_wait(0)


def test_a_body_that_multiplies_nothing_may_still_wait():
    def body(x, o):
        plgpu.wgmma_wait(0)
        o[...] = x[...]

    assert (run(body) == numbers()).all()
