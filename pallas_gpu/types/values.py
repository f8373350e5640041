# SPDX-License-Identifier: Apache-2.0
"""Rules for arguments that JAX traces: scalars, arrays, element types.

They complete `pallas_gpu.expect`, which does not know JAX.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import _jax, errors, expect
from pallas_gpu.types.elements import COMPLEX_PARTS, is_complex

_INT32 = np.iinfo(np.int32)


def _called(value: Any) -> str | None:
    """Returns what an author calls an array: JAX's classes have names of their own."""
    if _jax.is_tracer(value):
        is_reference = isinstance(value.aval, _jax.AbstractRef)
        return "reference" if is_reference else "traced array"
    return "array" if isinstance(value, jax.Array) else None


expect.locate_with(_jax.where_now)
expect.name_with(_called)


def abstract(value: Any) -> Any:
    """Returns the type of a value as JAX sees it; None for what is no value."""
    if value is None or isinstance(value, (str, bytes, type, jax.ShapeDtypeStruct)):
        return None
    try:
        return jax.typeof(value)
    except Exception:
        return None


def index(value: Any, what: str) -> Any:
    """Accepts integers of 32 bits: static ones, and scalars that are traced."""
    number = None if _jax.is_tracer(value) else expect.index(value)
    if number is not None and _INT32.min <= number <= _INT32.max:
        return number
    if number is None and _is_scalar(value, jnp.integer):
        return value
    raise expect.wrong_type(
        what,
        "an integer scalar of 32 bits",
        "a Python integer or an integer scalar, from -2**31 to 2**31 - 1",
        value,
        "convert it with int(...) or .astype(jnp.int32)",
    )


def indices(value: Any, what: str) -> Any:
    """Accepts indices, and arrays of integers."""
    return index(value, what) if isinstance(value, int) else integer(value, what)


def integer(value: Any, what: str) -> Any:
    """Accepts integers: static ones of any size, and arrays of them."""
    number = None if _jax.is_tracer(value) else expect.index(value)
    if number is not None:
        return number
    aval = abstract(value)
    if isinstance(aval, jax.core.ShapedArray) and jnp.issubdtype(
        aval.dtype, jnp.integer
    ):
        return value
    hint = "convert it with int(...) or .astype(jnp.int32)"
    raise expect.wrong_type(what, "an integer", "an integer", value, hint)


def step(value: Any, what: str) -> Any:
    """Accepts indices, and of static ones the positive ones."""
    value = index(value, what)
    if isinstance(value, int) and value < 1:
        raise errors.ArgumentError(
            f"{what.replace(':', ': the')} is not positive",
            expected="1 or more",
            got=value,
            hint="count up, and index with the end minus the index",
        )
    return value


def condition(value: Any, what: str) -> Any:
    """Accepts scalars that are bools or integers: Python's, and traced ones."""
    if isinstance(value, (bool, np.bool_)) and not _jax.is_tracer(value):
        return bool(value)
    if _is_scalar(value, jnp.integer) or _is_scalar(value, jnp.bool_):
        return value
    raise expect.wrong_type(
        what,
        "a scalar bool",
        "a scalar bool",
        value,
        "compare scalars: lax.axis_index(name) == 0, ref[i] > 0; of an array take "
        "jnp.all or jnp.any",
    )


def _is_scalar(value: Any, kind: Any) -> bool:
    aval = abstract(value)
    return (
        isinstance(aval, jax.core.ShapedArray)
        and aval.shape == ()
        and not isinstance(value, bool)
        and jnp.issubdtype(aval.dtype, kind)
    )


def array(value: Any, what: str) -> jax.Array:
    """Accepts what JAX can compute with, as an array."""
    _require_value(value, what)
    return jnp.asarray(value)


def operands(value: Any, what: str) -> Any:
    """Accepts pytrees of arrays, numbers and `jax.ShapeDtypeStruct`s."""
    for leaf in jax.tree.leaves(value):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            values(leaf, what)
    return value


def is_ref(value: Any) -> bool:
    """True for a reference, False for a view of one."""
    return isinstance(abstract(value), _jax.AbstractRef)


def values(value: Any, what: str) -> Any:
    """Accepts pytrees of arrays, numbers and references."""
    for leaf in jax.tree.leaves(value):
        if not is_ref(leaf):
            _require_value(leaf, what)
    return value


def _require_value(value: Any, what: str) -> None:
    aval = abstract(value)
    if isinstance(aval, jax.core.ShapedArray):
        if is_element_type(aval.dtype):
            return
        raise expect.wrong_type(
            what, "an array of bools, integers or floats", "a supported element type",
            value, _converted(aval.dtype),
        )  # fmt: skip
    hint = "pass numbers or arrays"
    if isinstance(aval, _jax.AbstractRef):
        hint = "read the reference first: ref[...]"
    raise expect.wrong_type(what, "an array", "an array or a number", value, hint)


def _converted(element: Any) -> str:
    """Returns the hint for elements of a type that kernels do not have."""
    if jax.dtypes.issubdtype(element, jax.dtypes.prng_key):
        return (
            "let the body close over the keys; or pass jax.random.key_data(key), and "
            "take jax.random.wrap_key_data(ref[...]) in the body"
        )
    return COMPLEX_PARTS if is_complex(element) else "convert it with .astype"


def is_element_type(element: Any) -> bool:
    """True for the types that arrays of a kernel can have."""
    if isinstance(element, np.dtype):
        return _is_element_dtype(element)
    return _is_of_a_kind(element)


def _is_of_a_kind(element: Any) -> bool:
    kinds = (jnp.bool_, jnp.integer, jnp.floating)
    return any(jnp.issubdtype(element, kind) for kind in kinds)


_is_element_dtype = functools.cache(_is_of_a_kind)


def dtype(value: Any, what: str) -> np.dtype:
    """Accepts what names the type of an element, as a dtype."""
    return _dtype(value, what, lambda _: True)


def element_type(value: Any, what: str) -> np.dtype:
    """Accepts the types of bools, integers and floats, as a dtype."""
    return _dtype(value, what, is_element_type)


# Annotations of parameters, with their rules.
Array = Annotated[jax.Array, array]
Index = Annotated[int | jax.Array, index]
ElementType = Annotated[Any, element_type]
Values = Annotated[Any, values]


def _dtype(value: Any, what: str, accepts: Any) -> np.dtype:
    found = None
    names_a_type = isinstance(value, (np.dtype, type, str))
    if names_a_type or (hasattr(value, "dtype") and not hasattr(value, "shape")):
        try:
            found = jnp.dtype(value)
        except Exception:
            found = None
    if found is not None and accepts(found):
        return found
    raise errors.DTypeError(
        f"{what} is not an element type of a kernel",
        expected="the type of bools, integers or floats",
        got=expect.shown(value),
        hint=COMPLEX_PARTS
        if found is not None and is_complex(found)
        else "write e.g. jnp.float32",
    )
