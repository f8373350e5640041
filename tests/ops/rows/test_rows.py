# SPDX-License-Identifier: Apache-2.0
"""Operations on rows: values and derivatives against float64; refusals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors, ops
from pallas_gpu.ops.rows import norms_backward
from tests.support import everywhere, host
from tests.support.refusal import refused

# Blocks of several rows, whole rows, a single row; and rows in parts.
SHAPES = [(6, 100), (3, 1, 777), (40, 64), (5,)]
LONG = (2, 17000)
ROUNDING = {"float32": 1e-5, "float16": 2**-9, "bfloat16": 2**-6}


def normal(*shape, dtype=jnp.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def log_softmax(x, axis=-1):
    return np.log(softmax(x, axis))


def layer_norm(x, scale=1.0, bias=0.0):
    x = x - x.mean(-1, keepdims=True)
    return x / ((x * x).mean(-1, keepdims=True) + 1e-5) ** 0.5 * scale + bias


def rms_norm(x, scale=1.0, bias=0.0):
    return x / ((x * x).mean(-1, keepdims=True) + 1e-6) ** 0.5 * scale + bias


def check(operation, reference, *args, atol=None, **options):
    def make(interpret):
        return functools.partial(operation, interpret=interpret, **options)

    expected = reference(*(np.asarray(x, np.float64) for x in args))
    atol = ROUNDING[args[0].dtype.name] if atol is None else atol
    everywhere.check(make, args, expected, atol=atol, rtol=atol)


def check_derivatives(operation, reference, *args, atol=1e-4):
    """Compares the derivatives of a weighted sum with JAX's of the reference."""
    weights = normal(*args[0].shape, seed=9)

    def gradients(function):
        def loss(*args):
            return jnp.sum(function(*args).astype(jnp.float32) * weights)

        return jax.grad(loss, tuple(range(len(args))))

    def make(interpret):
        return gradients(functools.partial(operation, interpret=interpret))

    everywhere.check(make, args, gradients(reference)(*args), atol=atol, rtol=atol)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((s, "float32") for s in SHAPES),
        (SHAPES[0], "float16"),
        (SHAPES[1], "bfloat16"),
    ],
)
def test_softmax(shape, dtype):
    check(ops.softmax, softmax, normal(*shape, dtype=dtype))
    if dtype == "float32":
        check(ops.log_softmax, log_softmax, normal(*shape))


@pytest.mark.parametrize(("shape", "axis"), [((5, 33), 0), ((3, 6, 48), -2)])
@pytest.mark.parametrize("log", [False, True])
def test_softmax_along_any_axis(shape, axis, log):
    """By a transposition, and in blocks of 16 columns."""
    operation = ops.log_softmax if log else ops.softmax
    reference, x = (log_softmax if log else softmax), normal(*shape)
    of_jax = jax.nn.log_softmax if log else jax.nn.softmax
    check(operation, functools.partial(reference, axis=axis), x, axis=axis)
    along = (functools.partial(f, axis=axis) for f in (operation, of_jax))
    check_derivatives(*along, x)


OF_JAX = {ops.softmax: jax.nn.softmax, ops.log_softmax: jax.nn.log_softmax}


@pytest.mark.parametrize(
    ("operation", "shape"),
    [*((ops.softmax, s) for s in SHAPES), *((ops.log_softmax, s) for s in SHAPES[1:3])],
)
def test_derivatives_of_softmax(operation, shape):
    check_derivatives(operation, OF_JAX[operation], normal(*shape))


def test_the_derivative_of_log_softmax_has_the_precision_of_the_type():
    x, d = (normal(4, 2000, dtype=jnp.bfloat16, seed=i) for i in (0, 1))

    def gradient(function, x):
        return jax.vjp(function, x)[1](d.astype(x.dtype))[0]

    cases = (ops.log_softmax, x), (jax.nn.log_softmax, x.astype(jnp.float32))
    got, expected = (np.asarray(gradient(*case), np.float64) for case in cases)
    assert np.linalg.norm(got - expected) < 2**-8 * np.linalg.norm(expected)


