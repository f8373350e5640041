# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit matrices: types, scales, sizes, schedules, and what is refused."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.ops import BlackwellMatmulConfig, ScaledMatmulConfig, scaled_matmul
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.narrow.scaled import default_config
from tests.support import emulated, host
from tests.support.narrow_products import scales
from tests.support.semantics import Warpgroup

E4M3, E5M2, I8 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8
SMALL = ScaledMatmulConfig(
    tile_m=64, tile_n=64, stages=2, blocks=4, cluster=None, strip=2
)
BLOCKED = dataclasses.replace(SMALL, tile_n=128)


def config(**changes):
    return dataclasses.replace(SMALL, **changes)


def random(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    if dtype == I8:
        return host.array(rng.integers(-128, 128, shape), dtype)
    return host.array(rng.integers(-8, 9, shape) / 4, dtype)


def spread(scale, shape):
    """Scales of blocks as one for each element."""
    scale = np.asarray(scale, np.float64)
    if scale.ndim < 2:
        return scale.reshape(-1, 1) if scale.ndim else scale
    for axis, size in enumerate(shape):
        each = 128 if scale.shape[axis] != size else 1
        scale = np.repeat(scale, each, axis).take(range(size), axis)
    return scale


def reference(a, b, a_scale, b_scale, bias=None):
    """The product in float64; b is (N, K), and so are its scales of blocks."""
    left, right = (
        np.asarray(x, np.float64) * (1 if s is None else spread(s, x.shape))
        for x, s in ((a, a_scale), (b, b_scale))
    )
    product = left @ right.T
    return product if bias is None else product + np.asarray(bias, np.float64)


def check(
    shape,
    kinds="nn",
    types=(E4M3, E4M3),
    biased=False,
    rtol=2e-3,
    executed=(),
    **options,
):
    """Compares a product of random operands with NumPy's.

    Args:
      kinds: of the scales of a and b: "n"one, "t"ensor, "r"ows or columns, "b"locks.
      rtol: of the largest element.
      executed: semantics whose module is executed.
    """
    m, n, k = shape
    a, b = random((m, k), types[0]), random((n, k), types[1], 1)
    blocks = plgpu.cdiv(k, 128)
    made = [
        {"n": None, "t": scales(), "r": scales(size), "b": scales(rows, blocks)}[kind]
        for kind, size, rows in zip(kinds, (m, n), (m, plgpu.cdiv(n, 128)), strict=True)
    ]
    bias = scales(n) if biased else None
    expected = reference(a, b, *made, bias)
    given = {"a_scale": made[0], "b_scale": made[1], "bias": bias}
    given = {name: x for name, x in given.items() if x is not None}
    options = {"out_dtype": jnp.float32, "transpose_b": True, **options}
    if not options["transpose_b"]:
        b = b.T
        if kinds[1] == "b":
            given["b_scale"] = given["b_scale"].T

    def make(interpret):
        def run(a, b, *values):
            named = dict(zip(given, values, strict=True))
            return scaled_matmul(a, b, **named, **options, interpret=interpret)

        return run

    args = [a, b, *given.values()]
    atol = rtol * np.abs(expected).max()
    emulated.check(make, args, expected, executed, atol=atol)


@pytest.mark.parametrize(
    ("types", "kinds"),
    [
        *(((E4M3, E4M3), "tr"), ((E4M3, E5M2), "nn")),
        *(((E5M2, E5M2), "tr"), ((I8, I8), "tr")),
    ],
)
def test_types_and_scales(types, kinds):
    check((65, 40, 48), kinds, types, config=SMALL)


@pytest.mark.parametrize("collective", [False, True])
@pytest.mark.parametrize(
    ("types", "kinds"), [((E4M3, E5M2), "rr"), ((I8, I8), "nt"), ((I8, I8), "nn")]
)
def test_blackwells_kernel(types, kinds, collective):
    c = BlackwellMatmulConfig(
        tile_n=64, tile_k=128, stages=2, blocks=4, collective=collective
    )
    params = plgpu.CompilerParams(target="sm_100a")
    options = {"compiler_params": params, "config": c}
    # Without scales and a bias, integers are still converted.
    check((300, 100, 272), kinds, types, biased=kinds != "nn", **options)


@pytest.mark.parametrize(
    ("types", "kinds"),
    [
        *(((E4M3, E4M3), kinds) for kinds in ("bb", "br", "tb")),
        ((E5M2, E4M3), "bb"),
        ((I8, I8), "br"),
    ],
)
def test_scales_of_blocks(types, kinds):
    check((65, 136, 272), kinds, types, biased=True, config=BLOCKED)


@pytest.mark.parametrize("cluster", [None, "m", "n"])
@pytest.mark.parametrize("promote", [False, True])
def test_sizes_that_divide_nothing_in_every_cluster(cluster, promote):
    c = config(cluster=cluster)
    check((150, 130, 272), "rr", biased=True, promote=promote, config=c)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 17), (70, 33, 100)])
