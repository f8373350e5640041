# SPDX-License-Identifier: Apache-2.0
"""References to the memories of a SparseCore, and rows of them that indices name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, expect
from pallas_gpu.types import values
from pallas_gpu.types.indexing import steps as index_steps
from pallas_gpu.types.refs import KernelRef, base_aval, describe
from pallas_gpu.types.spaces.resource import Storage


def _ignored(value: Any, what: str) -> int | None:
    return None if value is None else expect.integer(-(2**31), 2**31 - 1)(value, what)


@expect.arguments(values=expect.anything, ignored_value=_ignored)
@dataclasses.dataclass(frozen=True)
class Indices:
    """Indices of a gather or a scatter: `table_ref.at[plsc.Indices(rows, -1)]`.

    Attributes:
      values: a reference to int32 indices in VMEM, of shape (n,), or a vector of them.
      ignored_value: rows whose index has this value are not transferred; None: all are.

    Raises:
      ArgumentTypeError: `ignored_value` is not a static integer.
    """

    values: Any
    ignored_value: int | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NamedRows:
    """Selects the rows of a reference that indices name: the last step of a view.

    Attributes:
      values: a reference to indices, or a vector of them.
      ignored_value: the index of rows that are not transferred, or None.
    """

    values: Any
    ignored_value: int | None = dataclasses.field(metadata={"static": True})

    def typed(self, shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], Any]:
        """Returns the shape and dtype of what it selects of an array."""
        return (*self.values.shape, *shape[1:]), dtype


def _tiling(value: Any, what: str) -> Any:
    """Accepts a name, and upstream's `Tiling`."""
    name = getattr(value, "name", value)
    return _NAMES(
        name.lower().replace("_", "") if isinstance(name, str) else name, what
    )


_NAMES = expect.choice("compact", "sparsecore", hint="plsc.CompilerParams has both")
TilingName = Annotated[Literal["compact", "sparsecore"], _tiling]


@dataclasses.dataclass(frozen=True)
class TiledStorage(Storage):
    """How an array is stored whose tiling is its own, not that of the kernel.

    Attributes:
      tiling: as of `CompilerParams`.
    """

    tiling: str = ""

    def __str__(self) -> str:
        return f"{self.tiling} tiling"


class SparseCoreRef(KernelRef):
    """A reference to an array in HBM, VMEM, VMEM_SHARED or SMEM."""

    __slots__ = ()

    @property
    def tiling(self) -> str | None:
        """Its own tiling; None for that of the kernel."""
        return getattr(self.storage, "tiling", None)

    def index_steps(self, index: Any, shape: Sequence[int]) -> tuple[Any, ...]:
        """Returns an index expression as steps; indices of rows are the last one."""
        entries = index if isinstance(index, tuple) else (index,)
        named = [i for i, entry in enumerate(entries) if _names_rows(entry)]
        if not named:
            return index_steps(index, shape)
        if named != [0]:
            raise errors.UnsupportedError(
                "indices of a dimension that is not the first one",
                expected="ref.at[indices], or ref.at[indices, start:stop]",
                got=f"indices of dimension {named[-1]} of shape {tuple(shape)}",
                hint="a copy moves whole rows: transpose the array before the call; "
                "single elements of VMEM are accessed by plsc.load_gather",
            )
        given = entries[0]
        given = given if isinstance(given, Indices) else Indices(given)
        _require_indices(given.values)
        rest = entries[1:]
        window = index_steps((slice(None), *rest), shape) if rest else ()
        return (*window, NamedRows(given.values, given.ignored_value))


def _names_rows(entry: Any) -> bool:
    if isinstance(entry, (Indices, _jax.TransformedRef)):
        return True
    if not _jax.is_tracer(entry):
        return False
    aval = values.abstract(entry)
    return isinstance(aval, _jax.AbstractRef) or bool(getattr(aval, "shape", ()))


def _require_indices(indices: Any) -> None:
    ref = base_aval(indices)
    shape, dtype = getattr(indices, "shape", ()), getattr(indices, "dtype", None)
    if len(shape) == 1 and dtype == jnp.int32:
        return
    raise errors.DTypeError(
        "the indices of rows are not a vector of int32",
        expected="a reference of shape (n,) to int32 in VMEM, or a vector of int32",
        got=describe(indices) if ref is not None else expect.shown(indices),
        hint="convert the indices before the call: rows.astype(jnp.int32)",
    )
