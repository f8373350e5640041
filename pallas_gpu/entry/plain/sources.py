# SPDX-License-Identifier: Apache-2.0
"""What a load reads, as the source of a copy: a part of a reference, or rows of it.

Indices of elements are recognised: a range is an iota, added to scalars and broadcast;
rows are an array that is the same along all other axes of the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import _jax, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives.indexed import load_indexed_p
from pallas_gpu.primitives.registers import load_p

LOADS = (_jax.get_p, load_p, load_indexed_p)
# Returns the value of a variable or a literal; a number of a scalar literal.
Read = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Source:
    """The source of a copy that a load can be.

    Attributes:
      ref: the variable of the reference.
      atoms: what its indices are computed from.
      transforms: returns the steps to the part, from the values of atoms.
      has_rows: whether an array of indices names rows.
    """

    ref: Any
    atoms: tuple[Any, ...]
    transforms: Callable[[Read], tuple[Any, ...]]
    has_rows: bool = False

    def view(self, read: Read) -> types.RefView:
        """Returns the part of the reference, from the values of atoms."""
        return types.RefView(read(self.ref), self.transforms(read))


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What a load names, whichever primitive it is: variables and literals.

    Attributes:
      src: the part of a reference.
      given: all operands of a load of ours by their names.
    """

    src: ops.RefOperand
    given: Mapping[str, Any]

    @classmethod
    def of(cls, eqn: _jax.JaxprEqn) -> Loaded:
        """Returns what an equation names."""
        if eqn.primitive is _jax.get_p:
            steps = jax.tree.unflatten(eqn.params["tree"], eqn.invars[1:])
            return cls(ops.RefOperand.of(eqn.invars[0], steps), {})
        given = ops.unflatten(eqn.params["tree"], eqn.invars)
        return cls(given["src"], given)

    @property
    def ref(self) -> Any:
        """The variable of the reference."""
        return self.src.ref

    @property
    def mask(self) -> Any:
        """The mask; None without one."""
        return self.given.get("mask")

    @property
    def selecting(self) -> list[Any]:
        """What the values are selected by, and from."""
        found = (self.mask, self.given.get("other"))
        return [x for x in found if x is not None]


def source(eqn: _jax.JaxprEqn, made: Mapping[Any, _jax.JaxprEqn]) -> Source | None:
    """Returns what a load reads; None for elements that are neither part nor rows.

    Args:
      eqn: the load.
      made: the equation that makes a variable.
    """
    loaded = Loaded.of(eqn)
    if loaded.src.owner is not None or loaded.given.get("cta") is not None:
        return None
    if eqn.primitive is load_indexed_p:
        return _Indexed(eqn, loaded, made).source()
    steps = loaded.src.transforms
    atoms = tuple(x for x in jax.tree.leaves(steps) if _is_atom(x))
    return Source(loaded.ref, atoms, lambda read: tuple(_read_all(steps, read)))


def _is_atom(x: Any) -> bool:
    return hasattr(x, "aval")


def _read_all(tree: Any, read: Read) -> Any:
    return jax.tree.map(lambda x: read(x) if _is_atom(x) else x, tree)


def computed(x: Any) -> Any:
    """Computes an array of indices from before a loop again, where it is traced now.

    The indices of a load are then ranges that the body shows. None for an array that is
    not computed from scalars and ranges alone.
    """
    aval = jax.typeof(x)
    if isinstance(aval, _jax.AbstractRef):
        return None
    if not aval.shape:
        return x
    made = _jax.producer(x)
    if made is None or made.primitive.name not in _OF_RANGES:
        return None
    operands = [*map(computed, made.operands)]
    if any(operand is None for operand in operands):
        return None
    return made.primitive.bind(*operands, **made.params)


_OF_RANGES = ("iota", "add", "convert_element_type", "broadcast_in_dim")


# --- indices of elements --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Index:
    """The indices along an axis of a reference: a sum of scalars, and perhaps more.

    Attributes:
      terms: scalars.
      axis: that of the result along which the indices differ; None: they do not.
      rows: an array of indices along it; None: they are 0, 1, 2 and so on.
    """

    terms: tuple[Any, ...] = ()
    axis: int | None = None
    rows: Any = None

    def start(self, read: Read) -> Any:
        """Returns the sum of the scalars."""
        total: Any = 0
        for term in self.terms:
            value = read(term)
            if isinstance(total, int) and (isinstance(value, int) or total == 0):
                total = total + value if isinstance(value, int) else value
            else:
                total = total + jnp.asarray(value, total.dtype)
        return total

    def indices(self, read: Read) -> Any:
        """Returns the array of indices, of rank 1."""
        rows, start = read(self.rows), self.start(read)
        rows = lax.reshape(rows, (rows.size,)) if rows.ndim > 1 else rows
        if isinstance(start, int) and start == 0:
            return rows
        return rows + jnp.asarray(start, rows.dtype)


