# SPDX-License-Identifier: Apache-2.0
"""Linear layers: narrow weights of any type and size, both kernels, derivatives."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.ops import LinearFewConfig, LinearManyConfig, linear, quantize
from pallas_gpu.ops.gemm.problem import Problem
from pallas_gpu.ops.narrow.linear import default_config
from tests.support import emulated, host
from tests.support.narrow_products import scales
from tests.support.semantics import BOTH, Warpgroup

BF16, F16 = jnp.bfloat16, jnp.float16
INTEGERS, FLOATS = ["int8", "int4"], ["float8_e4m3fn", "float8_e5m2"]
FEW = LinearFewConfig(tokens=16, stages=2)
SPLIT = dataclasses.replace(FEW, splits=2, warpgroups=2)
RESIDENT = dataclasses.replace(FEW, resident=True)
# Clusters of two blocks, in which four warpgroups have two tiles of rows.
TURNS = dataclasses.replace(RESIDENT, rows=128, warpgroups=4, splits=2, blocks=2)
MANY = LinearManyConfig(tokens=64, stages=2, blocks=4)
# Of the largest element of a result; scales of groups are rounded to 8 or 11 bits.
ROUNDING = {"bfloat16": 2**-7, "float16": 2**-9, "float32": 1e-5}


def random(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    if jnp.dtype(dtype).name in INTEGERS:
        info = jnp.iinfo(dtype)
        return host.array(rng.integers(info.min, info.max + 1, shape), dtype)
    return host.array(rng.standard_normal(shape), dtype)


def wide_weights(w, scale, k, transpose_w=True):
    """(K, N) in float64, multiplied by the scales."""
    wide = np.asarray(w, np.float64)
    wide = wide.T if transpose_w else wide
    scale = np.asarray(scale, np.float64)
    if scale.ndim == 2:
        scale = np.repeat(scale, 2 ** int(np.ceil(np.log2(k / len(scale)))), 0)[:k]
    return wide * scale


def check(shape, w_type="int8", x_type=BF16, group=None, executed=(), **options):
    """Compares a layer of random operands with NumPy's."""
    tokens, n, k = shape
    options = {"transpose_w": True, "config": FEW, **options}
    x = random((tokens, k), x_type)
    w = random((n, k) if options["transpose_w"] else (k, n), w_type, 1)
    scale = scales(n) if group is None else scales(plgpu.cdiv(k, group), n)
    wide = wide_weights(w, scale, k, options["transpose_w"])
    expected = np.asarray(x, np.float64) @ wide

    def make(interpret):
        return lambda x, w, s: linear(x, w, w_scale=s, **options, interpret=interpret)

    out = jnp.dtype(options.get("out_dtype", x_type)).name
    worse = jnp.dtype(x_type).name if group else out
    atol = max(ROUNDING[out], ROUNDING[worse]) * np.abs(expected).max()
    # Layouts of narrow operands in registers are inferred.
    has_lane = isinstance(options["config"], LinearFewConfig)
    semantics = BOTH if has_lane else (Warpgroup,)
    emulated.check(
        make, [x, w, scale], expected, executed, semantics=semantics, atol=atol
    )


@pytest.mark.parametrize(
    ("w_type", "x_type"),
    [
        ("int8", "bfloat16"),
        ("int4", "bfloat16"),
        ("int4", "float16"),
        ("float8_e4m3fn", "float16"),
        ("float8_e5m2", "bfloat16"),
    ],
)
@pytest.mark.parametrize("config", [FEW, RESIDENT, MANY])
def test_types(config, w_type, x_type):
    check((9, 70, 96), w_type, x_type, config=config)


@pytest.mark.parametrize(
    ("group", "w_type"), [(32, "int4"), (64, "int8"), (128, "float8_e4m3fn")]
)
@pytest.mark.parametrize("config", [FEW, RESIDENT, MANY])
def test_scales_of_groups(config, w_type, group):
    check((5, 66, 288), w_type, group=group, config=config)


