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
from pallas_gpu.ops import BlackwellMatmulConfig, MatmulConfig, matmul
from tests.support import emulated, matmuls
from tests.support.matmuls import ROUNDING, operands, reference
from tests.support.semantics import Warpgroup

SMALL = MatmulConfig(
    tile_m=64, tile_n=64, tile_k=64, stages=2, blocks=2, cluster=None, strip=2
)


ON_BLACKWELL = BlackwellMatmulConfig(tile_n=64, tile_k=64, stages=2, blocks=2, strip=2)


def config(**changes):
    return dataclasses.replace(SMALL, **changes)


def blackwell(**changes):
    return dataclasses.replace(ON_BLACKWELL, **changes)


def check(shape, c, dtype=jnp.float16, out_dtype=None):
    # For the time of the suite; tests/lockstep executes matmul under both semantics.
    on_gpu = isinstance(c, MatmulConfig)
    matmuls.check(shape, c, dtype, out_dtype, executed=[Warpgroup], on_gpu=on_gpu)


@pytest.mark.parametrize(
    ("c", "shape"),
    [
        (config(blocks=4), (128, 64, 64)),
        (config(blocks=4), (256, 192, 128)),
        (config(blocks=4, cluster="n"), (256, 256, 192)),
        (config(blocks=4, cluster="m"), (512, 128, 192)),
        (ON_BLACKWELL, (256, 192, 192)),
        (ON_BLACKWELL, (128, 320, 64)),
    ],
)
def test_one_tile_and_several_in_every_kind_of_cluster(c, shape):
    check(shape, c)


@pytest.mark.parametrize(
    "c", [config(), config(cluster="m"), config(cluster="n"), blackwell()]
)
def test_more_blocks_than_tiles(c):
    check((256, 128, 128), dataclasses.replace(c, blocks=16))


@pytest.mark.parametrize("c", [SMALL, ON_BLACKWELL])
def test_a_number_of_tiles_that_the_blocks_do_not_divide(c):
    check((384, 192, 64), dataclasses.replace(c, blocks=4))


@pytest.mark.parametrize("c", [SMALL, ON_BLACKWELL])
@pytest.mark.parametrize(("minor", "strip"), [("m", 3), ("n", 1)])
def test_the_order_of_tiles_covers_them_all(c, minor, strip):
    c = dataclasses.replace(c, minor=minor, strip=strip, blocks=3)
    check((384, 256, 64), c)


@pytest.mark.parametrize(
    ("shape", "c"),
    [
        ((1, 1, 1), SMALL),
        ((130, 72, 80), SMALL),
        ((129, 67, 65), SMALL),
        # Tiles of a cluster that are outside as a whole.
        ((128, 64, 64), config(cluster="n")),
        ((72, 136, 72), config(cluster="m")),
        ((129, 67, 65), ON_BLACKWELL),
    ],
)
def test_tiles_and_clusters_need_not_divide_the_problem(shape, c):
    check(shape, c)


@pytest.mark.parametrize(
    "c",
    [config(stages=3), config(stages=6), blackwell(stages=1), blackwell(stages=5)],
)
def test_any_number_of_stages(c):
    check((128, 64, 256), c)


@pytest.mark.parametrize(
    "c",
    [
        *(config(tile_n=192, epilogue_n=n) for n in (192, 96, 64)),
        *(blackwell(tile_n=96, epilogue_n=n) for n in (96, 32)),
    ],
)
def test_an_epilogue_in_parts(c):
    check((256, 192, 64), dataclasses.replace(c, blocks=1))


@pytest.mark.parametrize(
    "c",
    [
        *(
            config(tile_n=n, tile_k=k, epilogue_n=part)
            for n, k, part in ((48, 16, 16), (80, 48, 80), (16, 32, 16))
        ),
        *(blackwell(tile_n=n, tile_k=k) for n, k in ((16, 16), (48, 32), (256, 64))),
    ],
)
def test_tiles_of_narrow_swizzles(c):
    check((128, 2 * c.tile_n, 3 * c.tile_k), c)


@pytest.mark.parametrize("c", [config(epilogue_n=32), ON_BLACKWELL])
@pytest.mark.parametrize(
    ("dtype", "out"), [("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_types_of_operands_and_result(c, dtype, out):
    check((128, 64, 64), c, jnp.dtype(dtype), out)


@pytest.mark.parametrize(
    ("cluster", "shape"),
    [(None, (72, 136, 136)), ("m", (64, 256, 64)), ("n", (72, 136, 136))],
)
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
    emulated.check(make, arrays, expected, atol=0.06, executed=[Warpgroup])


@pytest.mark.parametrize("c", [SMALL, ON_BLACKWELL])
def test_vmap_makes_a_batch_of_products(c):
    a, b = operands(128, 64, 64, batch=(3,))
    got = jax.vmap(lambda x, y: matmul(x, y, config=c))(a, b)
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
