# SPDX-License-Identifier: Apache-2.0
"""Errors for references that are used as if they were the values they refer to."""

from __future__ import annotations

import re
from typing import Any

from pallas_gpu import _jax, errors
from pallas_gpu.types.refs import IndexableRef, RefView, aval_method, aval_property


def _refuse_value(what: str) -> Any:
    """Returns a method that raises: a reference is used where a value is expected."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise not_a_value(what)

    return refuse


def _refuse_sum(*operands: Any) -> Any:
    """Raises for a sum with a reference, which may be meant as a pointer."""
    error = not_a_value("arithmetic on a reference")
    refs = IndexableRef, RefView
    values = [x for x in operands[1:] if not isinstance(getattr(x, "aval", x), refs)]
    kinds = [getattr(getattr(x, "dtype", None), "kind", "") for x in values]
    if any(kind in ("i", "u") for kind in kinds):
        error.hint = (
            f"{error.hint}; for the elements at some offsets, as of a pointer: "
            "x_ref[offsets], or plgpu.load(x_ref, offsets, mask=...)"
        )
    raise error


def conversion(method: str) -> str | None:
    """Returns the description of a method that asks for a Python value, as `__int__`.

    None for another method.
    """
    return _CONVERSIONS.get(method.strip("_"))


def not_a_value(what: str) -> errors.ArgumentTypeError:
    """Returns the error for a reference that is used as if it were its contents."""
    return errors.ArgumentTypeError(
        what,
        expected="a value: ref[...] reads all of it, ref[i] a part",
        got="the reference itself",
        hint="read it first: 2 * x_ref[...], jnp.exp(x_ref[...])",
    )


# The names under which a tracer looks up operators in its abstract value.
_OPERATORS = re.findall(
    r"\w+",
    """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow
    matmul rmatmul and rand or ror xor rxor lshift rlshift rshift rrshift neg pos abs
    invert lt le gt ge
    """,
)
# What asks a reference for a Python value, and its description.
_CONVERSIONS = {
    "bool": "a reference is a condition",
    "int": "a reference is converted with int()",
    "float": "a reference is converted with float()",
    "complex": "a reference is converted with complex()",
    "index": "a reference is an index",
    "iter": "a loop runs over a reference",
    "contains": "`in` searches a reference",
    "round": "a reference is rounded",
}


def _refuse_uses_as_values() -> None:
    arithmetic = _refuse_value("arithmetic on a reference")
    # A view is compared where references are.
    for name in (*_OPERATORS, "eq", "ne"):
        setattr(IndexableRef, f"_{name}", staticmethod(arithmetic))
    for name in _OPERATORS:
        setattr(RefView, f"__{name}__", arithmetic)
    for name in ("add", "radd"):
        setattr(IndexableRef, f"_{name}", staticmethod(_refuse_sum))
        setattr(RefView, f"__{name}__", _refuse_sum)
    for name, what in _CONVERSIONS.items():
        setattr(IndexableRef, f"_{name}", staticmethod(_refuse_value(what)))
        setattr(RefView, f"__{name}__", _refuse_value(what))
    # A tracer expects attributes of the same kinds as those of an array's type.
    for name, attribute in vars(_jax.ShapedArray).items():
        kind = type(attribute)
        if kind in (aval_property, aval_method) and not hasattr(IndexableRef, name):
            refuse = _refuse_value(f"a reference has no `{name}`: arrays have")
            setattr(IndexableRef, name, kind(refuse))
    # jnp's functions call it; NumPy's ask for __array__, which a tracer refuses.
    call = _refuse_value("a function of arrays is called on a reference")
    IndexableRef.__jax_array__ = aval_method(call)  # type: ignore[attr-defined]


_refuse_uses_as_values()
