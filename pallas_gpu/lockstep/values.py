# SPDX-License-Identifier: Apache-2.0
"""What the threads of a strand hold: arrays of the element's own type, lanes first.

A scalar has shape [lanes], a vector [lanes, n]; `lanes` is 1 where all threads hold the
same. Signless integers are unsigned, `i1` is bool, pointers are int64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.lockstep.not_modelled import NotModelled

_DTYPES = {
    "i1": np.dtype(bool),
    "i8": np.dtype(np.uint8),
    "i16": np.dtype(np.uint16),
    "i32": np.dtype(np.uint32),
    "i64": np.dtype(np.uint64),
    "index": np.dtype(np.uint64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f8E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "f8E8M0FNU": np.dtype(ml_dtypes.float8_e8m0fnu),
}


@functools.cache
def _dtype(name: str) -> np.dtype:
    if name.startswith("!llvm.ptr"):
        return np.dtype(np.int64)
    if name not in _DTYPES:
        raise NotModelled(f"elements of type {name}")
    return _DTYPES[name]


def element_type(type_: ir.Type) -> ir.Type:
    """The type of a vector's elements, or the type itself."""
    return type_.element_type if isinstance(type_, ir.VectorType) else type_


def dtype(type_: ir.Type) -> np.dtype:
    """The dtype of an element."""
    return _dtype(str(element_type(type_)))


def result_kinds(type_: ir.Type) -> list[np.dtype]:
    """The dtypes of the results of inline assembly: one, or those of a structure."""
    text = str(type_)
    if not text.startswith("!llvm.struct"):
        return [dtype(type_)]
    names = text[text.index("(") + 1 : text.rindex(")")].split(",")
    return [dtype(ir.Type.parse(name.strip())) for name in names]


def _is_bool(kind: np.dtype) -> bool:
    return kind.kind == "b"


def length(type_: ir.Type) -> int | None:
    """Elements of a vector, None for a scalar."""
    return type_.shape[0] if isinstance(type_, ir.VectorType) else None


def signed(x: np.ndarray) -> np.ndarray:
    """The same bits as two's complement."""
    if _is_bool(x.dtype):
        return -x.astype(np.int8)
    return x.view(f"i{x.dtype.itemsize}")


def unsigned(x: np.ndarray) -> np.ndarray:
    """The same bits as an integer without a sign."""
    return x if _is_bool(x.dtype) else x.view(f"u{x.dtype.itemsize}")


def bitcast(x: Any, source: ir.Type, target: ir.Type) -> np.ndarray:
    """The same bits as elements of another type, and as another number of them."""
    to, lanes = dtype(target), x.shape[0]
    if _is_bool(dtype(source)) or _is_bool(to):
        x = _bits_to_bools(x.reshape(lanes, -1)) if _is_bool(to) else _bools_to_bits(x)
    x = np.ascontiguousarray(x.reshape(lanes, -1)).view(to)
    return x if length(target) is not None else x[:, 0]


def _bits_to_bools(x: np.ndarray) -> np.ndarray:
    if _is_bool(x.dtype):
        return x
    raw = np.ascontiguousarray(x).view(np.uint8)
    return np.unpackbits(raw, axis=1, bitorder="little").view(bool)


def _bools_to_bits(x: np.ndarray) -> np.ndarray:
    x = x.reshape(x.shape[0], -1)
    if x.shape[1] % 8:
        raise NotModelled("a bitcast to less than a byte")
    return np.packbits(x, axis=1, bitorder="little")


def constant(attribute: ir.Attribute, type_: ir.Type) -> np.ndarray:
    """The value of a constant's attribute."""
    kind = dtype(type_)
    if isinstance(attribute, ir.DenseElementsAttr):
        if attribute.is_splat:
            one = _number(attribute.get_splat_value(), kind)
            return np.repeat(one, type_.shape[0])[None]
        listed = str(attribute).split("[")[1].split("]")[0].split(",")
        element = type_.element_type
        parsed = [ir.Attribute.parse(f"{x.strip()} : {element}") for x in listed]
        return np.concatenate([_number(x, kind) for x in parsed])[None]
    return _number(attribute, kind)


def _number(attribute: Any, kind: np.dtype) -> np.ndarray:
    if _is_bool(kind):
        return np.array([bool(attribute.value)])
    if isinstance(attribute, ir.FloatAttr):
        return np.array([attribute.value], np.float64).astype(kind)
    mask = (1 << 8 * kind.itemsize) - 1
    return np.array([int(attribute.value) & mask], kind)


class Lazy:
    """A value of registers that an asynchronous instruction still writes.

    Registers may be regrouped before the instruction has completed; whoever computes
    with them needs it to have.
    """

    def __init__(self, compute: Callable[[], np.ndarray]) -> None:
        self._compute = compute
        self._value: np.ndarray | None = None

    def force(self) -> np.ndarray:
        """The value; an error where what writes it is not known to be complete."""
        if self._value is None:
            self._value = self._compute()
        return self._value

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return self.force()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any):
        return getattr(ufunc, method)(*map(forced, inputs), **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.force(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.force()[key]


class LazyVector(Lazy):
    """A vector of registers, some of them lazy."""

    def __init__(self, elements: Sequence[Any]) -> None:
        super().__init__(lambda: stack([forced(x) for x in elements]))
        self.elements = elements


def forced(x: Any) -> Any:
    """The value of what may be lazy."""
    return x.force() if isinstance(x, Lazy) else x


def stack(elements: Sequence[np.ndarray]) -> np.ndarray:
    """A vector of scalars."""
    lanes = max(x.shape[0] for x in elements)
    result = np.empty((lanes, len(elements)), elements[0].dtype)
    for i, x in enumerate(elements):
        result[:, i] = x
    return result