@pytest.mark.parametrize("operation", OF_JAX.keys())
def test_softmax_of_rows_that_exceed_the_registers(operation):
    x = normal(*LONG)
    check(operation, softmax if operation is ops.softmax else log_softmax, x)
    check_derivatives(operation, OF_JAX[operation], x)


@pytest.mark.parametrize("columns", [8, 17000])
def test_masked_elements_have_no_share(columns):
    x = np.asarray(normal(2, columns)).copy()
    x[:, ::2] = -np.inf
    np.testing.assert_allclose(ops.softmax(jnp.asarray(x)), softmax(x), atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((s, "float32") for s in SHAPES), (SHAPES[1], "bfloat16")]
)
def test_norms(shape, dtype):
    x = normal(*shape, dtype=dtype)
    scale, bias = normal(shape[-1], seed=1), normal(shape[-1], seed=2)
    check(ops.layer_norm, layer_norm, x, scale, bias)
    check(ops.rms_norm, rms_norm, x, scale, bias)


@pytest.mark.parametrize(
    ("norm", "reference"), [(ops.layer_norm, layer_norm), (ops.rms_norm, rms_norm)]
)
def test_norms_without_scale_or_bias(norm, reference):
    x, column = normal(4, 96), normal(96, seed=1)

    def with_bias(x, bias, interpret=None):
        return norm(x, bias=bias, interpret=interpret)

    def biased(x, bias):
        return reference(x, 1.0, bias)

    check(norm, reference, x)
    check(norm, reference, x, column)
    check(with_bias, biased, x, column)
    check_derivatives(with_bias, biased, x, column)


def test_the_epsilon_of_norms():
    x = jnp.full((2, 8), 3.0)
    for operation in (ops.rms_norm, ops.layer_norm):
        got = operation(x, epsilon=7.0)
        expected = 0.75 if operation is ops.rms_norm else 0.0
        np.testing.assert_allclose(got, np.full((2, 8), expected), atol=1e-6)


# The last one consists of whole blocks.
@pytest.mark.parametrize("shape", [(6, 100), (5,), (33, 130), (64, 256)])
def test_derivatives_of_norms(shape):
    x = normal(*shape)
    scale, bias = normal(shape[-1], seed=1), normal(shape[-1], seed=2)
    check_derivatives(ops.layer_norm, layer_norm, x, scale, bias)
    check_derivatives(ops.rms_norm, rms_norm, x, scale, bias)


# Parts of rows with a rest, and buffers that take several tiles.
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("rows", "columns", "blocks"), [(31, 1088, 1), (5, 2048, 132)])
def test_derivatives_of_norms_in_one_pass(rows, columns, blocks, dtype, monkeypatch):
    monkeypatch.setattr(norms_backward, "_BLOCKS", blocks)
    x, d = (normal(rows, columns, dtype=dtype, seed=i) for i in (0, 1))
    scale, bias = (normal(columns, seed=i) for i in (2, 3))
    atol = ROUNDING[x.dtype.name] * 4
    for operation, reference, args in (
        (ops.rms_norm, rms_norm, (x, scale)),
        (ops.rms_norm, rms_norm, (x, scale, bias)),
        (ops.layer_norm, layer_norm, (x, scale, bias)),
    ):
        got = jax.vjp(operation, *args)[1](d)
        exact = [y.astype(jnp.float32) for y in args]
        expected = jax.vjp(reference, *exact)[1](d.astype(jnp.float32))
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(
                one.astype(jnp.float32), other, rtol=atol, atol=atol * rows**0.5
            )


def test_norms_of_rows_that_exceed_the_registers():
    x, scale = normal(*LONG), normal(LONG[-1], seed=1)
    check(ops.rms_norm, rms_norm, x, scale)
    check(ops.layer_norm, layer_norm, x, scale)
    check_derivatives(ops.layer_norm, layer_norm, x, scale)


