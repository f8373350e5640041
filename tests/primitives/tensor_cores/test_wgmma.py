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
from tests.support.refusal import refused, refused_by

# --- what is multiplied ---------------------------------------------------------------


CALLS = {
    "the accumulator is one": lambda acc, a, b, x: plgpu.wgmma(a, a, b),
    "an accumulator, not its value": lambda acc, a, b, x: plgpu.wgmma(acc[...], a, b),
    "the right operand is a reference": lambda acc, a, b, x: plgpu.wgmma(
        acc, a, b[...]
    ),
    "the left one is not in GMEM": lambda acc, a, b, x: plgpu.wgmma(
        acc, x.at[:, :64], b
    ),
    "nor is the right one": lambda acc, a, b, x: plgpu.wgmma(acc, a, x.at[:, :64]),
    "an accumulator is no operand": lambda acc, a, b, x: plgpu.wgmma(acc, acc, b),
    "k comes in steps of an instruction": lambda acc, a, b, x: plgpu.wgmma(
        acc, a.at[:, :8], b.at[:8]
    ),
    "parts of operands are whole tiles": lambda acc, a, b, x: plgpu.wgmma(
        acc, a.at[:, 32:64], b.at[32:64]
    ),
    "a part of an accumulator stays inside": lambda acc, a, b, x: plgpu.wgmma(
        acc.at[:, plgpu.ds(32, 64)], a, b
    ),
    "no transpose is read": lambda acc, a, b, x: acc.T[...],
    "no row is read": lambda acc, a, b, x: acc.at[3][...],
    "parts are made of tiles": lambda acc, a, b, x: acc[:, 4:12],
    "no part is stored into": lambda acc, a, b, x: acc.at[:, :32].set(
        jnp.zeros((64, 32))
    ),
    "no part is added to": lambda acc, a, b, x: jax.ref.addupdate(
        acc, (slice(None), slice(0, 32)), jnp.zeros((64, 32))
    ),
    "a store has the accumulator's type": lambda acc, a, b, x: acc.set(
        jnp.zeros((64, 64), F16)
    ),
    "load is for memory": lambda acc, a, b, x: plgpu.load(acc),
    "a copy takes no accumulator": lambda acc, a, b, x: plgpu.copy_smem_to_gmem(
        acc, x.at[:, 0:64]
    ),
}


@pytest.mark.parametrize("call", CALLS)
@refused_by(attempt)
def test_the_call_is_refused(acc, sa, sb, x, *, call):
    CALLS[call](acc, sa, sb, x)


OPERANDS = {
    "two types": {"b": tiles(dtype=jnp.bfloat16)},
    "another k": {"b": tiles((128, 64))},
    "more rows": {"a": tiles((128, 64))},
    "more columns": {"b": tiles((64, 128))},
    "three dimensions": {"a": tiles((2, 64, 64))},
    "more than 256 columns": {"b": tiles((64, 320)), "acc": plgpu.ACC((64, 320))},
    # Some storage fits where it is inferred.
    "8 columns": {"b": plgpu.SMEM((64, 8), F16), "acc": plgpu.ACC((64, 8))},
}


@pytest.mark.parametrize("operands", OPERANDS)
@refused
def test_the_operands_form_no_product(operands):
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, sa, sb)  # HERE

    attempt(multiply, **OPERANDS[operands])


# --- element types --------------------------------------------------------------------


@refused_by(attempt, *([tiles((64, 128), t) for t in (jnp.float8_e4m3fn, jnp.int8)]))
def test_float8_does_not_mix_with_int8(acc, sa, sb, x):
    plgpu.wgmma(acc, sa, sb.T)  # HERE


