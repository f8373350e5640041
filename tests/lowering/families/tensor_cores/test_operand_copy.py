# SPDX-License-Identifier: Apache-2.0
"""async_copy_smem_to_tmem as kernels write it: left operands, everywhere."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.errors import PtxError
from tests.support import everywhere
from tests.support.lockstep import faults
from tests.support.operand_copies import Copied, CopiedByPair
from tests.support.refusal import refused
from tests.support.semantics import BOTH, under
from tests.support.tensor_products import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    check,
    check_inferred,
    storage,
)

I8, I32 = jnp.int8, jnp.int32


SMALL = Copied(n=16, k=32, b_stored=True, swizzle=64)
KERNELS = {
    "f16": Copied(),
    "bf16, K of three swizzles": Copied(a=BF16, b=BF16, k=192),
    "64-byte swizzle": Copied(swizzle=64),
    "32-byte swizzle": Copied(swizzle=32),
    "float8": Copied(a=E4M3, b=E5M2, k=128, b_stored=True),
    "int8": Copied(a=I8, b=I8, acc=I32, k=128, n=128),
    "tf32": Copied(a=F32, b=F32, k=64, b_stored=True),
}


@pytest.mark.parametrize("case", KERNELS.values(), ids=KERNELS)
def test_a_copied_operand(case):
    check(case)


@pytest.mark.parametrize(
    "case",
    [CopiedByPair(n=32), CopiedByPair(n=32, k=128, a=E4M3, b=E5M2)],
    ids=["f16", "float8"],
)
def test_a_pair_copies_operands(case):
    check(case)


@pytest.mark.parametrize("seed", range(3))
def test_the_leader_knows_that_the_operands_of_both_are_there(seed):
    case = CopiedByPair(n=32, waits=False)
    kernel = case.make(plgpu.InterpretParams(seed=seed, asynchrony="late"))
    with pytest.raises(errors.PallasGpuError, match="async_copy_smem_to_tmem"):
        kernel(*case.operands())


@refused
def test_the_copy_of_a_pair_has_a_target_of_a_pair():
    one, acc = plgpu.TMEM((128, 64), F16, packed=True), plgpu.TMEM((128, 32), F32)
    case = CopiedByPair(n=32)
    jax.eval_shape(case.make(a_tmem=one, acc=acc), *case.operands())


def test_warpgroup_semantics_infer_how_the_source_is_stored():
    check_inferred(Copied(inferred=True))


def copy_to_registers(body, source):
    """`make` for a kernel that copies to TMEM and loads what is there."""
    return everywhere.kernel(
        body,
        VALUES,
        source,
        plgpu.TMEM(VALUES.shape, F16, packed=True),
        plgpu.Barrier(),
        plgpu.Barrier(orders_tensor_core=True),
        target="sm_100a",
    )


def whole(a, out, a_smem, held, loaded, done):
    plgpu.copy_gmem_to_smem(a, a_smem, loaded)
    plgpu.barrier_wait(loaded)
    plgpu.async_copy_smem_to_tmem(a_smem, held)
    plgpu.tcgen05_commit_arrive(done)
    plgpu.barrier_wait(done)
    out[...] = plgpu.async_load_tmem(held)


def in_parts(a, out, a_smem, held, loaded, done):
    """Halves change places; a warp issues the second copy and its commit."""
    plgpu.copy_gmem_to_smem(a, a_smem, loaded)
    plgpu.barrier_wait(loaded)
    left, right = plgpu.ds(0, 32), plgpu.ds(32, 32)

    @plgpu.warp_map
    def _(warp):
        @plgpu.when(warp == 1)
        def _():
            plgpu.async_copy_smem_to_tmem(a_smem.at[:, left], held.at[:, right])
            plgpu.async_copy_smem_to_tmem(a_smem.at[:, right], held.at[:, left])
            plgpu.tcgen05_commit_arrive(done)

    plgpu.barrier_wait(done)
    out[...] = plgpu.async_load_tmem(held)


VALUES = np.arange(128 * 64, dtype=np.float16).reshape(128, 64) % 1024
SOURCES = {
    **{
        str(s): plgpu.SMEM((128, 64), F16, transforms=storage(F16, s)) for s in (64, 32)
    },
    "none": plgpu.SMEM((128, 64), F16, transforms=(plgpu.TilingTransform((8, 8)),)),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("body", [whole, in_parts])
def test_a_commit_makes_a_copy_readable(body, source):
    expected = VALUES
    if body is in_parts:
        expected = np.concatenate([VALUES[:, 32:], VALUES[:, :32]], axis=1)
    everywhere.check(copy_to_registers(body, source), [VALUES], expected, on_gpu=False)


# --- mistakes -------------------------------------------------------------------------

MISTAKES = {
    "no copy": (errors.UninitializedReadError, "a_tmem"),
    "no wait for the operands": (errors.PallasGpuError, "a_smem"),
    "overwrites the source": (errors.RaceError, "async_copy_smem_to_tmem"),
    "reads the copy": (errors.RaceError, "async_copy_smem_to_tmem"),
    "stores over the copy": (errors.RaceError, "tcgen05_mma"),
    "no commit_smem": (errors.RaceError, "async_copy_smem_to_tmem"),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_emulator_reports_a_mistake(mistake, seed):
    case = dataclasses.replace(SMALL, mistake=mistake)
    error, text = MISTAKES[mistake]
    with pytest.raises(error, match=text):
        case.make(plgpu.InterpretParams(seed=seed))(*case.operands())


@pytest.mark.parametrize("seed", range(3))
def test_a_copy_is_not_ordered_after_a_product_into_its_target(seed):
    def body(a, b, out, a_smem, b_smem, acc, loaded, done, a_tmem):
        plgpu.copy_gmem_to_smem(a, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b, b_smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.tcgen05_mma(acc, a_smem, b_smem.T, accumulate=False)
        plgpu.async_copy_smem_to_tmem(a_smem.at[:, plgpu.ds(0, 16)], acc)
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        out[...] = acc[...]

    case = Copied(a=F32, b=F32, n=16, k=32, b_stored=True, swizzle=64)
    with pytest.raises(errors.RaceError, match="tcgen05_mma"):
        case.make(plgpu.InterpretParams(seed=seed), body)(*case.operands())


FAULTS = {
    "a step of the source": (r"add\.u64 s, \$1, 2;", "add.u64 s, $1, 0;"),
    "a column of the target": (r"add\.u32 d, \$0, 8;", "add.u32 d, $0, 4;"),
    "the shape": ("128x256b", "128x128b"),
}


@pytest.mark.parametrize(("pattern", "text"), FAULTS.values(), ids=FAULTS)
def test_a_wrong_address_is_found_out(pattern, text):
    kernel, operands = under(BOTH[0], SMALL.make()), SMALL.operands()
    fault = faults.edit_text(pattern, text)
    try:
        result = faults.run(kernel, operands, fault)
    except PtxError:
        return
    assert (result != SMALL.expected(*operands)).any()


def test_a_missing_commit_leaves_the_copy_in_flight():
    kernel = under(BOTH[0], copy_to_registers(whole, SOURCES["64"])())
    with pytest.raises(Exception, match="deadlock"):
        faults.run(kernel, [VALUES], faults.drop("nvvm.tcgen05.commit"))


# --- what is refused ------------------------------------------------------------------


def attempt(source, target, on="sm_100a"):
    def body(smem, tmem):
        plgpu.async_copy_smem_to_tmem(smem, tmem)  # HERE

    jax.eval_shape(everywhere.kernel(body, (), source, target, target=on)())


TILES = storage(F16)


def smem(shape=(128, 64), dtype=F16, transforms=TILES):
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def tmem(shape=(128, 64), dtype=F16, packed=True):
    return plgpu.TMEM(shape, dtype, packed=packed)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (tmem(), tmem()),
        (smem(), smem()),
        (smem(), tmem(dtype=BF16)),
        (smem(), tmem((128, 32))),
        (smem(), tmem(packed=False)),
        (smem(transforms=(plgpu.TilingTransform((8, 32)),)), tmem()),
    ],
    ids=["source", "destination", "types", "shapes", "not packed", "not tiled"],
)
@refused
def test_what_is_not_copied(source, target):
    attempt(source, target)


@refused
def test_hopper_has_no_such_copy():
    attempt(smem(), tmem(), "sm_90a")


GOOD = {"async_copy_smem_to_tmem": lambda e: {"smem_ref": e.left, "tmem_ref": e.p}}
EFFECTS = {"async_copy_smem_to_tmem.collective_axis": "test_a_pair_copies_operands"}