def rotated(x, interleaved, positions=None, base=10000.0):
    batch, length, _, d = x.shape
    positions = np.arange(length) if positions is None else np.asarray(positions)
    positions = np.broadcast_to(positions, (batch, length))
    pairs = d // 2
    angle = positions[..., None, None] * base ** (-np.arange(pairs) / pairs)
    first, second = slice(0, pairs), slice(pairs, d)
    if interleaved:
        first, second = slice(0, None, 2), slice(1, None, 2)
    a, b, y = x[..., first], x[..., second], np.empty_like(x)
    y[..., first] = a * np.cos(angle) - b * np.sin(angle)
    y[..., second] = a * np.sin(angle) + b * np.cos(angle)
    return y


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 3, 64), (1, 4, 40, 128), (1, 3, 1, 6)])
def test_rotary_embedding(shape, interleaved):
    def reference(x):
        return rotated(x, interleaved)

    check(ops.rotary_embedding, reference, normal(*shape), interleaved=interleaved)


@pytest.mark.parametrize("batched", [False, True])
def test_rotary_embedding_at_given_positions(batched):
    positions = host.array([[7, 0, 3, 3000], [1, 2, 3, 4]], jnp.int32)
    positions = positions if batched else positions[0]

    def operation(x, interpret):
        return ops.rotary_embedding(x, positions, base=500.0, interpret=interpret)

    def reference(x):
        return rotated(x, False, positions, 500.0)

    check(operation, reference, normal(2, 4, 2, 16), atol=2e-4)