def every(bits):
    """All integers of so many bits, as weights of 64 columns."""
    low = -(2 ** (bits - 1))
    return jnp.asarray(np.arange(64 * 32).reshape(64, 32) % 2**bits + low, f"int{bits}")


@pytest.mark.parametrize("x_type", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_integer_is_converted_exactly(bits, x_type):
    w = every(bits)
    got = linear(jnp.eye(32, dtype=x_type), w, transpose_w=True, out_dtype=jnp.float32)
    np.testing.assert_array_equal(got, np.asarray(w, np.float32).T)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_float_is_converted_exactly(dtype):
    w = jnp.asarray(np.arange(256, dtype=np.uint8).reshape(8, 32)).view(dtype)
    finite = jnp.where(jnp.isfinite(w.astype(jnp.float32)), w, jnp.zeros_like(w))
    got = linear(
        jnp.eye(32, dtype=BF16), finite, transpose_w=True, out_dtype=jnp.float32
    )
    np.testing.assert_array_equal(got, np.asarray(finite, np.float32).T)


@pytest.mark.parametrize(
    ("shape", "w_type", "transpose_w"),
    [
        ((1, 1, 1), "int8", False),
        ((1, 1, 1), "int4", True),
        ((3, 5, 7), "int8", True),
        ((9, 33, 100), "int8", False),
        ((9, 33, 100), "int4", False),
        ((9, 33, 100), "int4", True),
    ],
)
def test_rows_that_tma_cannot_address(shape, w_type, transpose_w):
    check(shape, w_type, transpose_w=transpose_w)


@pytest.mark.parametrize(
    ("splits", "warpgroups", "rows", "group"),
    [
        *((1, 4, 64, None), (2, 1, 64, 64), (2, 4, 64, None)),
        *((8, 1, 64, 64), (1, 2, 128, 64), (2, 4, 128, None)),
    ],
)
def test_splits_of_k(splits, warpgroups, rows, group):
    c = dataclasses.replace(FEW, splits=splits, warpgroups=warpgroups, rows=rows)
    check((9, 130, 640), group=group, config=c)


@pytest.mark.parametrize("config", [FEW, RESIDENT])
def test_more_splits_than_steps(config):
    check((9, 70, 96), config=dataclasses.replace(config, splits=4, warpgroups=2))


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"blocks": None}, {"rows": 256, "stages": 3}, {"rows": 64}),
        {"splits": 1, "warpgroups": 2},
    ],
)
def test_turns_and_parts_of_resident_tokens(changes):
    # 5 tiles of rows, 5 steps of which the last part has fewer.
    check((9, 270, 600), config=dataclasses.replace(TURNS, **changes))


@pytest.mark.parametrize(("tokens", "stages"), [(16, 3), (48, 2), (64, 3)])
def test_tiles_of_tokens_and_stages(tokens, stages):
    check((40, 64, 384), config=LinearFewConfig(tokens=tokens, stages=stages))


@pytest.mark.parametrize(
    "changes",
    [
        *({"paired": False}, {"depth": 128}, {"stages": 3}),
        *({"strip": 1}, {"blocks": 2}, {"tokens": 128}),
    ],
)
def test_schedules_for_many_tokens(changes):
    check((140, 300, 160), "int4", config=dataclasses.replace(MANY, **changes))


@pytest.mark.parametrize(
    ("config", "activation"), [(FEW, "silu"), (MANY, "relu"), (FEW, jnp.tanh)]
)
def test_bias_and_activation(config, activation):
    x, w = random((9, 64), BF16), random((40, 64), "int8", 1)
    scale, bias = scales(40) / 100, random((40,), BF16, 2)
    got = linear(
        x, w, w_scale=scale, bias=bias, activation=activation, transpose_w=True,
        config=config, out_dtype=jnp.float32,
    )  # fmt: skip
    sums = np.asarray(x, np.float64) @ wide_weights(w, scale, 64)
    function = getattr(jax.nn, activation) if isinstance(activation, str) else np.tanh
    expected = function(sums + np.asarray(bias, np.float64))
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_any_leading_dimensions():
    x, w = random((2, 3, 64), BF16), random((40, 64), "int8", 1)
    got = linear(x, w, transpose_w=True)
    assert got.shape == (2, 3, 40)
    flat = linear(x.reshape(6, 64), w, transpose_w=True)
    np.testing.assert_array_equal(got.reshape(6, 40), flat)
    assert linear(x[0, 0], w, transpose_w=True).shape == (40,)


