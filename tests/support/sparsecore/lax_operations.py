# SPDX-License-Identifier: Apache-2.0
"""Operations of lax on a register, for every element type that they are for.

`kernel_of` makes one kernel of several of them, which the emulator, the interpreter of
modules and libtpu get: the table in docs/sparsecore_operations.md is made of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import sparsecore as plsc
from pallas_gpu.arch import tpu

DTYPES = ("float32", "bfloat16", "int32", "uint32", "int16", "int8")
# Others that compute what signed integers of their width do.
UNSIGNED = ("uint16", "uint8")
Function = Callable[[Any, Any], Any]


def _of(name: str, arguments: int = 1) -> Function:
    function = getattr(lax, name)
    return function if arguments == 2 else lambda x, _: function(x)


def _applied(name: str, to: Any = lambda x: x, second: bool = False) -> Function:
    function = getattr(lax, name)
    if second:
        return lambda x, y: function(x, y & 7)
    return lambda x, _: function(to(x))


def _compared(name: str) -> Function:
    function = getattr(lax, name)
    return lambda x, y: jnp.where(function(x, y), x, y)


def _scalar(function: Callable[[Any], Any]) -> Function:
    return lambda x, y: x + function(x).astype(x.dtype)


def _through(dtype: Any) -> Function:
    return lambda x, y: x.astype(dtype).astype(x.dtype)


# name -> function of two registers, kinds of elements: f, i(nteger), w(ords only).
OPERATIONS: dict[str, tuple[Function, str]] = {
    **{n: (_of(n, 2), "fi") for n in ("add", "sub", "mul", "div", "rem", "max", "min")},
    **{n: (_of(n), "fi") for n in ("neg", "sign", "square")},
    "abs": (lambda x, y: x if x.dtype.kind == "u" else lax.abs(x), "fi"),
    **{n: (_of(f"bitwise_{n}", 2), "i") for n in ("and", "or", "xor")},
    "not": (_of("bitwise_not"), "i"),
    **{
        n: (_applied(n, second=True), "i")
        for n in ("shift_left", "shift_right_logical", "shift_right_arithmetic")
    },
    **{n: (_of(n), "i") for n in ("population_count", "clz")},
    **{n: (_compared(n), "fi") for n in ("eq", "ne", "lt", "le", "gt", "ge")},
    "and, or, xor, not of bools": (
        lambda x, y: jnp.where(((x > y) & ~(x > 2)) | ((y > 2) ^ (x < y)), x, y),
        "fi",
    ),
    "x + x": (lambda x, y: jnp.where(x > y, x + x, y), "fi"),
    "div by 3": (lambda x, y: lax.div(x, lax.full_like(x, 3)), "fi"),
    "rem by 3": (lambda x, y: lax.rem(x, lax.full_like(x, 3)), "fi"),
    "select_n": (lambda x, y: lax.select(x > y, x, y), "fi"),
    "clamp": (lambda x, y: lax.clamp(jnp.minimum(x, y), x, y), "fi"),
    **{
        n: (_of(n), "f")
        for n in (
            *("exp", "exp2", "expm1", "tanh", "logistic", "sin", "cos", "tan"),
            *("erf", "erfc", "floor", "ceil", "cbrt", "sinh", "cosh", "asinh", "atan"),
        )
    },
    **{
        n: (_applied(n, lambda x: lax.abs(x) + 1), "f")
        for n in ("log", "log1p", "log2", "sqrt", "rsqrt", "acosh")
    },
    **{
        n: (_applied(n, lambda x: x / (1 + lax.abs(x))), "f")
        for n in ("asin", "acos", "atanh")
    },
    "atan2": (_of("atan2", 2), "f"),
    "pow": (lambda x, y: lax.pow(lax.abs(x) + 1, y), "f"),
    "integer_pow": (lambda x, y: lax.integer_pow(x, 3), "fi"),
    "integer_pow, negative": (lambda x, y: lax.integer_pow(x, -2), "f"),
    "round to even": (
        lambda x, y: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
        "f",
    ),
    "round from zero": (
        lambda x, y: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
        "f",
    ),
    "is_finite": (lambda x, y: jnp.where(lax.is_finite(x), x, y), "f"),
    "convert float32": (_through(jnp.float32), "fi"),
    "convert int32": (_through(jnp.int32), "fi"),
    "convert uint32": (
        lambda x, y: lax.abs(x).astype(jnp.uint32).astype(x.dtype),
        "f",
    ),
    "convert bool": (_through(jnp.bool_), "fi"),
    "bitcast_convert_type": (
        lambda x, y: lax.bitcast_convert_type(
            lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"), x.dtype
        ),
        "fi",
    ),
    "full": (lambda x, y: x + lax.full(x.shape, 3, x.dtype), "fi"),
    "iota": (lambda x, y: x + lax.iota(x.dtype, x.size), "fi"),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 0)[: x.size], "fi"),
    "split": (lambda x, y: jnp.split(lax.concatenate([x, y], 0), 2)[1], "fi"),
    "unstack": (lambda x, y: jnp.unstack(jnp.stack([x, y]))[1], "fi"),
    "reshape": (
        lambda x, y: lax.reshape(lax.reshape(x, (2, x.size // 2)), x.shape),
        "fi",
    ),
    "stack, sum of axis 0": (
        lambda x, y: jnp.stack([x, y]).sum(0, dtype=x.dtype),
        "fi",
    ),
    "rev": (lambda x, y: lax.rev(x, (0,)), "w"),
    "gather": (lambda x, y: x[(lax.iota(jnp.int32, x.size) * 5) % x.size], "w"),
    "x[3]": (lambda x, y: x + x[3], "fi"),
    "x[i]": (lambda x, y: x + x[lax.axis_index("s") % 8], "w"),
    "cumsum": (lambda x, y: lax.cumsum(x), "w"),
    "cumsum, reversed": (lambda x, y: lax.cumsum(x, reverse=True), "w"),
    "cummax": (lambda x, y: lax.cummax(x), "w"),
    "cummin": (lambda x, y: lax.cummin(x), "w"),
    "reduce_sum": (_scalar(jnp.sum), "w"),
    "reduce_max": (_scalar(jnp.max), "w"),
    "reduce_min": (_scalar(jnp.min), "w"),
    "argmax": (_scalar(jnp.argmax), "w"),
    "argmin": (_scalar(jnp.argmin), "w"),
    "reduce_or": (lambda x, y: jnp.where(jnp.any(x > y), x, y), "fi"),
    "reduce_and": (lambda x, y: jnp.where(jnp.all(x > y), x, y), "fi"),
    "sort": (lambda x, y: lax.sort(x), "w"),
    "sort of pairs": (lambda x, y: lax.sort((x, y), num_keys=1)[1], "w"),
}


def kinds_of(dtype: Any) -> str:
    """What is in the kinds of an operation for this type."""
    dtype = jnp.dtype(dtype)
    kind = "f" if jnp.issubdtype(dtype, jnp.floating) else "i"
    return kind + ("w" if dtype.itemsize == 4 else "")


def names(dtype: Any) -> list[str]:
    """The operations for a type."""
    kinds = set(kinds_of(dtype))
    return [n for n, (_, given) in OPERATIONS.items() if kinds & set(given)]


def size_of(dtype: Any, target: str) -> int:
    """How many elements of a type a register has."""
    return 4 * tpu.target(target).lanes // jnp.dtype(dtype).itemsize


def values(dtype: Any, target: str) -> tuple[np.ndarray, np.ndarray]:
    """Two registers of small numbers, none of the second one zero."""
    n, rng = size_of(dtype, target), np.random.default_rng(3)
    if "f" in kinds_of(dtype):
        x = rng.uniform(-3, 3, (2, n)).astype(np.float32)
        x[0, :3] = 0.5, 2.5, -1.5
        return tuple(np.asarray(jnp.asarray(x).astype(dtype)))
    low = 0 if jnp.dtype(dtype).kind == "u" else -9
    numbers = rng.integers(low, 9, (2, n))
    numbers[1] = np.where(numbers[1] == 0, 4, numbers[1])
    return tuple(numbers.astype(dtype))


def kernel_of(chosen: Sequence[str], dtype: Any, target: str) -> Callable[..., Any]:
    """A kernel of two registers; row i of the result is that of operation i."""
    n = size_of(dtype, target)
    out = jax.ShapeDtypeStruct((len(chosen) * n,), dtype)
    # Narrow elements lie one after the other in this tiling alone.
    params = plsc.CompilerParams(target=target, tiling="sparsecore")

    @plsc.kernel(
        out_type=out,
        mesh=plsc.VectorSubcoreMesh(
            core_axis_name="c", subcore_axis_name="s", num_cores=1, num_subcores=1
        ),
        scratch_types=[plsc.VMEM((n,), dtype)] * 2
        + [plsc.VMEM((len(chosen) * n,), dtype)],
        compiler_params=params,
    )
    def operations(x_ref, y_ref, out_ref, x_vmem, y_vmem, out_vmem):
        plsc.sync_copy(x_ref, x_vmem)
        plsc.sync_copy(y_ref, y_vmem)
        x, y = x_vmem[...], y_vmem[...]
        for i, name in enumerate(chosen):
            out_vmem[plsc.ds(i * n, n)] = OPERATIONS[name][0](x, y)
        plsc.sync_copy(out_vmem, out_ref)

    return operations


def expected(chosen: Sequence[str], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """What JAX computes for each operation."""

    def all_of(x: Any, y: Any) -> list[Any]:
        return [OPERATIONS[name][0](x, y) for name in chosen]

    results = jax.jit(jax.vmap(all_of, axis_name="s"))(x[None], y[None])
    return [np.asarray(row)[0] for row in results]


# Of scalars: f32 and i32, on scalar subcores, which have no vectors.
SCALARS = {
    name: OPERATIONS[name]
    for name in (
        *("add", "sub", "mul", "max", "min", "neg", "abs", "sign", "square"),
        *("eq", "ne", "lt", "le", "gt", "ge", "clamp", "integer_pow", "floor"),
        *("is_finite", "convert float32", "convert int32"),
    )
} | {
    f"{name} of integers": (OPERATIONS[name][0], "i")
    for name in (
        *("div", "rem", "and", "or", "xor", "not", "shift_left"),
        *("shift_right_logical", "shift_right_arithmetic", "population_count", "clz"),
    )
}


def scalar_kernel_of(chosen: Sequence[str], dtype: Any, target: str) -> Any:
    """A kernel of two words on a scalar subcore; word i is that of operation i."""
    n = -(-len(chosen) // 8) * 8

    @plsc.kernel(
        out_type=jax.ShapeDtypeStruct((n,), dtype),
        mesh=plsc.ScalarSubcoreMesh(axis_name="c", num_cores=1),
        scratch_types=[plsc.SMEM((8,), dtype), plsc.SMEM((n,), dtype)],
        compiler_params=plsc.CompilerParams(target=target),
    )
    def scalars(x_ref, out_ref, x_smem, out_smem):
        plsc.sync_copy(x_ref, x_smem)
        x, y = x_smem[0], x_smem[1]
        for i in range(n):
            out_smem[i] = x
        for i, name in enumerate(chosen):
            out_smem[i] = SCALARS[name][0](x, y).astype(dtype)
        plsc.sync_copy(out_smem, out_ref)

    return scalars


def scalar_names(dtype: Any) -> list[str]:
    """The operations on scalars for a type."""
    kinds = set(kinds_of(dtype))
    return [n for n, (_, given) in SCALARS.items() if kinds & set(given)]
