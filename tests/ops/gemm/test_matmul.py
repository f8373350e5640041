# SPDX-License-Identifier: Apache-2.0
"""The matrix product: every configuration in the emulator, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu import offline
from pallas_gpu.ops import (
    BlackwellMatmulConfig,
    MatmulConfig,
    SplitMatmulConfig,
    matmul,
)
from tests.support import emulated, matmuls
from tests.support.matmuls import ROUNDING, operands, reference
from tests.support.semantics import Warpgroup

SMALL = MatmulConfig(
    tile_m=64, tile_n=64, tile_k=64, stages=2, blocks=2, cluster=None, strip=2
)


FEW_ROWS = SplitMatmulConfig(
    tile_m=8, tile_n=64, tile_k=32, stages=2, warpgroups=1, split=2
)
ON_BLACKWELL = BlackwellMatmulConfig(tile_n=64, tile_k=64, stages=2, blocks=2, strip=2)


def config(**changes):
    return dataclasses.replace(SMALL, **changes)


def blackwell(**changes):
    return dataclasses.replace(ON_BLACKWELL, **changes)


def assert_close(got, a, b):
    got = np.asarray(got, np.float32)
    np.testing.assert_allclose(got, reference(a, b), atol=ROUNDING["float16"])


def check(shape, c, dtype=jnp.float16, out_dtype=None):
    # For the time of the suite; tests/lockstep executes matmul under both semantics.
    on_gpu = isinstance(c, MatmulConfig)
    matmuls.check(shape, c, dtype, out_dtype, executed=[Warpgroup], on_gpu=on_gpu)


def each(name, shape, *configs, types=("float16", None)):
    """Cases with each configuration."""
    return {f"{name}, {i}": (shape, c, *types) for i, c in enumerate(configs)}


CLUSTERS = config(), config(cluster="m"), config(cluster="n"), blackwell()
ORDERS = [
    dataclasses.replace(c, minor=minor, strip=strip, blocks=3)
    for c in (SMALL, ON_BLACKWELL)
    for minor, strip in (("m", 3), ("n", 1))
]
STAGES = config(stages=3), config(stages=6), blackwell(stages=1), blackwell(stages=5)
IN_PARTS = [
    *(config(tile_n=192, epilogue_n=n, blocks=1) for n in (192, 96, 64)),
    *(blackwell(tile_n=96, epilogue_n=n, blocks=1) for n in (96, 32)),
]
NARROW = [
    *(
        config(tile_n=n, tile_k=k, epilogue_n=part)
        for n, k, part in ((48, 16, 16), (80, 48, 80), (16, 32, 16))
    ),
    *(blackwell(tile_n=n, tile_k=k) for n, k in ((16, 16), (48, 32), (256, 64))),
]
TURNED = config(transposed=True, epilogue_n=32)
CASES = {
    **each("one tile", (128, 64, 64), config(blocks=4)),
    **each("several tiles", (256, 192, 128), config(blocks=4)),
    **each("a cluster of columns", (256, 256, 192), config(blocks=4, cluster="n")),
    **each("a cluster of rows", (512, 128, 192), config(blocks=4, cluster="m")),
    **each("tiles on Blackwell", (256, 192, 192), ON_BLACKWELL),
    **each("columns on Blackwell", (128, 320, 64), ON_BLACKWELL),
    **each(
        *("more blocks than tiles", (256, 128, 128)),
        *(dataclasses.replace(c, blocks=16) for c in CLUSTERS),
    ),
    **each("tiles left", (384, 192, 64), config(blocks=4), blackwell(blocks=4)),
    **each("order of tiles", (384, 256, 64), *ORDERS),
    **each("one element", (1, 1, 1), SMALL),
    **each("parts of tiles", (130, 72, 80), SMALL),
    **each("odd sizes", (129, 67, 65), SMALL, ON_BLACKWELL),
    # Tiles of a cluster that are outside as a whole.
    **each("columns outside", (128, 64, 64), config(cluster="n")),
    **each("rows outside", (72, 136, 72), config(cluster="m")),
    **each("stages", (128, 64, 256), *STAGES),
    **each("an epilogue in parts", (256, 192, 64), *IN_PARTS),
    **{
        f"narrow swizzles, {i}": ((128, 2 * c.tile_n, 3 * c.tile_k), c, "float16", None)
        for i, c in enumerate(NARROW)
    },
    **{
        f"{types}, {name}": case
        for types in (("bfloat16", "float32"), ("float16", "bfloat16"))
        for name, case in each(
            *("types", (128, 64, 64), config(epilogue_n=32), ON_BLACKWELL), types=types
        ).items()
    },
    # The tensor core computes the transposed product.
    **each("transposed", (72, 136, 136), TURNED),
    **each("transposed rows", (64, 256, 64), dataclasses.replace(TURNED, cluster="m")),
    **each(
        *("transposed columns", (72, 136, 136)),
        dataclasses.replace(TURNED, cluster="n"),
    ),
    **each("two parts of k", (128, 64, 128), config(parts=2, blocks=4)),
    # The last part is shorter.
    **each("three parts of k", (72, 72, 264), config(parts=3, blocks=4)),
    **each(
        *("parts of k, transposed", (64, 136, 192)),
        config(parts=2, transposed=True, blocks=4),
    ),
}


@pytest.mark.parametrize(("shape", "c", "dtype", "out"), CASES.values(), ids=CASES)
def test_every_configuration(shape, c, dtype, out):
    check(shape, c, jnp.dtype(dtype), out)


def test_parts_of_k_of_a_batch():
    a, b = operands(40, 24, 192, batch=(2,))
    assert_close(matmul(a, b, config=config(parts=3, blocks=4)), a, b)


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
    arrays = [a, b] if c.transposed else [a.T, b.T]
    turned = not c.transposed
    given = {"transpose_a": turned, "transpose_b": turned, "config": c}

    def make(interpret):
        return functools.partial(matmul, **given, interpret=interpret)

    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    emulated.check(make, arrays, expected, atol=0.06, executed=[Warpgroup])


@pytest.mark.parametrize("c", [SMALL, ON_BLACKWELL, FEW_ROWS])
def test_vmap_makes_a_batch_of_products(c):
    a, b = operands(128, 64, 64, batch=(3,))
    assert_close(jax.vmap(functools.partial(matmul, config=c))(a, b), a, b)


def test_vmap_over_one_operand():
    a, b = operands(128, 64, 64, batch=(2,))
    assert_close(jax.vmap(lambda x: matmul(x, b[0], config=SMALL))(a), a, b[0])


def test_the_product_under_x64():
    a, b = operands(128, 64, 64)
    with jax.enable_x64(True):
        product = matmul(a, b, config=SMALL)
    assert_close(product, a, b)


@pytest.mark.offline
@pytest.mark.parametrize("cluster", ["m", "n"])
def test_blocks_of_a_cluster_arrive_without_a_fence(cluster):
    """They publish reads alone; a fence in each step costs a third of the speed."""
    c = MatmulConfig(tile_m=64, tile_n=64, stages=2, cluster=cluster)
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    (report,) = offline.compile(functools.partial(matmul, config=c), x, x)
    assert "mbarrier.arrive.release.cta.shared::cluster" in report.ptx
    assert "mbarrier.arrive.release.cluster" not in report.ptx