def test_the_derivative_of_a_rotation_rotates_back():
    x = normal(1, 6, 2, 32)

    def loss(x):
        return 0.5 * jnp.sum(ops.rotary_embedding(x) ** 2)

    np.testing.assert_allclose(jax.grad(loss)(x), x, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "k"),
    [((4, 100), 3), ((2, 3, 7), 7), ((1200,), 1), ((17001,), 5)],
)
def test_top_k(shape, k):
    x, weights = normal(*shape), normal(*shape[:-1], k, seed=3)

    def of(function):
        gradient = jax.grad(lambda x: jnp.sum(function(x, k)[0] * weights))
        return *function(x, k), gradient(x)

    for got, expected in zip(of(ops.top_k), of(jax.lax.top_k), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_equal_elements_of_long_rows_come_in_their_order():
    x = jnp.full((1, 9001), -jnp.inf).at[0, host.array([3, 8999])].set(1.0)
    for got, expected in zip(ops.top_k(x, 5), jax.lax.top_k(x, 5), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_equal_elements_come_in_their_order():
    def make(interpret):
        return lambda x: ops.top_k(x, 3, interpret=interpret)

    x = host.array([[1.0, 2.0, 2.0, 0.0, 2.0]])
    everywhere.check(make, [x], (np.full((1, 3), 2.0), np.array([[1, 2, 4]])))


def test_operations_under_vmap_and_jit():
    x, scale, bias = normal(3, 4, 64), normal(64, seed=1), normal(3, 64, seed=2)
    got = jax.jit(
        jax.vmap(lambda x, b: ops.rms_norm(ops.softmax(x, axis=0), scale, b))
    )(x, bias)
    expected = rms_norm(softmax(np.asarray(x, np.float64), 1), scale, bias[:, None])
    np.testing.assert_allclose(got, expected, atol=1e-3, rtol=1e-3)


def test_types_of_16_bits_use_approximate_functions_unless_told_otherwise():
    def functions(dtype, **options):
        x = jax.ShapeDtypeStruct((4, 64), dtype)
        (report,) = plgpu.offline.lower(lambda x: ops.softmax(x, **options), x)
        return "math.exp" in report.mlir, "ex2.approx" in report.mlir

    exact = plgpu.CompilerParams(approx_math=False)
    assert functions(jnp.float32) == functions(jnp.bfloat16, compiler_params=exact)
    assert functions(jnp.float32) != functions(jnp.bfloat16)


@pytest.mark.parametrize(
    "operation", [ops.softmax, ops.rms_norm, lambda x: ops.top_k(x, 1)]
)
@refused
def test_a_shape_is_not_an_array(operation):
    operation(jax.ShapeDtypeStruct((2, 8), jnp.float32))


# --- kernels of users -----------------------------------------------------------------


def squares(carry, row):
    """Adds the elements' squares, and counts those that are positive."""
    x = row.elements[0]
    return carry[0] + row.sum(x * x), carry[1] + row.sum(jnp.where(x > 0, 1.0, 0.0))


def weighted(row, found):
    """Scales x, and adds the second array times the columns."""
    x, other = row.elements
    return x * row.spread(jax.lax.rsqrt(found[0])) + other * row.column(0)


@pytest.mark.parametrize("columns", [96, 5000])
def test_a_reduction_of_a_user(columns):
    x, other = normal(4, columns), normal(4, columns, seed=1)
    column = normal(columns, seed=2)

    def make(interpret):
        kernel = ops.row_kernel(
            [ops.Reduction((0.0, 0.0), squares)], weighted, return_reductions=True,
            most_columns=4096, interpret=interpret,
        )  # fmt: skip
        return lambda x, other, column: kernel(x, other, columns=[column])

    total = (x.astype(np.float64) ** 2).sum(-1)
    y = x / np.sqrt(total)[:, None] + other * column
    expected = y, [(total, (x > 0).sum(-1))]
    everywhere.check(make, (x, other, column), expected, atol=1e-4, rtol=1e-4)


def test_several_results_and_reductions_that_use_others():
    mean = ops.Reduction(
        0.0,
        lambda c, row: c + row.sum(row.elements[0]),
        finish=lambda c, size: c / size,
    )
    spread = ops.Reduction(
        0.0, lambda c, row, mean: jnp.maximum(c, row.max(row.elements[0]) - mean)
    )

    def apply(row, mean, largest):
        x = row.elements[0] - row.spread(mean)
        return x, x / row.spread(largest)

    x = normal(2, 3, 64, dtype=jnp.bfloat16)
    types = jnp.float32, jnp.bfloat16
    got = ops.row_kernel([mean, spread], apply, out_dtype=types)(x)
    centred = np.asarray(x, np.float32)
    centred -= centred.mean(-1, keepdims=True)
    scaled = centred / centred.max(-1, keepdims=True)
    assert tuple(y.dtype for y in got) == types
    for y, expected in zip(got, (centred, scaled), strict=True):
        np.testing.assert_allclose(y.astype(jnp.float32), expected, atol=2e-2)


@pytest.mark.parametrize(
    ("arrays", "columns"),
    [((normal(4, 8), normal(4, 9)), ()), ((normal(4, 8),), (normal(4),))],
)
def test_a_row_kernel_of_arrays_that_do_not_match(arrays, columns):
    kernel = ops.row_kernel([], lambda row: row.elements[0])
    with pytest.raises(errors.ShapeError, match="does not match"):
        kernel(*arrays, columns=columns)


def test_a_part_holds_more_than_most_columns():
    mean = ops.Reduction(
        0.0, lambda c, row: c + row.sum(row.elements[0]), lambda c, size: c / size
    )

    def centred(row, mean):
        return row.elements[0] - row.spread(mean)

    x = normal(8, 96)
    y = ops.row_kernel([mean], centred, most_columns=32)(x)
    np.testing.assert_allclose(y, x - x.mean(-1, keepdims=True), atol=1e-6)


def first(row, *found):
    return row.elements[0]


@pytest.mark.parametrize(
    ("step", "apply", "arrays"),
    [
        (lambda c, row: c + jnp.sum(row.elements[0]), first, 1),
        (lambda c, row: c + row.elements[0], first, 1),
        (lambda c, row: None, first, 1),
        (lambda c, row: c, lambda row, found: (first(row), found), 1),
        (lambda c, row: c, lambda row, found: None, 1),
        (lambda c, row: c, first, 0),
        (lambda c: c, first, 1),
        (lambda c, row: c, lambda row: first(row), 1),
    ],
    ids=[
        *("all", "elements", "no carry", "two results", "no result", "no array"),
        *("step takes no row", "apply takes no reduction"),
    ],
)
@refused
def test_functions_of_a_row_kernel_return_what_is_declared(step, apply, arrays):
    ops.row_kernel([ops.Reduction(0.0, step)], apply)(*[normal(4, 8)] * arrays)  # HERE