@pytest.mark.parametrize("shape", [(0, 4, 8), (4, 0, 8), (4, 4, 0)])
def test_sizes_of_zero(shape):
    tokens, n, k = shape
    x, w, bias = host.zeros((tokens, k), BF16), host.zeros((k, n), jnp.int8), scales(n)
    got = linear(x, w, bias=bias, out_dtype=jnp.float32)
    np.testing.assert_array_equal(got, np.broadcast_to(bias, (tokens, n)))


def test_weights_of_the_type_of_x():
    x, w, bias = random((9, 64), BF16), random((64, 40), BF16, 1), scales(40)
    got = linear(x, w, bias=bias, out_dtype=jnp.float32)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64) + np.asarray(bias)
    np.testing.assert_allclose(got, expected, atol=1e-4)


# --- transformations ------------------------------------------------------------------


def plain(x, w, scale, bias, k):
    wide = w.astype(jnp.float32).T
    each = scale if scale.ndim == 1 else jnp.repeat(scale, 32, 0)[:k]
    return jax.nn.silu(x.astype(jnp.float32) @ (wide * each) + bias)


@pytest.mark.parametrize(
    ("w_type", "grouped"),
    [("int8", False), ("int4", True), ("float8_e4m3fn", False)],
)
def test_derivatives(w_type, grouped):
    n, k = 40, 64
    x, w = random((5, k), F16), random((n, k), w_type, 1)
    scale = scales(*((2, n) if grouped else (n,))) / 16
    bias = scales(n)

    def loss(x, scale, bias):
        y = linear(
            x, w, w_scale=scale, bias=bias, activation="silu", transpose_w=True,
            out_dtype=jnp.float32,
        )  # fmt: skip
        return jnp.sin(y).sum()

    got = jax.jit(jax.grad(loss, (0, 1, 2)))(x, scale, bias)
    expected = jax.grad(lambda x, s, b: jnp.sin(plain(x, w, s, b, k)).sum(), (0, 1, 2))(
        x, scale, bias
    )
    for a, b in zip(got, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) < 2e-2 * np.linalg.norm(b)


def test_narrow_weights_have_no_derivative():
    x, w = random((5, 32), BF16), random((8, 32), "int8", 1)
    _, pull = jax.vjp(lambda x, w: linear(x, w, transpose_w=True), x, w)
    _, dw = pull(host.ones((5, 8), BF16))
    assert dw.dtype == jax.dtypes.float0


def test_a_batch_by_vmap():
    x, w = random((2, 5, 32), BF16), random((2, 8, 32), "int8", 1)
    got = jax.vmap(lambda x, w: linear(x, w, transpose_w=True))(x, w)
    expected = np.einsum("bmk,bnk->bmn", *(np.asarray(a, float) for a in (x, w)))
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=0.01, atol=1)


@pytest.mark.parametrize(
    ("config", "w_type"),
    [(SPLIT, "int8"), (TURNS, "int4"), (MANY, "int8"), (MANY, "int4")],
)
def test_the_emitted_module_computes_the_layer(config, w_type):
    check((9, 70, 288), w_type, config=config, executed=[Warpgroup])


