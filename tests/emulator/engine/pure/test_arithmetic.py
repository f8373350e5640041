# SPDX-License-Identifier: Apache-2.0
"""lax's operations in NumPy: every row, beside lax's definitions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_gpu import lowering
from pallas_gpu.emulator.engine import plan
from pallas_gpu.emulator.engine.pure import arithmetic
from pallas_gpu.emulator.engine.steps import bound
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program import build
from tests.support import element_programs as elements
from tests.support import everywhere

F32 = np.float32
TINY = np.float32(2.0**-149)  # the smallest denormal


def evaluate_all(fn, *args):
    """Runs a function's equations on NumPy values; returns its results."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    steps = plan.plan_of(jaxpr)
    env = [*args] + [None] * steps.size
    with np.errstate(all="ignore"):
        for step in steps.steps:
            env[step.out] = step.fn(*bound(step.ins, env))
    results = [np.asarray(x) for x in bound(steps.outs, env)]
    for result, aval in zip(results, jaxpr.out_avals, strict=True):
        assert (result.dtype, result.shape) == (aval.dtype, aval.shape)
    return results


def evaluate(fn, *args):
    """Runs a function with one result."""
    (result,) = evaluate_all(fn, *args)
    return result


def test_every_primitive_that_the_lowering_knows_is_emulated():
    inlined = build.CALLS.keys() | {"optimization_barrier"}
    missing = {
        primitive.name
        for primitive in registry.rules(registry.RuleKind.EMIT)
        if registry.rule(primitive, registry.RuleKind.EMULATE) is None
        and primitive.name not in arithmetic._TABLE
        and primitive.name not in inlined
        # JAX evaluates operations with several results.
        and not primitive.multiple_results
    }
    assert lowering
    assert not missing


# The emitters take these; lax does not.
REFUSED = {
    "add": ("bool",),
    "mul": ("bool",),
    "abs": (*elements.DTYPES["unsigned"], "int4", "int2"),
}


@pytest.mark.parametrize("name", elements.rows())
def test_elements_are_those_of_laxs_definition(name):
    wrong = []
    for kind, dtype in elements.rows()[name]:
        if dtype in REFUSED.get(name, ()):
            continue
        cases = elements.params_of(name, kind), elements.row_programs(name, kind, dtype)
        for params, program in zip(*cases, strict=True):
            with jax.enable_x64():
                got = evaluate(
                    elements.lax_function(name, dtype, params), *program.operands
                )
            if not program.is_right([got]):
                wrong.append((dtype, params))
    assert not wrong


@pytest.mark.parametrize("src", elements.ALL)
def test_conversions_are_those_of_the_emitted_code(src):
    def converted(*xs):
        pairs = zip(xs, elements.conversions(src), strict=True)
        return [lax.convert_element_type(x, dst) for x, dst in pairs]

    programs = [elements.conversion_program(src, d) for d in elements.conversions(src)]
    with jax.enable_x64():
        got = evaluate_all(converted, *(program.operands[0] for program in programs))
    results = zip(elements.conversions(src), programs, got, strict=True)
    assert not [dst for dst, program, x in results if not program.is_right([x])]


FLOATS, INTEGERS = ("float32", "bfloat16"), ("int8", "uint32")
# By primitive: of an array of 8 x 16 elements.
SHAPED = {
    "reduce_sum": lambda x: jnp.sum(x, axis=1),
    "reduce_max": lambda x: jnp.max(x, axis=0),
    "reduce_min": lambda x: jnp.min(x),
    "reduce_prod": lambda x: jnp.prod(x[:2], axis=0),
    "reduce_and": lambda x: lax.reduce_and(x, (1,)),
    "reduce_or": lambda x: lax.reduce_or(x, (0,)),
    "reduce_xor": lambda x: lax.reduce_xor(x, (0, 1)),
    "cumsum": lambda x: lax.cumsum(x, axis=1, reverse=True),
    "cummax": lambda x: lax.cummax(x, axis=0),
    "cummin": lambda x: lax.cummin(x, axis=1, reverse=True),
    "cumprod": lambda x: lax.cumprod(x[:3], axis=0),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, axis=1),
    "iota": lambda x: lax.broadcasted_iota(x.dtype, (3, 5, 2), 1),
    "transpose": lambda x: x.T,
    "slice": lambda x: x[1:7:2, 3:],
    "reshape": lambda x: x.reshape(4, 2, 16),
    "squeeze": lambda x: lax.squeeze(x[:1], (0,)),
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x[:, None], (8, 3, 16)),
    "concatenate": lambda x: jnp.concatenate([x, x[2:5]]),
    "rev": lambda x: lax.rev(x, (1,)),
    "pad": lambda x: lax.pad(x, np.ones((), x.dtype), ((1, 2, 0), (-3, 1, 0))),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (x[0, 0].astype(int), 9), (4, 5)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:3, :9], (7, 4)),
    "lgamma": lambda x: lax.lgamma(x + 0.5),
    "nextafter": lambda x: lax.nextafter(x, x * 2 - 3),
    "copy": lambda x: jnp.copy(x),
    "name": lambda x: checkpoint_name(x, "x"),
    "stop_gradient": lax.stop_gradient,
}
_OF = dict.fromkeys(("reduce_and", "reduce_or", "reduce_xor"), INTEGERS)
_OF |= {"cumlogsumexp": ("float32",), "lgamma": FLOATS, "nextafter": FLOATS}


@pytest.mark.parametrize("name", SHAPED)
def test_reductions_scans_and_shapes_agree_with_jax(name):
    for dtype in _OF.get(name, FLOATS + INTEGERS):
        x = np.random.default_rng(0).integers(0, 5, (8, 16)).astype(dtype)
        assert name in str(jax.make_jaxpr(SHAPED[name])(x))
        got, want = evaluate(SHAPED[name], x), SHAPED[name](jnp.asarray(x))
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got.astype(F32), np.asarray(want, F32), rtol=1e-2)


def test_every_row_is_tried():
    tried = {"convert_element_type", *elements.rows(), *SHAPED}
    # In tests/lowering/families/test_control.py.
    assert set(arithmetic._TABLE) == tried


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

    np.testing.assert_array_equal(everywhere.emulate(body, [x], x[:, 0]), defined(x))


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

    everywhere.run(body, [jnp.asarray(x)], expected)


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