def test_rows_that_tma_cannot_address(shape):
    check(shape, "rr", config=SMALL)


@pytest.mark.parametrize(
    ("size", "blocks"),
    # 1024 pairs of tiles, 16 for each of 64 clusters; 162 pairs, 3 for each of 54.
    [(8192, 128), (2304, 108), (64, 1)],
)
def test_the_default_has_no_more_blocks_than_save_a_turn(size, blocks):
    types = map(jnp.dtype, (E4M3, jnp.bfloat16))
    p = Problem(size, size, 64, *types)
    assert default_config(p).blocks == blocks


@pytest.mark.parametrize("shape", [(0, 4, 8), (4, 0, 8), (4, 4, 0)])
def test_sizes_of_zero(shape):
    m, n, k = shape
    a, b, bias = host.zeros((m, k), I8), host.zeros((k, n), I8), scales(n)
    got = scaled_matmul(a, b, bias=bias, out_dtype=jnp.float32)
    np.testing.assert_array_equal(got, np.broadcast_to(bias, (m, n)))


@pytest.mark.parametrize("kinds", ["rr", "bb"])
def test_b_of_both_layouts(kinds):
    check((64, 136, 256), kinds, transpose_b=False, config=BLOCKED)


@pytest.mark.parametrize(
    ("out", "rtol"), [("bfloat16", 5e-3), ("float16", 2e-3), ("float8_e4m3fn", 0.07)]
)
def test_types_of_the_result(out, rtol):
    check((64, 64, 128), "tt", rtol=rtol, out_dtype=out, config=SMALL)


def test_sums_of_integers_are_exact():
    check((64, 40, 272), types=(I8, I8), rtol=0, out_dtype=jnp.int32, config=SMALL)


@pytest.mark.parametrize(("consumers", "tile_m"), [(3, 64), (2, 128), (3, 128)])
def test_consumers_of_any_rows(consumers, tile_m):
    c = config(tile_m=tile_m, consumers=consumers, tile_n=32)
    check((200, 64, 128), "rr", config=c)


def test_the_product_of_the_scales_need_not_be_a_float():
    a, b = host.array(np.zeros((64, 128)), E4M3), host.array(np.ones((64, 128)), E4M3)
    large = jnp.full(1, 1e20, jnp.float32)
    got = scaled_matmul(a, b, large, large, transpose_b=True, out_dtype=jnp.float32)
    np.testing.assert_array_equal(got, 0)


@pytest.mark.parametrize("kinds", ["tt", "bb"])
@pytest.mark.parametrize("zigzag", [False, True])
def test_tiles_of_a_block_go_through_k_in_either_direction(kinds, zigzag):
    # Three tiles of a block, three steps, the last of which is not whole.
    c = dataclasses.replace(BLOCKED, zigzag=zigzag, blocks=1)
    check((190, 100, 272), kinds, config=c)


def test_the_order_of_k_shows_in_the_position_of_a_tile_alone():
    """Equal tiles of a block have other sums if one goes through K backwards."""
    k = 512
    row = np.full(k, 2.0**-4)
    row[:128] = 448
    a = host.array(np.tile(row, (128, 1)), E4M3)
    b = host.array(np.ones((64, k)), E4M3)

    def product(zigzag):
        c = config(zigzag=zigzag, blocks=1, tile_m=64, consumers=2, tile_n=32)
        got = scaled_matmul(a, b, transpose_b=True, out_dtype=jnp.float32, config=c)
        return np.asarray(got)

    assert len(np.unique(product(False))) == 1
    assert len(np.unique(product(True))) == 2


@pytest.mark.parametrize(
    "changes", [{"minor": "m"}, {"strip": 1}, {"blocks": 2}, {"stages": 3}]
)
def test_any_order_of_tiles_and_number_of_stages(changes):
    check((300, 200, 600), config=config(**changes))


def test_promoted_sums_are_more_precise():
    # One large product, and beside it 255 ones.
    a = host.ones((8, 256), E4M3).at[:, 0].set(448.0)
    b = a
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    product = functools.partial(
        scaled_matmul, a, b, transpose_b=True, out_dtype=jnp.float32
    )
    short, long = (np.asarray(product(promote=x), float) for x in (True, False))
    assert np.abs(short - exact).max() < np.abs(long - exact).max()


def test_a_batch_by_vmap():
    a, b = random((2, 16, 32), E4M3), random((2, 8, 32), E4M3, 1)
    product = functools.partial(scaled_matmul, transpose_b=True, config=SMALL)
    expected = np.einsum("bmk,bnk->bmn", *(np.asarray(x, float) for x in (a, b)))
    got = np.asarray(jax.vmap(product)(a, b), float)
    np.testing.assert_allclose(got, expected, rtol=0.01)


@pytest.mark.parametrize("kinds", ["rr", "bb"])
def test_the_emitted_module_computes_the_product(kinds):
    check((65, 136, 160), kinds, config=BLOCKED, executed=[Warpgroup])
