# SPDX-License-Identifier: Apache-2.0
"""lax's elementwise operations agree with JAX on the CPU, dtype by dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.emitters.elements import dtypes, table
from tests.support import element_programs as elements
from tests.support import everywhere, host
from tests.support.semantics import Warpgroup, under

SHAPE = (64, 64)


def numbers(dtype, seed=0):
    rng = np.random.default_rng(seed)
    return host.array(rng.standard_normal(SHAPE) * 3).astype(dtype)


# By how they are lowered: some rows of each class, and a dtype for each.
CLASSES = {
    "one instruction": ("add float32", "max int32", "xor uint32", "sub bfloat16"),
    "several instructions": (
        "sign float16",
        "rem float32",
        "div int32",
        "shift_left int8",
    ),
    "a function of libdevice": ("cbrt float32", "atan2 float16", "erfc bfloat16"),
    "computed in float32": ("exp float16", "logistic bfloat16", "sin float16"),
    "with parameters": ("integer_pow int32", "integer_pow float32", "round bfloat16"),
    "a comparison": ("lt float16", "ge uint32", "ne bool", "is_finite float32"),
    "typed by another operand": ("select_n bool", "select_n int8", "clamp float32"),
    "of bits": ("not bool", "population_count int8", "clz uint32"),
    "of 64 bits": ("mul int64", "rem uint64", "tanh float64"),
    "of float8": ("add float8_e4m3fn", "le float8_e5m2", "exp float8_e4m3fn"),
    "of exponents": ("mul float8_e8m0fnu", "select_n float8_e8m0fnu"),
    "of less than a byte": (
        "mul int4",
        "shift_right_arithmetic uint2",
        "sub float4_e2m1fn",
    ),
    "of less than a byte, more": (
        "div int2",
        "eq uint4",
        "bitcast_convert_type float4_e2m1fn",
    ),
}


@pytest.mark.parametrize("name", CLASSES)
def test_rows_of_each_class_are_lowered(name):
    functions, programs = [], []
    for row, dtype in map(str.split, CLASSES[name]):
        kind = dtypes.kind(np.dtype(dtype))
        params = elements.params_of(row, kind)[0]
        functions.append(elements.lax_function(row, dtype, params))
        programs.append(elements.row_programs(row, kind, dtype)[0])
    check_all(functions, programs)


CONVERSIONS = {
    "float32": ("float16", "int8", "uint32", "bool", "float8_e4m3fn", "int4"),
    "bfloat16": ("float32", "float16", "int32", "float8_e5m2"),
    "int8": ("float16", "uint32", "int64", "int4"),
    "uint32": ("float32", "bool", "int16", "float8_e8m0fnu"),
    "bool": ("float32", "int8", "float4_e2m1fn"),
    "float64": ("float32", "int32", "float4_e2m1fn"),
    "float8_e5m2": ("bfloat16", "float8_e4m3fn", "uint8"),
    "float8_e8m0fnu": ("float32", "bfloat16", "int32"),
    "float4_e2m1fn": ("bfloat16", "float64", "int2"),
    "int4": ("bfloat16", "int8", "uint2"),
    "uint2": ("float32", "int64", "int4"),
}


@pytest.mark.parametrize("src", CONVERSIONS)
def test_conversions_of_each_class_are_lowered(src):
    check_all(
        [lambda x, dst=dst: x.astype(dst) for dst in CONVERSIONS[src]],
        [elements.conversion_program(src, dst) for dst in CONVERSIONS[src]],
    )


def check_all(functions, programs):
    """Executes functions of the operands of programs everywhere, in one kernel."""
    operands, tree = jax.tree.flatten([list(p.operands) for p in programs])
    expected = [p.expected[0] for p in programs]

    def body(*refs):
        args = tree.unflatten([ref[...] for ref in refs[: len(operands)]])
        outs = refs[len(operands) :]
        for function, out, x in zip(functions, outs, args, strict=True):
            out[...] = function(*x)

    tolerance = max(p.tolerance for p in programs)
    with jax.enable_x64(True):
        everywhere.run(body, operands, expected, rtol=tolerance, atol=tolerance)


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

    with np.errstate(all="ignore"):
        expected = np.exp(np.asarray(x, np.float64)).sum(1).astype(np.float32)
    everywhere.run(summed, [x], expected, rtol=1e-6, atol=1.5e-45)

    def used_twice(x_ref, o_ref):
        e = jnp.exp(x_ref[...])
        o_ref[...] = jnp.sum(e, axis=1) + e[:, 0]

    for body in (summed, used_twice):
        function = under(Warpgroup, everywhere.kernel(body, expected)(None))
        (report,) = plgpu.offline.lower(function, x)
        assert ("math.exp" in report.mlir) == (body is used_twice)


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


@pytest.mark.parametrize("accuracy", [None, *lax.AccuracyMode])
def test_the_highest_accuracy_is_exact_under_approx_math(accuracy):
    def body(x_ref, o_ref):
        o_ref[...] = lax.exp(x_ref[...], accuracy=accuracy)

    x = numbers(jnp.float32)
    everywhere.check(everywhere.kernel(body, x), [x], np.exp(x), rtol=1e-6)
    mlir = []
    for approx in (False, True):
        params = plgpu.CompilerParams(approx_math=approx, target="sm_90a")
        k = plgpu.kernel(body, out_type=jax.typeof(x), compiler_params=params)
        mlir.append(plgpu.offline.lower(k, x)[0].mlir)
    assert (mlir[0] == mlir[1]) == (accuracy is lax.AccuracyMode.HIGHEST)


@pytest.mark.parametrize(
    "function, accuracy, instruction",
    [
        (lax.exp, lax.Tolerance(rtol=1e-5), "ex2.approx"),
        (lax.exp, lax.Tolerance(rtol=1e-6), None),
        (lax.exp, lax.Tolerance(ulps=256), "ex2.approx"),
        (lax.log, lax.Tolerance(rtol=1e-6), None),
        (lax.log, lax.Tolerance(rtol=1e-6, atol=1e-6), "lg2.approx"),
        (lax.rsqrt, lax.Tolerance(ulps=4), "rsqrt.approx"),
        (lax.tanh, lax.Tolerance(rtol=1e-3), "tanh.approx"),
        (lax.tanh, lax.Tolerance(rtol=1e-4), None),
        (lax.tanh, lax.Tolerance(atol=1e-3), "tanh.approx"),
        (lax.cos, lax.Tolerance(atol=1e-3), None),
        (lax.logistic, lax.Tolerance(rtol=2e-5), "rcp.approx"),
        (lax.sin, lax.Tolerance(rtol=1e-1, atol=1e-1), None),
        (lax.cbrt, lax.Tolerance(rtol=1e-1, atol=1e-1), None),
    ],
)
@pytest.mark.parametrize("approx_math", [False, True])
def test_a_tolerance_decides_whether_a_function_is_approximate(
    function, accuracy, instruction, approx_math
):
    def body(x_ref, o_ref):
        o_ref[...] = function(x_ref[...], accuracy=accuracy)

    params = plgpu.CompilerParams(approx_math=approx_math, target="sm_90a")
    x = np.abs(numbers(jnp.float32)) + 1
    k = plgpu.kernel(body, out_type=jax.typeof(x), compiler_params=params)
    (report,) = plgpu.offline.lower(k, x)
    assert (".approx" in report.mlir) == (instruction is not None)
    assert (instruction or "") in report.mlir
    np.testing.assert_allclose(k(x), function(x), rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "ulps", "approximates"),
    [("float16", 1, False), ("float16", 2, True), ("bfloat16", 1, True)],
)
def test_a_tolerance_of_narrow_floats_includes_their_rounding(
    dtype, ulps, approximates
):
    """The error of tanh.approx, 2^-11, is up to one ulp of float16."""

    def body(x_ref, o_ref):
        o_ref[...] = lax.tanh(x_ref[...], accuracy=lax.Tolerance(ulps=ulps))

    x = np.ones(SHAPE, dtype)
    k = everywhere.kernel(body, x, target="sm_90a")(None)
    (report,) = plgpu.offline.lower(k, x)
    assert ("tanh.approx" in report.mlir) == approximates


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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_remainder_is_exact_however_large_the_quotient_is(dtype):
    x = np.array([3e38, 2**31, -1e20, 1e-3, 7, -np.inf, np.nan, 5], dtype)
    y = np.array([255.5, 2.5, 3, 1e-40, np.inf, 2, 1, 0], dtype)
    with np.errstate(invalid="ignore"):
        expected = np.fmod(x, y)
    assert (abs(expected[:3]) < y[:3]).all()
    with jax.enable_x64(dtype is np.float64):
        make = everywhere.elementwise(lax.rem, dtype, shape=x.shape)
        everywhere.check(make, [x, y], expected)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32])
def test_an_integer_of_any_type_selects(dtype):
    x, which = np.arange(128, dtype=np.float32), np.arange(128, dtype=dtype) % 3

    def chosen(which, x):
        return lax.select_n_p.bind(which, x, x + 1, x - 1)

    make = everywhere.elementwise(chosen, np.float32, shape=x.shape)
    everywhere.check(make, [which, x], chosen(which, x))


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
            operands = [x] * elements.arity(function.__name__)
            total += function(*operands).astype(x.dtype)
        return total

    make = everywhere.elementwise(body, jnp.bfloat16, shape=(128,))
    (report,) = plgpu.offline.compile(make(None), jnp.ones(128, jnp.bfloat16))
    assert "call.uni" not in report.ptx  # no function of libdevice is left unresolved


@pytest.mark.parametrize("axis", [0, 1])
def test_what_a_broadcast_repeats_follows_a_default_layout(axis):
    def body(x_gmem, y_gmem, o_gmem, x_smem):
        x_smem[...] = x_gmem[...]
        scale = plgpu.load(
            y_gmem, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False
        )
        wide = lax.broadcast_in_dim(scale, SHAPE, (axis,))
        o_gmem[...] = x_smem[...] * wide

    x = numbers(jnp.float32)
    y = numbers(jnp.float32, seed=1)[0]
    expected = x * (y[:, None] if axis == 0 else y)
    everywhere.run(body, [x, y], expected, plgpu.SMEM(SHAPE, jnp.float32))


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("adjacent", [1, 2, 4])
def test_every_byte_becomes_a_half(dtype, adjacent):
    x = np.resize(np.arange(256, dtype=np.uint8), 512).view(dtype)

    def body(x, o):
        layout = plgpu.Layout.WG_STRIDED((512,), vec_size=adjacent)
        o[...] = plgpu.load(x, layout=layout).astype(jnp.float16)

    everywhere.run(body, [x], x.astype(np.float16))
