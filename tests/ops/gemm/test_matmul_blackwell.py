# SPDX-License-Identifier: Apache-2.0
"""The matrix product for Blackwell: every configuration, everywhere but on a card."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors, walk
from pallas_gpu.ops import BlackwellMatmulConfig, MatmulConfig, matmul
from tests.support import matmuls
from tests.support.matmuls import operands, reference
from tests.support.refusal import refused

SMALL = BlackwellMatmulConfig(tile_n=64, tile_k=64, stages=2, blocks=2, strip=2)
# A block of a pair has half of B's columns.
PAIRS = BlackwellMatmulConfig(collective=True, stages=6)
DYNAMIC = dataclasses.replace(PAIRS, dynamic=True)
BLACKWELL = plgpu.CompilerParams(target="sm_100a")


def config(**changes):
    return dataclasses.replace(SMALL, **changes)


def check(shape, c, dtype=jnp.float16, out_dtype=None):
    matmuls.check(shape, c, dtype, out_dtype, on_gpu=False)


@pytest.mark.smoke
def test_one_tile():
    check((128, 64, 64), SMALL)


@pytest.mark.parametrize("shape", [(256, 64, 128), (256, 192, 192), (128, 320, 64)])
def test_several_tiles_in_each_block(shape):
    check(shape, SMALL)


def test_a_number_of_tiles_that_the_blocks_do_not_divide():
    check((384, 192, 64), config(blocks=4))


def test_more_blocks_than_tiles():
    check((256, 128, 128), config(blocks=148))


@pytest.mark.slow
@pytest.mark.parametrize("minor", ["m", "n"])
@pytest.mark.parametrize("strip", [1, 3])
def test_the_order_of_tiles_covers_them_all(minor, strip):
    check((384, 256, 64), config(minor=minor, strip=strip, blocks=3))


@pytest.mark.parametrize("shape", [(64, 64, 64), (129, 67, 65)])
def test_tiles_need_not_divide_the_problem(shape):
    check(shape, SMALL)


@pytest.mark.parametrize("stages", [1, 3, 5])
def test_any_number_of_stages(stages):
    check((256, 128, 256), config(stages=stages))


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_an_epilogue_in_parts(parts):
    check((256, 192, 64), config(tile_n=96, epilogue_n=96 // parts, blocks=1))


@pytest.mark.parametrize(("n", "k"), [(16, 16), (48, 32), (80, 48), (256, 64)])
def test_tiles_of_any_size(n, k):
    check((128, 2 * n, 3 * k), config(tile_n=n, tile_k=k))


@pytest.mark.parametrize(
    ("dtype", "out"),
    [("bfloat16", None), ("bfloat16", "float32"), ("float16", "bfloat16")],
)
def test_types_of_operands_and_result(dtype, out):
    check((128, 128, 64), SMALL, jnp.dtype(dtype), out)


def test_vmap_makes_a_batch_of_products():
    a, b = operands(128, 64, 64, batch=(3,))
    got = jax.vmap(lambda x, y: matmul(x, y, config=SMALL))(a, b)
    expected = reference(a, b)
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=2**-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((256, 64, 64), {}),
        ((768, 192, 192), {"blocks": 4}),
        ((512, 192, 320), {"blocks": 2, "stages": 3}),
        ((512, 256, 64), {"blocks": 148, "minor": "n"}),
        ((256, 512, 128), {"tile_n": 256, "stages": 3}),
        ((256, 64, 48), {"tile_n": 32, "tile_k": 16, "stages": 1}),
    ],
)
def test_pairs_of_blocks_share_tiles(shape, changes):
    check(shape, config(collective=True, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("collective", [False, True])
def test_blocks_take_the_next_tile_when_they_are_free(collective):
    check((512, 192, 128), config(dynamic=True, collective=collective))


def test_pairs_store_float32():
    check((512, 128, 64), config(collective=True), jnp.bfloat16, "float32")


@pytest.mark.parametrize(
    ("collective", "dynamic"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("asynchrony", ["eager", "late", "random"])
def test_no_schedule_has_a_race(asynchrony, collective, dynamic):
    # Three tiles for each block, or pair, which has two accumulators.
    shape = (512, 192, 192)
    a, b = operands(*shape)
    # A result that depends on the schedule is an error.
    options = {"asynchrony": asynchrony, "detect_races": True, "schedules": 12}
    interpret = plgpu.InterpretParams(**options)
    c = config(stages=3, blocks=4, collective=collective, dynamic=dynamic)
    got = matmul(a, b, config=c, interpret=interpret)
    expected = reference(a, b)
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, atol=2**-5)


# --- compiled -------------------------------------------------------------------------


@pytest.mark.offline
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("semantics", plgpu.LoweringSemantics)
@pytest.mark.parametrize(
    ("c", "size"),
    [
        (BlackwellMatmulConfig(), 4096),
        (BlackwellMatmulConfig(), 1000),
        (PAIRS, 4096),
        (DYNAMIC, 4096),
    ],
    ids=["one", "one-edge", "pairs", "dynamic"],
)
def test_a_product_of_large_matrices_compiles_without_spills(c, size, semantics, out):
    params = dataclasses.replace(BLACKWELL, lowering_semantics=semantics)
    x = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    options = {"config": c, "out_dtype": out, "compiler_params": params}
    product = functools.partial(matmul, **options)
    (report,) = plgpu.offline.compile(product, x, x, target="sm_100a")
    used = report.resources
    assert used.spill_store_bytes == used.spill_load_bytes == 0
    assert used.tmem_columns == 512
    # One buffer of K = 64 is four instructions.
    assert report.instruction_counts["tcgen05.mma"] == 4
    assert report.instruction_counts["tcgen05.commit"] == 2
    assert f"tcgen05.mma.cta_group::{c.ctas}.kind::f16" in report.ptx
    requests = report.ptx.count("clusterlaunchcontrol.try_cancel.async")
    assert requests == int(c.dynamic)


# --- the choice of the kernel ---------------------------------------------------------


def kernel_target(**options):
    a, b = operands(256, 256, 128)
    closed = jax.make_jaxpr(lambda x, y: matmul(x, y, **options))(a, b)
    (params,) = (
        site.eqn.params["compiler_params"]
        for site in walk.walk(closed.jaxpr)
        if "compiler_params" in site.eqn.params
    )
    return params.target


def test_the_target_chooses_the_kernel():
    assert kernel_target() is None
    assert kernel_target(compiler_params=BLACKWELL) == "sm_100a"


def test_the_configuration_chooses_the_kernel():
    assert kernel_target(config=SMALL) == "sm_100a"
    assert kernel_target(config=MatmulConfig(cluster=None)) is None


@pytest.mark.parametrize(
    ("c", "target"), [(SMALL, "sm_90a"), (MatmulConfig(), "sm_100a")]
)
@refused
def test_the_configuration_is_for_the_target(c, target):
    a, b = operands(256, 256, 128)
    params = plgpu.CompilerParams(target=target)
    matmul(a, b, config=c, compiler_params=params)


# --- refusals -------------------------------------------------------------------------


@refused
def test_the_types_have_16_bits():
    a, b = operands(64, 64, 64, jnp.float32)
    matmul(a, b, config=SMALL)


@pytest.mark.parametrize(
    "changes",
    [
        {"epilogue_n": 48},
        {"epilogue_n": 8},
        {"minor": "k"},
        {"strip": 0},
        {"stages": 0},
        {"blocks": 0},
        {"tile_n": 272},
        {"tile_k": 8},
        {"tile_n": 48, "collective": True},
        {"blocks": 1, "collective": True},
    ],
    ids=str,
)
@refused
def test_a_configuration_fits_the_tensor_core_and_itself(changes):
    config(**changes)


def test_the_buffers_fit_shared_memory():
    a, b = operands(128, 256, 64)
    with pytest.raises(errors.OutOfResources, match="needs more SMEM"):
        matmul(a, b, config=BlackwellMatmulConfig(stages=6))
