# SPDX-License-Identifier: Apache-2.0
"""lax's operations in NumPy: every row, beside lax's definitions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import ad

import pallas_gpu as plgpu
from pallas_gpu import lowering
from pallas_gpu.emulator.engine import plan
from pallas_gpu.emulator.engine.pure import arithmetic
from pallas_gpu.primitives import _registry as registry
from tests.support import element_programs, everywhere

pytestmark = pytest.mark.sampled(3)

F32 = np.float32
TINY = np.float32(2.0**-149)  # the smallest denormal


def evaluate_all(fn, *args):
    """Runs a function's equations on NumPy values; returns its results."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    steps = plan.plan_of(jaxpr)
    env = [*args] + [None] * steps.size
    with np.errstate(all="ignore"):
        for step in steps.steps:
            env[step.out] = step.fn(*[x.bind(env) for x in step.ins])
    results = [np.asarray(out.bind(env)) for out in steps.outs]
    for result, aval in zip(results, jaxpr.out_avals, strict=True):
        assert (result.dtype, result.shape) == (aval.dtype, aval.shape)
    return results


def evaluate(fn, *args):
    """Runs a function with one result."""
    (result,) = evaluate_all(fn, *args)
    return result


def test_every_primitive_that_the_lowering_knows_is_emulated():
    inlined = plan._CALLS.keys() | {"optimization_barrier"}
    missing = {
        primitive.name
        for primitive in registry.rules(registry.RuleKind.LANE)
        if registry.rule(primitive, registry.RuleKind.EMULATE) is None
        and primitive.name not in arithmetic._TABLE
        and primitive.name not in inlined
        # JAX evaluates operations with several results.
        and not primitive.multiple_results
    }
    assert lowering
    assert not missing


LAX = {name: getattr(lax, f"bitwise_{name}") for name in ("and", "or", "xor", "not")}
LAX["add_any"] = ad.add_jaxvals
# The emitters take these; lax does not.
REFUSED = {("add", "bool"), ("mul", "bool"), ("abs", "uint32")}


def cases():
    """(name, dtype, parameters) of the elementwise operations."""
    for name, kind, dtype in element_programs.row_programs():
        for params in element_programs.PARAMS.get(name, ({},)):
            whole = params.get("y", 0) >= 0 or kind == "float"
            if whole and (name, dtype) not in REFUSED:
                yield name, dtype, params


@pytest.mark.parametrize(("name", "dtype", "params"), list(cases()))
def test_elements_are_those_of_laxs_definition(name, dtype, params):
    program = element_programs.row_program(name, dtype, **params)
    function = LAX.get(name) or getattr(lax, name)
    static = dict(params)
    if name == "round":
        static["rounding_method"] = lax.RoundingMethod(params["rounding_method"])
    got = evaluate(lambda *xs: function(*xs, **static), *program.operands)
    (want,) = program.expected
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, want)
    else:
        # The narrow floats are rounded from float32, the expectation from float64.
        rtol = 1e-6 if dtype == "float32" else 1e-2
        wide = got.astype(np.float64), want.astype(np.float64)
        np.testing.assert_allclose(*wide, rtol=rtol)


CONVERSIONS = list(element_programs.conversions())


@pytest.mark.parametrize("src", sorted({src for src, _ in CONVERSIONS}))
def test_conversions_are_those_of_the_emitted_code(src):
    programs = {
        dst: element_programs.conversion_program(src, dst)
        for dst in (dst for other, dst in CONVERSIONS if other == src)
    }
    operands = [program.operands[0] for program in programs.values()]
    with jax.enable_x64():
        got = evaluate_all(
            lambda *xs: [
                lax.convert_element_type(x, dst)
                for x, dst in zip(xs, programs, strict=True)
            ],
            *operands,
        )
    for (dst, program), result in zip(programs.items(), got, strict=True):
        (want,) = program.expected
        exact = np.float64 if jnp.issubdtype(dst, jnp.floating) else result.dtype
        np.testing.assert_array_equal(result.astype(exact), want.astype(exact), dst)