class _Indexed:
    """A load of elements, each with indices of its own."""

    def __init__(self, eqn: _jax.JaxprEqn, loaded: Loaded, made: Mapping[Any, Any]):
        self._eqn, self._loaded, self._made = eqn, loaded, made
        self._shape = tuple(eqn.params["shape"])
        self._base = loaded.src.window(tuple(loaded.ref.aval.shape)).shape

    def source(self) -> Source | None:
        """Returns what the load reads, or None."""
        src, params = self._loaded.src, self._eqn.params
        same = np.dtype(params["dtype"]) == src.ref.aval.dtype
        if params["view_shape"] is not None or not same:
            return None
        found = [self._index(x) for x in self._loaded.given["indices"]]
        if any(index is None for index in found):
            return None
        indices: list[_Index] = [x for x in found if x is not None]
        axes = [x.axis for x in indices if x.axis is not None]
        rows = [i for i, x in enumerate(indices) if x.rows is not None]
        leading = next((i for i, x in enumerate(indices) if x.axis is not None), None)
        if axes != [*range(len(self._shape))] or rows not in ([], [leading]):
            return None
        steps = src.transforms
        used = (x for index in indices for x in (*index.terms, index.rows))
        atoms = (*jax.tree.leaves(steps), *used)
        return Source(
            src.ref,
            tuple(x for x in atoms if _is_atom(x)),
            lambda read: (*_read_all(steps, read), *self._steps(indices, read)),
            bool(rows),
        )

    def _steps(self, indices: Sequence[_Index], read: Read) -> list[Any]:
        """Returns the steps from the window: scalars and ranges, then rows."""
        masked, first, rest = self._loaded.mask is not None, [], []
        arrays = [x for x in indices if x.rows is not None]
        for index, n in zip(indices, self._base, strict=True):
            start = index.start(read)
            if index.axis is None:
                first.append(_inside(start, n) if masked else start)
            elif index.rows is not None:
                first.append(_jax.Slice(0, n, 1))
                rows = index.indices(read)
                rest.append(jnp.clip(rows, 0, n - 1) if masked else rows)
            else:
                first.append(_jax.Slice(start, self._shape[index.axis], 1))
                rest.append(_jax.Slice(0, self._shape[index.axis], 1))
        steps = [_jax.indexer(first, (), self._base)]
        if arrays:
            sizes = [x.size for x in first if isinstance(x, _jax.Slice)]
            steps.append(_jax.indexer(rest, self._shape[:1], sizes))
        return steps

    def _index(self, x: Any) -> _Index | None:
        """Returns indices in the result's shape; None for others than ranges, rows."""
        if not _is_atom(x) or x.aval.shape == ():
            return _Index((x,))
        eqn: Any = self._made.get(x)
        if not _is_exact(x.aval.dtype):
            return _rows(x)
        match eqn and eqn.primitive.name:
            case "iota":
                return _Index((), eqn.params["dimension"])
            case "convert_element_type" if _is_exact(eqn.invars[0].aval.dtype):
                return self._index(eqn.invars[0])
            case "broadcast_in_dim":
                return self._broadcast(eqn)
            case "add":
                return _sum(*map(self._index, eqn.invars)) or _rows(x)
        return _rows(x)

    def _broadcast(self, eqn: _jax.JaxprEqn) -> _Index | None:
        operand, dims = eqn.invars[0], eqn.params["broadcast_dimensions"]
        inner = self._index(operand)
        if inner is None or inner.axis is None:
            return inner
        axis = dims[inner.axis]
        if operand.aval.shape[inner.axis] != eqn.params["shape"][axis]:
            return None
        return dataclasses.replace(inner, axis=axis)


def _is_exact(dtype: Any) -> bool:
    """Whether sums of indices are neither rounded nor wrapped, as those of uint8."""
    return np.issubdtype(dtype, np.integer) and np.dtype(dtype).itemsize >= 4


def _rows(x: Any) -> _Index | None:
    """Returns an array that differs along one axis only as indices of rows."""
    long = [axis for axis, n in enumerate(x.aval.shape) if n > 1]
    if x.aval.ndim == 1:
        long = [0]
    return _Index((), long[0], x) if len(long) == 1 else None


def _sum(a: _Index | None, b: _Index | None) -> _Index | None:
    if a is None or b is None or None not in (a.axis, b.axis):
        return None
    varying = a if b.axis is None else b
    return dataclasses.replace(varying, terms=(*a.terms, *b.terms))


def _inside(start: Any, n: int) -> Any:
    """Returns an index of what a mask excludes as one in bounds."""
    return min(max(start, 0), n - 1) if isinstance(start, int) else start.clip(0, n - 1)
