# SPDX-License-Identifier: Apache-2.0
"""Element types: what the emulator accepts lowers under both semantics, and reverse.

Whether an operation has an element type is decided when the kernel is traced, before
emulation and lowering. All operations that tracing accepts then run and lower, in one
kernel for each element type.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from pallas_gpu.emitters.elements import table
from tests.support import element_programs as elements
from tests.support.dtype_bodies import OPERATIONS, SHAPE, words
from tests.support.lockstep import kernels as in_lockstep
from tests.support.semantics import BOTH, Traced

SUPPORTED = elements.ALL
PACKED = [*elements.DTYPES["signed"][4:], *elements.DTYPES["unsigned"][4:]]
UNSUPPORTED = words(
    """
    float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fnuz float8_e5m2fnuz
    """
)

# Operations that only other kinds of types have. JAX rejects most of them itself.
BITS = {
    *words("and or xor not shift_left shift_right_logical shift_right_arithmetic"),
    *words("population_count clz reduce_and reduce_or"),
}
FUNCTIONS = words(
    """
    pow exp exp2 expm1 log log2 log1p rsqrt cbrt tanh logistic one_minus_square sin cos
    tan atan2 erf erfc asin acos atan sinh cosh asinh acosh atanh
    """
)
ROUNDING = ["floor", "ceil", "round", "sqrt", "is_finite"]
ARITHMETIC = words(
    """
    add add_any sub mul div rem neg sign square integer_pow iota cumsum cumprod cummax
    cummin reduce_sum reduce_prod
    """
)
COMBINING = words(
    """
    cumsum cumprod cummax cummin reduce_sum reduce_prod reduce_max reduce_min
    """
)
REFUSED: dict[str, set[str]] = {
    "bool": {*FUNCTIONS, *ROUNDING, *ARITHMETIC, "population_count", "clz"}
    | {"shift_left", "shift_right_logical", "shift_right_arithmetic", "clamp", "abs"}
    | {"bitcast_convert_type"},
    **{key: {*FUNCTIONS, *ROUNDING} for key in elements.DTYPES["signed"]},
    **{key: {*FUNCTIONS, *ROUNDING, "abs"} for key in elements.DTYPES["unsigned"]},
    **{
        key: {*FUNCTIONS, *ROUNDING, "abs", "reduce_and", "reduce_or"} for key in PACKED
    },
    **{
        key: BITS
        for kind in ("float", "float8", "float4")
        for key in elements.DTYPES[kind]
    },
    # Its sums have no zero, and its maxima no infinity, from which to start.
    "float8_e8m0fnu": {*BITS, *COMBINING},
}
# Of these the emitters have a case, which lax refuses.
EMITTED = {("add", "bool"), ("mul", "bool"), ("abs", "unsigned")}


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def kernel_of(names: list[str], dtype: Any, interpret: Any = None):
    """A kernel that stores the results of some operations on one array."""

    def results(x):
        for name in names:
            yield name, jax.ShapeDtypeStruct(SHAPE, _result_dtype(name, x.dtype))

    def body(x, *refs):
        *outs, smem, barrier = refs
        for name, out in zip(names, outs, strict=True):
            out[...] = OPERATIONS[name](x, smem, barrier)

    return plgpu.kernel(
        body,
        out_type=[shape for _, shape in results(jax.ShapeDtypeStruct((), dtype))],
        scratch_types=[plgpu.SMEM(SHAPE, dtype), plgpu.Barrier()],
        grid=(1,),
        grid_names=("i",),
        interpret=interpret,
    )


def _result_dtype(name: str, dtype: Any) -> Any:
    if name in ("eq", "ne", "lt", "le", "gt", "ge", "is_finite"):
        return np.bool_
    return name.removeprefix("to_") if name.startswith("to_") else dtype


def error_of(name: str, dtype: str) -> Exception | None:
    """The error of tracing an operation on a type."""
    x = jax.ShapeDtypeStruct(SHAPE, dtype)
    try:
        jax.eval_shape(kernel_of([name], x.dtype), x)
    except Exception as error:
        return error
    return None


@pytest.fixture
def whole_tracebacks():
    """JAX removes its frames from tracebacks, which takes most of a refusal's time."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.usefixtures("whole_tracebacks")