@pytest.mark.parametrize("dtype", [jnp.int16, jnp.int32, jnp.float8_e4m3b11fnuz])
@refused
def test_the_tensor_core_has_the_type(dtype):
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, sa, sb)  # HERE

    shape = (64, 128 // jnp.dtype(dtype).itemsize)
    attempt(multiply, tiles(shape, dtype), tiles(shape, dtype))


@pytest.mark.parametrize(
    ("dtype", "acc"),
    [
        (jnp.bfloat16, F16),
        (jnp.float16, jnp.int32),
        (jnp.int8, F32),
        (jnp.float32, F16),
        (jnp.float8_e5m2, jnp.int32),
    ],
)
@refused
def test_the_accumulator_has_a_type_of_the_operands(dtype, acc):
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, sa, sb.T)  # HERE

    operands = [tiles((64, 128 // jnp.dtype(dtype).itemsize), dtype)] * 2
    attempt(multiply, *operands, acc=plgpu.ACC((64, 64), acc))


# --- storage --------------------------------------------------------------------------

LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


@pytest.mark.parametrize(
    "transforms",
    [
        (),
        (plgpu.TilingTransform((8, 64)),),
        (plgpu.TilingTransform((16, 64)), plgpu.SwizzleTransform(128)),
    ],
    ids=["plain", "not-swizzled", "16-rows"],
)
@pytest.mark.parametrize("side", ["a", "b"])
@refused
def test_operands_are_tiled_and_swizzled(transforms, side):
    def multiply(acc, sa, sb, x):
        plgpu.wgmma(acc, sa, sb)  # HERE

    stored = plgpu.SMEM((64, 64), F16, transforms=transforms)
    operands = {"a": tiles(), "b": tiles(), side: stored}
    attempt(multiply, compiler_params=LANE, **operands)


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_narrower_swizzle_is_read_too(side):
    narrow = {"a": tiles(), "b": tiles(), side: tiles(columns=32, swizzle=64)}
    attempt(lambda acc, sa, sb, x: plgpu.wgmma(acc, sa, sb), **narrow)


@pytest.mark.parametrize("stored", [tiles, plgpu.SMEM], ids=["tiled", "inferred"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8, jnp.float8_e5m2])
@pytest.mark.parametrize("side", ["a", "b"])
@refused
def test_only_16_bit_operands_may_lie_either_way(side, dtype, stored):
    def multiply(acc, sa, sb, x):
        left = sa.T if side == "a" else sa
        plgpu.wgmma(acc, left, sb.T if side == "a" else sb)  # HERE

    operand = stored((128, 128), dtype)
    acc = plgpu.ACC((128, 128), jnp.int32 if dtype == jnp.int8 else F32)
    attempt(multiply, operand, operand, acc)


@refused_by(attempt)
def test_parts_with_a_start_that_is_a_value_have_the_size_of_whole_tiles(
    acc, sa, sb, x
):
    @plgpu.loop(0, 2)
    def _(k):
        part = plgpu.ds(k * 32, 32)
        plgpu.wgmma(acc, sa.at[:, part], sb.at[part])  # HERE


@refused_by(attempt, tiles((64, 8, 64)))
def test_operands_are_the_last_two_dimensions_of_their_array(acc, sa, sb, x):
    plgpu.wgmma(acc, sa.at[:, 0], sb)  # HERE


# --- parts of accumulators ------------------------------------------------------------


@pytest.mark.parametrize("use", ["wgmma", "load", "get"])
@refused_by(attempt, acc=plgpu.ACC((64, 128)), grid=(2,), grid_names=("i",))
def test_an_accumulator_is_not_indexed_with_a_value(acc, sa, sb, x, *, use):
    part = acc.at[:, plgpu.ds(lax.axis_index("i") * 64, 64)]
    uses = {
        "wgmma": lambda: plgpu.wgmma(part, sa, sb),
        "load": lambda: plgpu.wgmma_accumulator_load(part),
        "get": lambda: part[...],
    }
    uses[use]()


# --- targets --------------------------------------------------------------------------


@refused_by(lambda body: plgpu.offline.lower(make(body), numbers(), target="sm_100a"))
def test_blackwell_has_no_wgmma(x, o):
    plgpu.run_scoped(lambda acc: None, plgpu.ACC((64, 64)))  # HERE


@refused_by(run, compiler_params=plgpu.CompilerParams(target="sm_100a"))
def test_the_emulator_refuses_wgmma_for_blackwell_too(x, o):
    plgpu.run_state(lambda acc: None)(plgpu.ACC((64, 64)))  # HERE


@pytest.mark.parametrize("semantics", plgpu.LoweringSemantics)
@refused
def test_every_operation_of_wgmma_needs_it(semantics):
    def body(x, o):
        plgpu.wgmma_wait(0)  # HERE

    params = plgpu.CompilerParams(lowering_semantics=semantics)
    plgpu.offline.lower(make(body, compiler_params=params), numbers(), target="sm_100a")


def test_wgmma_is_part_of_a_kernel():
    with pytest.raises(errors.PallasGpuError):
        plgpu.wgmma_wait(0)


def test_a_body_that_multiplies_nothing_may_still_wait():
    def body(x, o):
        plgpu.wgmma_wait(0)
        o[...] = x[...]

    assert (run(body) == numbers()).all()
