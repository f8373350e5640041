# SPDX-License-Identifier: Apache-2.0
"""Parts over the edge, sizes of 0 and 1: the same in the emulator and as lowered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from tests.support import acceptance, everywhere
from tests.support.entry_kernels import make, numbers
from tests.support.refusal import refused, refused_by

F16, F32 = jnp.float16, jnp.float32
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
TMA = plgpu.AsyncCopyImplementation.TMA
ds = plgpu.ds


def type_of(x: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def clipped(x: np.ndarray, starts, sizes) -> np.ndarray:
    """A part of an array; zeros outside."""
    wide = np.zeros([3 * n for n in x.shape], x.dtype)
    wide[tuple(slice(n, 2 * n) for n in x.shape)] = x
    ranges = zip(starts, sizes, x.shape, strict=True)
    return wide[tuple(slice(n + start, n + start + size) for start, size, n in ranges)]


# --- static parts over the edge -------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "starts", "sizes", "transforms"),
    [
        ((20, 64), (0, 0), (32, 64), ()),
        ((32, 48), (0, 0), (32, 64), TILED),
        ((64, 64), (-1, 0), (64, 64), TILED),
        ((32, 64), (0, -8), (32, 64), ()),
        ((20, 64), (-5, -8), (40, 128), TILED),
    ],
    ids=["wider", "wider-in-both-tiled", "negative", "negative-minor", "all-sides"],
)
def test_a_load_over_the_edge_reads_zeros(shape, starts, sizes, transforms):
    x = numbers(*shape, dtype=np.float16)

    def body(x, o, tile, barrier):
        part = x.at[tuple(map(ds, starts, sizes))]
        plgpu.copy_gmem_to_smem(part, tile, barrier)
        plgpu.barrier_wait(barrier)
        o[...] = tile[...]

    expected = clipped(x, starts, sizes)
    scratch = [plgpu.SMEM(sizes, F16, transforms=transforms), plgpu.Barrier()]
    everywhere.run(body, [x], expected, *scratch)


@pytest.mark.parametrize(("n", "start"), [(20, 0), (20, 8), (40, 15)])
def test_a_store_over_the_edge_writes_what_lies_inside(n, start):
    x = numbers(32, 64, dtype=np.float16)

    def body(x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(x, tile, barrier)
        plgpu.barrier_wait(barrier)
        for first in (0, start):
            plgpu.copy_smem_to_gmem(tile, o.at[ds(first, 32)])
            plgpu.wait_smem_to_gmem(0)

    expected = np.resize(x, (n, 64))
    expected[start : start + 32] = x[: n - start]
    everywhere.run(body, [x], expected, plgpu.SMEM((32, 64), F16), plgpu.Barrier())


ROWS = np.zeros((32, 128), np.float32)


@pytest.mark.parametrize("start", [32, -32, -8])
@refused
def test_a_store_starts_inside_of_the_array(start):
    def body(x, o, tile):
        plgpu.copy_smem_to_gmem(tile, o.at[ds(start, 32)])  # HERE

    kernel = everywhere.kernel(body, ROWS, plgpu.SMEM((32, 128), F32))
    jax.make_jaxpr(kernel())(ROWS)


def load_of(start, mode):
    def body(x, o, tile, barrier):
        part = x.at[ds(start, 32)]
        plgpu.copy_gmem_to_smem(part, tile, barrier, oob_mode=mode)  # HERE
        plgpu.barrier_wait(barrier)
        o[...] = tile[...]

    return everywhere.kernel(body, ROWS, plgpu.SMEM((32, 128), F32), plgpu.Barrier())


@pytest.mark.parametrize("start", [32, -32])
def test_a_load_entirely_outside_reads_zeros_if_that_is_meant(start):
    call = load_of(start, plgpu.OOBFillMode.ZEROS)
    everywhere.check(call, [ROWS + 1], ROWS)


@pytest.mark.parametrize("start", [32, -32])
@refused
def test_a_load_entirely_outside_is_refused(start):
    jax.make_jaxpr(load_of(start, None)(None))(ROWS)


# --- where a copy may start in GMEM: measured, elsewhere an illegal instruction -------


@pytest.mark.parametrize(
    ("shape", "starts"), [((64, 128), (0, 4)), ((64, 128), (0, -1)), ((1024,), (100,))]
)
@refused
def test_a_copy_starts_at_a_multiple_of_16_bytes(shape, starts):
    sizes = (32, 64)[-len(shape) :]

    def body(x, o, tile, barrier):
        part = x.at[tuple(map(ds, starts, sizes))]
        plgpu.copy_gmem_to_smem(part, tile, barrier, implementation=TMA)  # HERE

    tile = plgpu.SMEM(sizes, F16)
    kernel = everywhere.kernel(body, tile, tile, plgpu.Barrier())
    jax.make_jaxpr(kernel())(np.zeros(shape, np.float16))


@pytest.mark.parametrize(("start", "store"), [(4, False), (-8, True)])
def test_the_emulator_checks_starts_that_are_known_at_run_time(start, store):
    def body(x, at, o, tile, barrier):
        loaded = x.at[:, ds(0 if store else at[0], 64)]
        plgpu.copy_gmem_to_smem(loaded, tile, barrier, implementation=TMA)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(tile, o.at[ds(at[0] if store else 0, 32)])
        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM((32, 64), F16)
    kernel = everywhere.kernel(body, tile, tile, plgpu.Barrier())()
    args = [np.zeros((32, 128), np.float16), np.array([start])]
    verdict = acceptance.judge(kernel, args, execute=False)
    assert verdict.lowered == dict.fromkeys(verdict.lowered)
    text = "starts before the array" if store else "where TMA can address GMEM"
    assert text in str(verdict.emulated) and "test_edges.py" in verdict.emulated.where


def copy_of_blocks(block, index, x, **options):
    def body(x, o):
        o[...] = x[...]

    def make_call(interpret):
        specs = {"in_specs": [plgpu.BlockSpec(block, index)], **options}
        return plgpu.pallas_call(body, type_of(x), interpret=interpret, **specs)

    return make_call


def test_blocks_may_be_wider_than_the_array():
    x, block = numbers(20, 100), ((8, 128), lambda i: (i, 0))
    options = {"grid": (3,), "out_specs": plgpu.BlockSpec(*block)}
    everywhere.check(copy_of_blocks(*block, x, **options), [x], x)


def test_an_element_block_may_start_before_the_array():
    x = numbers(16, 64)
    call = copy_of_blocks((plgpu.Element(16), 64), lambda: (-1, 0), x)
    everywhere.check(call, [x], clipped(x, (-1, 0), x.shape))


# --- size 0 ---------------------------------------------------------------------------


def double(x, o):
    o[...] = x[...] * 2


EMPTY = {
    "kernel": lambda x: plgpu.kernel(double, x)(x),
    "pallas_call": lambda x: plgpu.pallas_call(double, x)(x),
    "blocks": lambda x: plgpu.pallas_call(
        double, x, grid=1, in_specs=[plgpu.BlockSpec((8, 128), lambda i: (i, 0))]
    )(x),
}


@pytest.mark.parametrize("call", EMPTY.values(), ids=list(EMPTY))
def test_a_call_whose_results_are_empty_launches_nothing(call):
    x = jnp.ones((0, 128))
    assert "pallas_gpu" not in str(jax.make_jaxpr(call)(x))
    result = call(x)
    assert (result.shape, result.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("shape", [(0, 128), (0, 2, 128), (2, 0, 128)])
def test_vmap_over_no_instances_launches_nothing(shape, jit):
    call = plgpu.kernel(double, jax.ShapeDtypeStruct((128,), F32))
    for _ in shape[:-1]:
        call = jax.vmap(call)
    assert "pallas_gpu" not in str(jax.make_jaxpr(call)(jnp.ones(shape)))
    result = jit(call)(jnp.ones(shape))
    assert (result.shape, result.dtype) == (shape, F32)


def test_an_empty_operand_that_is_not_used_may_be_passed():
    def body(nothing, x, o):
        o[...] = x[...] * 2

    def pallas(interpret):
        return plgpu.pallas_call(body, type_of(x), interpret=interpret)

    x = numbers(16, 64)
    for make_call in (everywhere.kernel(body, x), pallas):
        everywhere.check(make_call, [np.zeros((0, 64), np.float32), x], x * 2)


@refused
def test_a_reference_without_elements_is_not_read():
    def body(empty, x, o):
        empty[...]  # HERE
        o[...] = x[...]

    x = numbers(16, 64)
    jax.make_jaxpr(plgpu.kernel(body, type_of(x)))(jnp.zeros((0, 4)), x)


@refused
def test_a_copy_needs_an_array_with_elements():
    def body(empty, x, o, tile, barrier):
        plgpu.copy_gmem_to_smem(empty.at[ds(0, 16)], tile, barrier)  # HERE

    scratch = [plgpu.SMEM((16, 64), F32), plgpu.Barrier()]
    x = numbers(16, 64)
    jax.make_jaxpr(plgpu.kernel(body, type_of(x), scratch_types=scratch))(x[:0], x)


# --- tilings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "tiling", "swizzle"),
    [((16, 64), (1, 32), 16), ((16, 2, 64), (8, 1, 64), 128), ((8, 64), (64,), 16)],
)
def test_any_tiling_that_divides_the_array_may_be_copied_and_accessed(
    shape, tiling, swizzle
):
    x = numbers(*shape, dtype=np.float16)
    transforms = plgpu.TilingTransform(tiling), plgpu.SwizzleTransform(swizzle)
    tile = plgpu.SMEM(shape, F16, transforms=transforms)

    def body(x, o, loaded, stored, barrier):
        plgpu.copy_gmem_to_smem(x, loaded, barrier)
        plgpu.barrier_wait(barrier)
        stored[...] = loaded[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stored, o)
        plgpu.wait_smem_to_gmem(0)

    everywhere.run(body, [x], x * 2, tile, tile, plgpu.Barrier())


# --- what is stored where -------------------------------------------------------------


@refused
def test_an_input_is_not_written_by_a_kernel_that_is_compiled():
    def body(x, o, tile):
        plgpu.copy_smem_to_gmem(tile, x)  # HERE

    tile = plgpu.SMEM((64, 128), F32)
    jax.make_jaxpr(make(body, scratch_types=[tile]))(numbers())


@refused_by(lambda body: jax.make_jaxpr(make(body))(numbers()))
def test_an_input_is_not_written_in_a_loop(x, o):
    @plgpu.loop(0, 2)
    def _(i):
        x[i] = o[i]


@pytest.mark.parametrize(
    ("shape", "index"),
    [((256, 32), (slice(None), slice(16, 18))), ((4, 32, 12), (..., slice(0, 3)))],
)
@pytest.mark.parametrize("space", ["GMEM", "SMEM"])
def test_parts_that_a_strided_layout_cannot_address(space, shape, index):
    x = numbers(*shape)

    def body(x, o, tile):
        if space == "SMEM":
            tile[...] = x[...]
            x = tile
        o[...] = x[index]

    everywhere.run(body, [x], x[index], plgpu.SMEM(shape, F32))
