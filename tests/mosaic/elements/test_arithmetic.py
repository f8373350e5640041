# SPDX-License-Identifier: Apache-2.0
"""Elementwise operations give what lax gives."""

from __future__ import annotations

import re

import jax
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from pallas_gpu.layouts import Layout
from pallas_gpu.mosaic import elementwise, gmem
from pallas_gpu.runtime import ptx_stats

BF16 = np.dtype(ml_dtypes.bfloat16)
SIZE = 512
STRIDED = Layout.WG_STRIDED((SIZE,), vec_size=2)
FLOATS = ["float32", "float16", "bfloat16"]
INTEGERS = ["int32", "uint32", "int8", "uint8", "int16", "int64"]

UNARY_FLOAT = """neg abs sign exp exp2 log log2 log1p expm1 sqrt rsqrt cbrt tanh
logistic sin cos tan erf erfc floor ceil is_finite square"""
BINARY_FLOAT = "add sub mul div rem max min eq ne lt le gt ge pow atan2"
UNARY_INT = "neg abs sign not square population_count clz"
BINARY_INT = """add sub mul div rem max min eq ne lt le gt ge and or xor shift_left
shift_right_logical shift_right_arithmetic"""

CASES = [(n, d, 1) for d in FLOATS for n in UNARY_FLOAT.split()]
CASES += [(n, d, 2) for d in FLOATS for n in BINARY_FLOAT.split()]
CASES += [(n, d, 1) for d in INTEGERS for n in UNARY_INT.split()]
CASES += [(n, d, 2) for d in INTEGERS for n in BINARY_INT.split()]
CASES += [(n, "bool", 2) for n in ("and", "or", "xor", "eq", "ne")]
# lax has no abs of unsigned integers.
CASES = [c for c in CASES if c[0] != "abs" or not c[1].startswith("u")]

# div and sqrt are the hardware's approximations (1 and 2 ulp), sin and cos lose digits
# with large arguments, as XLA's own GPU code does.
TOLERANCE = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def expected(name: str, operands, **params) -> np.ndarray:
    function = {"abs": lax.abs, "and": lax.bitwise_and, "or": lax.bitwise_or}
    function |= {"xor": lax.bitwise_xor, "not": lax.bitwise_not, "add_any": lax.add}
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        f = jax.jit(function.get(name) or getattr(lax, name), static_argnames=params)
        if name == "exp2" and operands[0].dtype.itemsize == 2:
            # On the CPU lax multiplies by log(2) in 16 bits.
            wide = [x.astype(np.float32) for x in operands]
            return np.asarray(f(*wide)).astype(operands[0].dtype)
        return np.asarray(f(*operands, **params))


def assert_same(actual: np.ndarray, wanted: np.ndarray, dtype: str) -> None:
    assert actual.dtype == wanted.dtype
    if wanted.dtype.kind in "biu":
        np.testing.assert_array_equal(actual, wanted)
        return
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(
        actual.astype(np.float32),
        wanted.astype(np.float32),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype", "arity"), CASES)
def test_operations_agree_with_lax(name, dtype, arity, run_kernel, typed, sample):
    operands = [sample((SIZE,), np.dtype(dtype)) for _ in range(arity)]
    wanted = expected(name, operands)

    def body(kb, *views):
        values = [gmem.load(view) for view in views[:-1]]
        gmem.store(views[-1], elementwise.apply(name, *values))

    (actual,) = run_kernel(body, operands, [typed((SIZE,), wanted.dtype)])
    assert_same(actual, wanted, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["exp", "exp2", "log", "tanh", "logistic", "rsqrt"])
def test_approximations_are_close(name, dtype, run_kernel, typed, rng):
    x = rng.uniform(0.1, 3, SIZE).astype(dtype)
    wanted = expected(name, [x])

    def body(kb, view, out):
        value = elementwise.apply(name, gmem.load(view), approx_math=True)
        gmem.store(out, value)

    (actual,) = run_kernel(body, [x], [typed((SIZE,), x.dtype)])
    np.testing.assert_allclose(
        actual.astype(np.float32), wanted.astype(np.float32), rtol=1e-2, atol=1e-3
    )


@pytest.mark.gpu
@pytest.mark.parametrize("method", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_halves_round_as_the_method_says(dtype, method, run_kernel, typed):
    x = (np.arange(-256, 256) / 2).astype(dtype)
    method = lax.RoundingMethod(method)
    wanted = expected("round", [x], rounding_method=method)

    def body(kb, view, out):
        value = elementwise.apply("round", gmem.load(view), rounding_method=method)
        gmem.store(out, value)

    (actual,) = run_kernel(body, [x], [typed((SIZE,), x.dtype)])
    np.testing.assert_array_equal(actual, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("y", [-2, 0, 1, 3, 10])
def test_integer_powers(y, run_kernel, typed, rng):
    x = rng.uniform(0.5, 2, SIZE).astype(np.float32)

    def body(kb, view, out):
        gmem.store(out, elementwise.apply("integer_pow", gmem.load(view), y=y))

    (actual,) = run_kernel(body, [x], [typed((SIZE,), x.dtype)])
    np.testing.assert_allclose(actual, x**y, rtol=1e-5)


@pytest.mark.gpu
def test_select_and_clamp(run_kernel, typed, sample):
    x, y = sample((SIZE,), np.int32), sample((SIZE,), np.int32)
    which = (x > y).astype(np.bool_)

    def body(kb, w, a, b, chosen, clamped):
        low, high = (elementwise.scalar(v, np.int32) for v in (-100, 2**20))
        values = [gmem.load(v, STRIDED) for v in (w, a, b)]
        gmem.store(chosen, elementwise.apply("select_n", *values))
        gmem.store(clamped, elementwise.apply("clamp", low, values[1], high))

    out = typed((SIZE,), np.int32)
    chosen, clamped = run_kernel(body, [which, x, y], [out, out])
    np.testing.assert_array_equal(chosen, np.where(which, y, x))
    np.testing.assert_array_equal(clamped, np.clip(x, -100, 2**20))


def test_division_by_a_known_divisor_needs_no_guard(build, typed):
    def body(kb, view, out):
        seven = elementwise.scalar(7, np.int32)
        gmem.store(out, elementwise.apply("div", gmem.load(view), seven))

    text = str(build(body, [typed((128,), np.int32)], [typed((128,), np.int32)]))
    assert "arith.divsi" in text
    assert "arith.select" not in text


def test_bfloat16_exp_is_computed_in_float32(build, typed):
    x = typed((256,), BF16)

    def body(kb, view, out):
        gmem.store(out, elementwise.apply("exp", gmem.load(view)))

    text = str(build(body, [x], [x]))
    assert re.search(r"math.exp .*: vector<\d+xf32>", text)
    assert "arith.truncf" in text


@pytest.mark.offline
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_product_that_is_added_is_one_instruction(dtype, compile_kernel, typed):
    x = typed((SIZE,), np.dtype(dtype))

    def body(kb, left, right, out):
        a, b = (gmem.load(view, STRIDED) for view in (left, right))
        product = elementwise.apply("mul", a, b)
        gmem.store(out, elementwise.apply("add", product, a))

    found = set(ptx_stats.mnemonics(compile_kernel(body, [x, x], [x]).ptx))
    arithmetic = {m.split(".")[0] for m in found if m.endswith(("f32", "f16", "f16x2"))}
    assert arithmetic == {"fma"}