@pytest.mark.parametrize("dtype", SUPPORTED)
def test_an_operation_without_a_type_is_refused_in_tracing_with_the_line(dtype):
    for name in REFUSED[dtype] & OPERATIONS.keys():
        error = error_of(name, dtype)
        # JAX's own functions check their operands before there is an equation.
        by_jax = isinstance(error, TypeError) and "accept" in str(error)
        by_jax |= "does not support bool" in str(error)
        by_jax |= "logical reduction requires" in str(error)
        ours = isinstance(error, errors.DTypeError | errors.UnsupportedError)
        assert by_jax or (ours and error.where), (name, error)


def accepted(dtype: str) -> list[str]:
    # Rows of 16 elements of less than a byte are too short for TMA.
    short = {"copy_by_tma"} if dtype in [*PACKED, "float4_e2m1fn"] else set()
    return [name for name in OPERATIONS if name not in REFUSED[dtype] | short]


@pytest.mark.parametrize("dtype", SUPPORTED)
def test_every_other_operation_is_emulated_and_lowered(dtype):
    names, x = accepted(dtype), jnp.ones(SHAPE, dtype)
    traced = Traced(kernel_of(names, x.dtype, interpret=True), [x])
    results = traced.as_traced(x)
    assert [r.dtype for r in results] == [_result_dtype(n, x.dtype) for n in names]
    for semantics in BOTH:
        in_lockstep.lower_traced(traced.lowered_under(semantics), [x])


@pytest.mark.parametrize("where", ["argument", "result", "scratch"])
def test_an_array_of_another_type_is_refused(where):
    def body(x, o, *scratch):
        pass

    for dtype in UNSUPPORTED:
        types = dict.fromkeys(("argument", "result", "scratch"), np.dtype(np.float32))
        types[where] = np.dtype(dtype)
        x, out = (jax.ShapeDtypeStruct(SHAPE, types[w]) for w in ("argument", "result"))
        scratch = [plgpu.SMEM(SHAPE, dtype)] if where == "scratch" else []
        with pytest.raises(errors.DTypeError, match="do not support") as info:
            jax.eval_shape(plgpu.kernel(body, out_type=out, scratch_types=scratch), x)
        if where != "scratch":
            assert "body" in info.value.where
            assert "outside the kernel" in info.value.hint


@pytest.mark.parametrize("where", ["argument", "result", "value"])
def test_complex_numbers_are_passed_in_parts(where):
    z = jnp.ones(128, jnp.complex64)
    real = jax.ShapeDtypeStruct((128,), jnp.float32)

    def body(*refs):
        *_, x, o = refs
        o[...] = (
            jnp.abs(jax.lax.complex(x[...], x[...])) if where == "value" else x[...]
        )

    with pytest.raises(errors.PallasGpuError, match=r"complex64") as info:
        kernel = plgpu.kernel(body, z if where == "result" else real)
        kernel(z if where == "argument" else z.real)
    assert "the real and the imaginary part as two arrays" in info.value.hint


def test_the_table_has_a_case_for_each_type_that_is_not_refused():
    for name, row in table.TABLE.items():
        for kind, (dtype, *_) in elements.DTYPES.items():
            expected = name not in REFUSED[dtype] or (name, kind) in EMITTED
            assert (kind in row.kinds) == expected, (name, kind)


def test_rows_of_each_kind_are_tried():
    assert {"copy_by_tma", "add", "cumsum", "to_bool"} <= set(OPERATIONS)
    assert all(OPERATIONS.keys() & refused for refused in REFUSED.values())
