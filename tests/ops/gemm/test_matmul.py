# SPDX-License-Identifier: Apache-2.0
"""The matrix product: every configuration in the emulator, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors, offline
from pallas_gpu.ops.gemm.matmul import MatmulConfig, matmul
from tests.support import everywhere, matmuls
from tests.support.matmuls import ROUNDING, operands, reference
from tests.support.refusal import refused
from tests.support.semantics import Warpgroup

pytestmark = pytest.mark.sampled(2)

SMALL = MatmulConfig(
    tile_m=64, tile_n=64, tile_k=64, stages=2, blocks=2, cluster=None, strip=2
)


def config(**changes):
    return dataclasses.replace(SMALL, **changes)


def check(shape, c, dtype=jnp.float16, out_dtype=None):
    # For the time of the suite; tests/lockstep executes matmul under both semantics.
    matmuls.check(shape, c, dtype, out_dtype, executed=[Warpgroup])


@pytest.mark.parametrize(
    ("cluster", "shape"),
    [
        (None, (128, 64, 64)),
        (None, (256, 192, 128)),
        ("n", (128, 128, 64)),
        ("n", (256, 256, 192)),
        ("m", (256, 64, 64)),
        ("m", (512, 128, 192)),
    ],
)
def test_one_tile_and_several_in_every_kind_of_cluster(cluster, shape):
    check(shape, config(cluster=cluster, blocks=4))


@pytest.mark.parametrize("cluster", [None, "m", "n"])
def test_more_blocks_than_tiles(cluster):
    check((256, 128, 128), config(cluster=cluster, blocks=132))


def test_a_number_of_tiles_that_the_blocks_do_not_divide():
    check((384, 192, 64), config(blocks=4))


@pytest.mark.parametrize("minor", ["m", "n"])
@pytest.mark.parametrize("strip", [1, 3])
def test_the_order_of_tiles_covers_them_all(minor, strip):
    check((384, 256, 64), config(minor=minor, strip=strip, blocks=3))


@pytest.mark.parametrize(
    ("shape", "cluster"),
    [
        ((1, 1, 1), None),
        ((130, 72, 80), None),
        ((129, 67, 65), None),
        # Tiles of a cluster that are outside as a whole.
        ((128, 64, 64), "n"),
        ((72, 136, 72), "m"),
    ],
)
def test_tiles_and_clusters_need_not_divide_the_problem(shape, cluster):
    check(shape, config(cluster=cluster))


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_any_number_of_stages(stages):
    check((128, 64, 256), config(stages=stages))


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_an_epilogue_in_parts(parts):
    check((256, 192, 64), config(tile_n=192, epilogue_n=192 // parts, blocks=1))


@pytest.mark.parametrize("sizes", [(48, 16, 16), (80, 48, 80), (16, 32, 16)])
def test_tiles_of_narrow_swizzles(sizes):
    n, k, part = sizes
    check((128, 2 * n, 3 * k), config(tile_n=n, tile_k=k, epilogue_n=part))


@pytest.mark.parametrize(
    ("dtype", "out"),
    [("bfloat16", None), ("bfloat16", "float32"), ("float16", "bfloat16")],
)
def test_types_of_operands_and_result(dtype, out):
    check((128, 64, 64), config(epilogue_n=32), jnp.dtype(dtype), out)


@pytest.mark.parametrize("cluster", [None, "m", "n"])
@pytest.mark.parametrize("shape", [(64, 256, 64), (72, 136, 136)])
def test_the_tensor_core_computes_the_transposed_product(cluster, shape):
    check(shape, config(cluster=cluster, transposed=True, epilogue_n=32))


@pytest.mark.parametrize(
    ("parts", "transposed", "shape"),
    [
        (2, False, (128, 64, 128)),
        (3, False, (72, 72, 264)),  # the last part is shorter
        (2, True, (64, 136, 192)),
    ],
)
def test_parts_of_k_are_added(parts, transposed, shape):
    check(shape, config(parts=parts, transposed=transposed, blocks=4))


def test_parts_of_k_of_a_batch():
    a, b = operands(40, 24, 192, batch=(2,))
    got = matmul(a, b, config=config(parts=3, blocks=4))
    np.testing.assert_allclose(
        np.asarray(got, np.float32), reference(a, b), atol=ROUNDING["float16"]
    )


TF32 = dataclasses.replace(SMALL, tile_k=32, epilogue_n=32)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((72, 136, 104), {"transposed": True}),
        ((64, 128, 64), {"transposed": True, "cluster": "m", "tile_m": 128}),
        ((136, 72, 40), {}),
    ],
)
def test_a_float32_operand_is_transposed_on_its_way_to_the_tensor_core(shape, options):
    c = dataclasses.replace(TF32, **options)
    a, b = operands(*shape, jnp.float32)
    stored = c.transposed, not c.transposed
    arrays = [a if stored[0] else a.T, b.T if stored[1] else b]

    def make(interpret):
        return lambda x, y: matmul(
            x,
            y,
            transpose_a=not stored[0],
            transpose_b=stored[1],
            config=c,
            interpret=interpret,
        )

    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    everywhere.check(make, arrays, expected, atol=0.06, executed=[Warpgroup])


def test_vmap_makes_a_batch_of_products():
    a, b = operands(128, 64, 64, batch=(3,))
    got = jax.vmap(lambda x, y: matmul(x, y, config=SMALL))(a, b)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), reference(a, b), atol=ROUNDING["float16"]
    )


def test_vmap_over_one_operand():
    a, b = operands(128, 64, 64, batch=(2,))
    product = jax.vmap(lambda x: matmul(x, b[0], config=SMALL))(a)
    np.testing.assert_allclose(
        np.asarray(product, np.float32),
        reference(a, b[0]),
        atol=ROUNDING["float16"],
    )


def emulated(shape, c, **options):
    a, b = operands(*shape)
    interpret = plgpu.InterpretParams(**options)
    return np.asarray(matmul(a, b, config=c, interpret=interpret))


@pytest.mark.slow
def test_a_hundred_orders_of_events_give_one_result():
    c = config(cluster="n")
    shape = (256, 128, 256)
    # A result that depends on the schedule is an error.
    got = emulated(shape, c, schedules=100)
    np.testing.assert_allclose(
        got.astype(np.float32), reference(*operands(*shape)), atol=2**-5
    )


@pytest.mark.parametrize("asynchrony", ["eager", "late", "random"])
@pytest.mark.parametrize("cluster", [None, "n", "m"])
@pytest.mark.parametrize("transposed", [False, True])
def test_there_is_no_race(cluster, asynchrony, transposed):
    shape = (512, 256, 256)
    options = {"asynchrony": asynchrony, "detect_races": True, "seed": 3}
    c = config(cluster=cluster, transposed=transposed)
    got = emulated(shape, c, **options)
    expected = reference(*operands(*shape))
    np.testing.assert_allclose(got.astype(np.float32), expected, atol=2**-5)


@pytest.mark.parametrize("asynchrony", ["eager", "late", "random"])
def test_transposing_in_registers_has_no_race(asynchrony):
    shape = (64, 128, 160)
    a, b = operands(*shape, jnp.float32)
    interpret = plgpu.InterpretParams(asynchrony=asynchrony, seed=3, schedules=3)
    c = dataclasses.replace(TF32, transposed=True)
    got = matmul(a, b, config=c, interpret=interpret)
    np.testing.assert_allclose(got, reference(a, b), atol=0.06)


@pytest.mark.parametrize("changes", [{"transposed": True}, {"parts": 2}])
def test_a_gate_needs_both_products_at_once(changes):
    a, b = operands(64, 64, 128)
    with pytest.raises(errors.ArgumentError, match="has no gate") as caught:
        matmul(a, b, gate=b, config=config(**changes))
    assert caught.value.expected and caught.value.hint


def test_every_part_of_k_has_a_step():
    a, b = operands(64, 64, 320)
    with pytest.raises(errors.ArgumentError, match="no part of K") as caught:
        matmul(a, b, config=config(parts=4))
    assert "at most 3 parts of K=320 in steps of 64" in str(caught.value)


@pytest.mark.offline
@pytest.mark.parametrize("cluster", [None, "m"])
def test_transposing_in_registers_compiles_without_spills(cluster):
    a = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    tile = {"tile_m": 64, "tile_n": 256, "tile_k": 32, "epilogue_n": 32}
    c = MatmulConfig(**tile, cluster=cluster, transposed=True)
    (report,) = offline.compile(functools.partial(matmul, config=c), a, a)
    assert report.resources.spill_store_bytes == 0
    # ptxas has not serialised the products.
    assert report.resources.remarks == ()


# --- refusals -------------------------------------------------------------------------


@refused
def test_the_shapes_form_a_product():
    a, _ = operands(128, 64, 64)
    matmul(a, a, config=SMALL)


@pytest.mark.parametrize("dtype", ["int16", "float8_e4m3fn"])
@refused
def test_the_types_are_those_of_the_tensor_core(dtype):
    a, b = operands(128, 64, 64, jnp.dtype(dtype))
    matmul(a, b, config=SMALL)


@refused
def test_operands_have_one_type():
    a, b = operands(128, 64, 64)
    matmul(a, b.astype(jnp.bfloat16), config=SMALL)


@pytest.mark.parametrize(
    "changes",
    [
        {"epilogue_m": 48},
        {"epilogue_n": 48},
        {"cluster": "k"},
        {"minor": "k"},
        {"strip": 0},
        {"stages": 1},
        {"blocks": 1, "cluster": "n"},
        {"tile_m": 96},
        {"tile_n": 512},
        {"tile_k": 8},
    ],
    ids=str,
)
@refused
def test_a_configuration_fits_the_tensor_core_and_itself(changes):
    config(**changes)


def test_the_buffers_fit_shared_memory():
    a, b = operands(256, 256, 512)
    c = config(tile_m=128, tile_n=256, stages=8)
    with pytest.raises(errors.OutOfResources, match="needs more SMEM") as caught:
        matmul(a, b, config=c)
    assert caught.value.limit_bytes < caught.value.used_bytes


def test_the_product_under_x64():
    a, b = operands(128, 64, 64)
    with jax.enable_x64(True):
        product = matmul(a, b, config=SMALL)
    np.testing.assert_allclose(product, reference(a, b), atol=ROUNDING["float16"])


@pytest.mark.offline
@pytest.mark.parametrize("cluster", ["m", "n"])
def test_blocks_of_a_cluster_arrive_without_a_fence(cluster):
    """They publish reads alone; a fence in each step costs a third of the speed."""
    c = MatmulConfig(tile_m=64, tile_n=64, stages=2, cluster=cluster)
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    (report,) = offline.compile(functools.partial(matmul, config=c), x, x)
    assert "mbarrier.arrive.release.cta.shared::cluster" in report.ptx
    assert "mbarrier.arrive.release.cluster" not in report.ptx