SHAPED = {
    "sum": lambda x: jnp.sum(x, axis=1),
    "max": lambda x: jnp.max(x, axis=0),
    "min": lambda x: jnp.min(x),
    "prod": lambda x: jnp.prod(x[:2], axis=0),
    "cumsum": lambda x: lax.cumsum(x, axis=1, reverse=True),
    "cummax": lambda x: lax.cummax(x, axis=0),
    "cummin": lambda x: lax.cummin(x, axis=1, reverse=True),
    "cumprod": lambda x: lax.cumprod(x[:3], axis=0),
    "iota": lambda x: lax.broadcasted_iota(x.dtype, (3, 5, 2), 1),
    "transpose": lambda x: x.T,
    "slice": lambda x: x[1:7:2, 3:],
    "reshape": lambda x: x.reshape(4, 2, 16),
    "broadcast": lambda x: jnp.broadcast_to(x[:, None], (8, 3, 16)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32"])
@pytest.mark.parametrize("name", SHAPED)
def test_reductions_scans_and_shapes_agree_with_jax(name, dtype):
    x = np.random.default_rng(0).integers(0, 5, (8, 16)).astype(dtype)
    got, want = evaluate(SHAPED[name], x), SHAPED[name](jnp.asarray(x))
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got.astype(F32), np.asarray(want, F32), rtol=1e-2)


def test_reductions_without_an_element_give_the_identity():
    nothing = np.zeros((0, 4), F32)
    np.testing.assert_array_equal(evaluate(lambda x: x.sum(0), nothing), [0] * 4)
    largest = evaluate(lambda x: jnp.max(x, axis=0, initial=-np.inf), nothing)
    np.testing.assert_array_equal(largest, [-np.inf] * 4)


# --- where XLA's CPU backend deviates -------------------------------------------------

EIGHT_BITS = {
    "max(x*x)": (lambda x: jnp.max(x * x, axis=1), lambda x: (x * x).max(1)),
    "max(x+x)": (lambda x: jnp.max(x + x, axis=1), lambda x: (x + x).max(1)),
    "min(x-7)": (lambda x: jnp.min(x - 7, axis=1), lambda x: (x - 7).min(1)),
}


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_maxima_of_8_bit_arithmetic_wrap_first(name, dtype):
    ours, defined = EIGHT_BITS[name]
    x = np.random.default_rng(0).integers(-128, 128, (16, 64)).astype(dtype)

    def body(x, o):
        o[...] = ours(x[...])

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((16,), dtype))
    np.testing.assert_array_equal(kernel(x), defined(x))


def test_denormals_are_kept_as_the_emitted_code_keeps_them():
    x = np.resize(TINY * np.array([1, 3, -6, 2**22, 2**24 + 2], F32), 256)
    expected = [x * F32(0.5), x + x, np.abs(x), x * F32(2.0**100), x > 0]

    def body(x, half, double, size, large, positive):
        value = x[...]
        half[...] = value * 0.5
        double[...] = value + value
        size[...] = jnp.abs(value)
        large[...] = value * 2.0**100
        positive[...] = value > 0

    def make(interpret):
        types = [jax.ShapeDtypeStruct((256,), y.dtype) for y in expected]
        return plgpu.kernel(body, out_type=types, interpret=interpret)

    everywhere.check(make, [jnp.asarray(x)], expected)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_what_is_too_large_for_float8_is_nan_or_infinity(dtype):
    x = np.resize(np.array([1e6, -1e6, np.inf, -np.inf, np.nan, 1, 0.3], F32), 256)
    want = x.astype(dtype)
    make = everywhere.elementwise(lambda x: x.astype(dtype), dtype, shape=(256,))
    everywhere.check(make, [jnp.asarray(x)], want)


@pytest.mark.parametrize("method", [0, 1])
def test_rounding_does_not_round_twice(method):
    # `x + 0.5` is itself rounded at the largest number below a half, and from 2**23.
    below = np.nextafter(F32(0.5), F32(0))
    values = [below, 0.5, 1.5, 2.5, 2**23 - 0.5, 2**23 + 1, 2**24 + 2, np.inf, np.nan]
    x = np.resize(np.array([*values, *(-v for v in values)], F32), 256)
    away = [0, 1, 2, 3, 2**23, 2**23 + 1, 2**24 + 2, np.inf, np.nan]
    even = [0, 0, 2, 2, 2**23, 2**23 + 1, 2**24 + 2, np.inf, np.nan]
    results = even if method else away
    want = np.resize(np.array([*results, *(-v for v in results)], F32), 256)
    mode = lax.RoundingMethod(method)
    make = everywhere.elementwise(lambda x: lax.round(x, mode), F32, shape=(256,))
    everywhere.check(make, [jnp.asarray(x)], want)
