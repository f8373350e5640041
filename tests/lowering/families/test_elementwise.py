# SPDX-License-Identifier: Apache-2.0
"""lax's elementwise operations agree with JAX on the CPU, dtype by dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.mosaic.elements import table
from tests.support import everywhere, host
from tests.support.semantics import Warpgroup, under

pytestmark = pytest.mark.sampled(4)

SHAPE = (64, 64)


def numbers(dtype, seed=0):
    rng = np.random.default_rng(seed)
    if dtype == jnp.bool_:
        return host.array(rng.integers(0, 2, SHAPE).astype(bool))
    if jnp.issubdtype(dtype, jnp.floating):
        return host.array(rng.standard_normal(SHAPE) * 3).astype(dtype)
    info = jnp.iinfo(dtype)
    low, high = max(info.min, -100), min(info.max, 100)
    values = rng.integers(low, high, SHAPE, endpoint=True)
    values[0, :4] = [info.min, info.max, 0, 1]
    return jnp.asarray(values.astype(jnp.dtype(dtype)))


FLOATS = (jnp.float32, jnp.float16, jnp.bfloat16)
INTS = (jnp.int32, jnp.uint32, jnp.int8)

UNARY = [
    *[(op, d) for op in (jnp.negative, jnp.abs, jnp.sign) for d in FLOATS],
    *[
        (op, d)
        for op in (jnp.negative, jnp.abs, jnp.sign)
        for d in (jnp.int32, jnp.int8)
    ],
    *[
        (op, d)
        for op in (jnp.exp, jnp.exp2, lax.logistic, jnp.tanh, jnp.sin, jnp.cos)
        for d in FLOATS
    ],
    *[(op, jnp.float32) for op in (jnp.floor, jnp.ceil, lax.square, jnp.isfinite)],
    *[(op, d) for op in (jnp.bitwise_not,) for d in (*INTS, jnp.bool_)],
    (lambda x: lax.integer_pow(x, 3), jnp.float32),
    (lambda x: lax.integer_pow(x, 3), jnp.int32),
    (jax.nn.relu, jnp.float32),
    (jax.nn.silu, jnp.float32),
    *[(op, d) for op in (lax.cbrt, lax.tan, lax.erfc) for d in FLOATS],
    *[(op, d) for op in (lax.population_count, lax.clz) for d in INTS],
]


@pytest.mark.parametrize("index", range(len(UNARY)))
def test_a_unary_operation_agrees_with_jax(index):
    op, dtype = UNARY[index]
    x = numbers(dtype)
    if dtype not in FLOATS:
        make = everywhere.elementwise(op, op(x).dtype, shape=SHAPE)
        everywhere.check(make, [x], op(x))
        return
    out_dtype = op(x).dtype
    # XLA's 16-bit functions on a CPU round several times; the reference is float32.
    expected = op(x.astype(jnp.float32)).astype(out_dtype)
    rtol = {jnp.float32: 3e-6, jnp.float16: 5e-3, jnp.bfloat16: 5e-2}[dtype]
    make = everywhere.elementwise(op, out_dtype, shape=SHAPE)
    everywhere.check(make, [x], expected, rtol=rtol, atol=2e-5)


@pytest.mark.parametrize("op", [jnp.log, jnp.log2, jnp.sqrt, lax.rsqrt])
def test_a_function_of_positive_numbers_agrees_with_jax(op):
    x = jnp.abs(numbers(jnp.float32)) + 0.01
    make = everywhere.elementwise(op, x.dtype, shape=SHAPE)
    everywhere.check(make, [x], op(x), rtol=2e-6, atol=1e-6)


ARITHMETIC = (lax.add, lax.sub, lax.mul, lax.max, lax.min)
COMPARISONS = (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)
BINARY = (*ARITHMETIC, *COMPARISONS, lax.div, lax.rem, lax.pow, lax.atan2)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS])
@pytest.mark.parametrize("op", [*ARITHMETIC, *COMPARISONS])
def test_a_binary_operation_agrees_with_jax(op, dtype):
    x, y = numbers(dtype, 0), numbers(dtype, 1)
    expected = op(x, y)
    make = everywhere.elementwise(op, expected.dtype, shape=SHAPE)
    everywhere.check(make, [x, y], expected, rtol=1e-2 if dtype in FLOATS[1:] else 1e-6)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32, jnp.int8])
@pytest.mark.parametrize("op", [lax.div, lax.rem])
def test_integer_division_truncates_and_takes_zero_as_jax_does(op, dtype):
    x, y = numbers(dtype, 0), numbers(dtype, 1)
    y = jnp.where(y == 0, 3, y)
    make = everywhere.elementwise(op, dtype, shape=SHAPE)
    everywhere.check(make, [x, y], op(x, y))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32, jnp.int8, jnp.bool_])
@pytest.mark.parametrize("op", [lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor])
def test_a_bitwise_operation_agrees_with_jax(op, dtype):
    x, y = numbers(dtype, 0), numbers(dtype, 1)
    everywhere.check(everywhere.elementwise(op, dtype, shape=SHAPE), [x, y], op(x, y))


def test_float_division_and_remainder_agree_with_jax():
    x, y = numbers(jnp.float32, 0), numbers(jnp.float32, 1)
    for op in (lax.div, lax.rem):
        make = everywhere.elementwise(op, jnp.float32, shape=SHAPE)
        everywhere.check(make, [x, y], op(x, y), rtol=1e-6, atol=1e-6)


def test_exponentials_that_are_only_added_are_as_exact_as_others():
    rng = np.random.default_rng(0)
    x = rng.uniform(-110, 95, (32, 256)).astype(np.float32)
    x[:, ::128] = rng.uniform(-1, 1, (32, 2))
    # A row for each: what it adds up does not hide it.
    special = (-np.inf, -1e30, -104.5, -103.9, -100.0, -87.5, -0.0, 1e-30, 88.7, 89.0)
    for row, value in enumerate((*special, 1e30, np.inf, np.nan)):
        x[row] = -np.inf
        x[row, row] = value
    x = jnp.asarray(x)

    def summed(x_ref, o_ref):
        o_ref[...] = jnp.sum(jnp.exp(x_ref[...]), axis=1)

    def make(interpret, body=summed):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((32,), jnp.float32),
            interpret=interpret,
        )

    with np.errstate(all="ignore"):
        expected = np.exp(np.asarray(x, np.float64)).sum(1).astype(np.float32)
    everywhere.check(make, [x], expected, rtol=1e-6, atol=1.5e-45)
    (report,) = plgpu.offline.lower(under(Warpgroup, make(None)), x)
    assert "math.exp" not in report.mlir

    def used_twice(x_ref, o_ref):
        e = jnp.exp(x_ref[...])
        o_ref[...] = jnp.sum(e, axis=1) + e[:, 0]

    (report,) = plgpu.offline.lower(under(Warpgroup, make(None, used_twice)), x)
    assert "math.exp" in report.mlir


def test_division_by_one_number_inverts_it_once():
    tiny, least, most = 1e-45, 2.0**-126, 2.0**126
    divisors = (tiny, 1e-40, least, 3 * least, 0.7, -3.0, most, 3e38)
    divisors = jnp.asarray([*divisors, 0.0, -0.0, np.inf, np.nan], jnp.float32)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((len(divisors), 512)) * 2.0 ** rng.integers(-140, 120, 512)
    x[:, :8] = 0.0, -0.0, np.inf, -np.inf, np.nan, tiny, 1e-39, 3.4e38
    x = jnp.asarray(x, jnp.float32)

    def body(x_ref, divisor_ref, o_ref):
        o_ref[...] = x_ref[...] / divisor_ref[0]

    def make(interpret):
        row = plgpu.BlockSpec((1, 512), lambda i: (i, 0), memory_space=plgpu.GMEM)
        one = plgpu.BlockSpec((1,), lambda i: (i,), memory_space=plgpu.GMEM)
        return plgpu.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=divisors.shape,
            in_specs=[row, one],
            out_specs=row,
            interpret=interpret,
        )

    with np.errstate(all="ignore"):
        exact = np.asarray(x, np.float64) / np.asarray(divisors, np.float64)[:, None]
        expected = exact.astype(np.float32)
    everywhere.check(make, [x, divisors], expected, rtol=2.5e-7, atol=2e-45)
    (report,) = plgpu.offline.lower(make(None), x, divisors)
    assert "arith.divf" not in report.mlir
    assert report.mlir.count("rcp.approx.ftz.f32") == 1


@pytest.mark.offline
@pytest.mark.parametrize("op", [lax.mul, lax.add, lax.sub])
def test_what_is_rounded_to_bfloat16_at_once_is_computed_in_it(op):
    def rounded(x, y):
        return op(x.astype(jnp.float32), y.astype(jnp.float32)).astype(jnp.bfloat16)

    x, y = numbers(jnp.bfloat16, 0), numbers(jnp.bfloat16, 1)
    make = everywhere.elementwise(rounded, jnp.bfloat16, shape=SHAPE)
    everywhere.check(make, [x, y], rounded(x, y))
    for semantics in everywhere.BOTH:
        (report,) = plgpu.offline.compile(under(semantics, make(None)), x, y)
        assert "bf16x2" in report.ptx and "cvt.rn.bf16" not in report.ptx


@pytest.mark.offline
def test_words_are_extended_once_where_a_factor_is_float32():
    def rounded(x, y):
        wide = x.astype(jnp.float32)
        square = (wide * wide).astype(jnp.bfloat16)
        return jnp.maximum((wide * y).astype(jnp.bfloat16), square)

    x, y = numbers(jnp.bfloat16, 0), numbers(jnp.float32, 1)
    make = everywhere.elementwise(rounded, jnp.bfloat16, shape=SHAPE)
    everywhere.check(make, [x, y], rounded(x, y))
    (report,) = plgpu.offline.compile(make(None), x, y)
    assert "shl.b32" in report.ptx and "cvt.f32.bf16" not in report.ptx


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_angle_of_a_point_agrees_with_jax(dtype):
    x, y = numbers(dtype, 0), numbers(dtype, 1)
    wide = lax.atan2(x.astype(jnp.float32), y.astype(jnp.float32))
    rtol = {jnp.float32: 1e-6, jnp.float16: 1e-3, jnp.bfloat16: 1e-2}[dtype]
    make = everywhere.elementwise(lax.atan2, dtype, shape=SHAPE)
    everywhere.check(make, [x, y], wide.astype(dtype), rtol=rtol, atol=1e-6)


def test_max_and_min_carry_nan():
    x = numbers(jnp.float32).at[3, 5].set(jnp.nan)
    y = numbers(jnp.float32, 1).at[7, 9].set(jnp.nan)
    for op in (lax.max, lax.min):
        make = everywhere.elementwise(op, jnp.float32, shape=SHAPE)
        everywhere.check(make, [x, y], op(x, y))


def test_select_takes_the_case_its_predicate_names():
    x, y = numbers(jnp.float32), numbers(jnp.float32, 1)

    def body(a, b):
        return jnp.where(a > b, a, -b)

    make = everywhere.elementwise(body, jnp.float32, shape=SHAPE)
    everywhere.check(make, [x, y], body(x, y))


def test_clamp_takes_scalar_bounds():
    x = numbers(jnp.float32)

    def body(a):
        return lax.clamp(-1.0, a, 1.0)

    everywhere.check(
        everywhere.elementwise(body, jnp.float32, shape=SHAPE), [x], body(x)
    )


CONVERSIONS = (
    jnp.float32,
    jnp.float16,
    jnp.bfloat16,
    jnp.int32,
    jnp.int8,
    jnp.bool_,
)


@pytest.mark.parametrize("dst", CONVERSIONS)
@pytest.mark.parametrize("src", CONVERSIONS)
def test_astype_agrees_with_jax(src, dst):
    x = numbers(src)
    # Out-of-range conversions to int8 are left to the implementation by XLA.
    if jnp.issubdtype(src, jnp.floating) and dst == jnp.int8:
        x = jnp.clip(x, -100, 100)
    if src == jnp.int32 and dst != jnp.int8:
        x = x.at[0, :2].set(5)
    expected = x.astype(dst)
    make = everywhere.elementwise(lambda a: a.astype(dst), dst, shape=SHAPE)
    everywhere.check(make, [x], expected)


def test_scalars_and_their_arithmetic_are_broadcast():
    x = numbers(jnp.float32)

    def body(a):
        i = lax.axis_index("x")
        return a * (i.astype(jnp.float32) + 2.5) + 1

    def kernel_body(x_ref, o_ref):
        o_ref[...] = body(x_ref[...])

    def make(interpret):
        return plgpu.kernel(
            kernel_body,
            out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
            grid=(1,),
            grid_names=("x",),
            interpret=interpret,
        )

    everywhere.check(make, [x], x * 2.5 + 1, rtol=1e-6, atol=1e-6)


@pytest.mark.offline
def test_every_function_of_floats_compiles():
    """One kernel with all of them: what the pipeline has no form of, fails in it."""
    names = [n for n, row in table.TABLE.items() if row.floating and not row.params]
    other = ("select_n", "clamp", "add_any", "bitcast_convert_type")
    functions = [getattr(lax, n) for n in names if n not in other]

    def body(x):
        total = x
        for function in functions:
            if function in (lax.convert_element_type, lax.bitcast_convert_type):
                continue
            operands = [x] * (2 if function in BINARY else 1)
            total += function(*operands).astype(x.dtype)
        return total

    make = everywhere.elementwise(body, jnp.bfloat16, shape=(128,))
    (report,) = plgpu.offline.compile(make(None), jnp.ones(128, jnp.bfloat16))
    assert "call.uni" not in report.ptx  # no function of libdevice is left unresolved


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_float8_is_computed_in_single_precision_and_rounded_once(dtype):
    x, y = numbers(dtype), numbers(dtype, seed=1)

    def body(x_ref, y_ref, sums, products, larger, below, whole):
        x, y = x_ref[...], y_ref[...]
        sums[...] = x + y
        products[...] = x * y - x
        larger[...] = jnp.where(x > y, x, jnp.maximum(y, -x))
        below[...] = x <= y
        whole[...] = x.astype(jnp.int32) + jnp.abs(y).astype(jnp.int32)

    types = [dtype, dtype, dtype, jnp.bool_, jnp.int32]
    out = [jax.ShapeDtypeStruct(SHAPE, t) for t in types]

    def rounded(value):
        return value.astype(dtype).astype(np.float32)

    a, b = (np.asarray(v).astype(np.float32) for v in (x, y))
    expected = [
        rounded(a + b),
        rounded(rounded(a * b) - a),
        np.where(a > b, a, np.maximum(b, -a)),
        a <= b,
        a.astype(np.int32) + np.abs(b).astype(np.int32),
    ]
    everywhere.check(
        lambda interpret: plgpu.kernel(body, out_type=out, interpret=interpret),
        (x, y),
        expected,
    )


def test_scales_are_copied_and_widened():
    """float8_e8m0fnu is a power of two: it moves as a byte, and becomes any float."""
    bits = np.resize(np.arange(1, 255, dtype=np.uint8), SHAPE)
    scales = bits.view(jnp.float8_e8m0fnu)

    def body(x, same, wide, array, barrier):
        plgpu.copy_gmem_to_smem(x, array, barrier)
        plgpu.barrier_wait(barrier)
        wide[...] = array[...].astype(jnp.float32)
        plgpu.copy_smem_to_gmem(array, same)
        plgpu.wait_smem_to_gmem(0)

    out = [jax.ShapeDtypeStruct(SHAPE, t) for t in (scales.dtype, jnp.float32)]
    scratch = [plgpu.SMEM(SHAPE, scales.dtype), plgpu.Barrier()]
    everywhere.check(
        lambda interpret: plgpu.kernel(
            body, out_type=out, scratch_types=scratch, interpret=interpret
        ),
        (jnp.asarray(scales),),
        [scales, 2.0 ** (bits.astype(np.float32) - 127)],
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_what_a_broadcast_repeats_follows_a_default_layout(axis):
    def body(x_gmem, y_gmem, o_gmem, x_smem):
        x_smem[...] = x_gmem[...]
        scale = plgpu.load(
            y_gmem, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False
        )
        wide = lax.broadcast_in_dim(scale, SHAPE, (axis,))
        o_gmem[...] = x_smem[...] * wide

    def make(interpret):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
            scratch_types=[plgpu.SMEM(SHAPE, jnp.float32)],
            interpret=interpret,
        )

    x = numbers(jnp.float32)
    y = numbers(jnp.float32, seed=1)[0]
    expected = x * (y[:, None] if axis == 0 else y)
    everywhere.check(make, [x, y], expected)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("adjacent", [1, 2, 4])
def test_every_byte_becomes_a_half(dtype, adjacent):
    x = np.resize(np.arange(256, dtype=np.uint8), 512).view(dtype)

    def body(x, o):
        layout = plgpu.Layout.WG_STRIDED((512,), vec_size=adjacent)
        o[...] = plgpu.load(x, layout=layout).astype(jnp.float16)

    def make(interpret):
        out = jax.ShapeDtypeStruct((512,), jnp.float16)
        return plgpu.kernel(body, out_type=out, interpret=interpret)

    everywhere.check(make, [x], x.astype(np.float16))