@pytest.mark.offline
@pytest.mark.parametrize("w_type", ["int8", "int4"])
@pytest.mark.parametrize("group", [32, 64])
def test_weights_are_converted_while_the_tensor_core_multiplies(w_type, group):
    """With int8 only the product with the scales of groups follows the wait."""
    n, k = 256, 256
    of = jax.ShapeDtypeStruct
    args = of((256, k), BF16), of((n, k), w_type), of((k // group, n), jnp.float32)

    def run(x, w, scale):
        return linear(x, w, w_scale=scale, transpose_w=True, config=LinearManyConfig())

    (report,) = plgpu.offline.compile(run, *args)
    assert report.resources.spill_store_bytes == 0
    ahead = report.ptx.split("wgmma.wait_group")[0].rsplit("wgmma.mma", 1)[1]
    # A thread has 16 pairs of weights in 2 rows.
    converted = w_type == "int8"
    assert ahead.count("sub.") == (16 if converted else 0)
    scales = 2 * max(64 // group, 1) if converted else 0
    assert ahead.count("ld.shared") == 16 + scales


@pytest.mark.parametrize("out", [BF16, "float32"])
@pytest.mark.parametrize("w_type", ["int8", "int4", "float8_e4m3fn"])
def test_the_default_fits_with_small_groups(w_type, out):
    of = jax.ShapeDtypeStruct
    n, k = 1100, 128
    args = of((2048, k), BF16), of((n, k), w_type), of((k // 32, n), jnp.float32)

    def run(x, w, scale):
        return linear(x, w, w_scale=scale, transpose_w=True, out_dtype=out)

    assert jax.eval_shape(run, *args).shape == (2048, n)


def problem(tokens, n):
    wide, narrow = jnp.dtype(BF16), jnp.dtype(jnp.int8)
    return Problem(tokens, n, 4096, wide, wide, right=narrow)


@pytest.mark.parametrize(
    ("tokens", "n", "blocks"),
    # 1792 pairs of tiles, 28 for each of 64 clusters; 162 pairs, 3 for each of 54; 8
    # tiles of 64 tokens.
    [(4096, 28672, 128), (4608, 2304, 108), (256, 256, 8)],
)
def test_the_default_has_no_more_blocks_than_save_a_turn(tokens, n, blocks):
    assert default_config(problem(tokens, n)).blocks == blocks


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_few_tokens_have_a_kernel_of_their_own(tokens):
    assert isinstance(default_config(problem(tokens, 4096)), LinearFewConfig)


# --- rounding -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "axis", "dtype", "bits"),
    [
        *((None, 0, "int8", 7), (32, 1, "int8", 7), (50, -1, "int8", 7)),
        *((None, 1, "int4", 3), (50, 0, "int4", 3)),
    ],
)
def test_rounded_integers_are_near(dtype, bits, axis, group):
    w = np.asarray(random((100, 100), jnp.float32))
    values, scale = quantize(w, dtype, axis=axis, group=group)
    assert values.dtype == dtype and values.shape == w.shape
    values, w = (x if axis == 0 else np.asarray(x).T for x in (values, w))
    each = np.asarray(scale)
    assert each.shape == ((100,) if group is None else (plgpu.cdiv(100, group), 100))
    if group is not None:
        each = np.repeat(each, group, 0)[:100]
    error = np.abs(np.asarray(values, np.float64) * each - w)
    assert (error <= each / 2 * 1.001).all()
    assert np.abs(np.asarray(values, np.int32)).max() == 2**bits - 1


def test_rounded_floats_are_near():
    w = np.asarray(random((64, 8), jnp.float32))
    values, scale = quantize(w, jnp.float8_e4m3fn)
    got = np.asarray(values, np.float64) * np.asarray(scale)
    # 3 bits of mantissa; subnormals have fewer.
    np.testing.assert_allclose(got, w, rtol=2**-4, atol=float(scale.max()) * 2**-9)


def test_a_column_of_zeros_has_a_scale():
    values, scale = quantize(host.zeros((4, 2)))
    np.testing.assert_array_equal(values, np.zeros((4, 2)))
    np.testing.assert_array_equal(scale, np.ones(2))
