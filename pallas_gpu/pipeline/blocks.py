# SPDX-License-Identifier: Apache-2.0
"""Blocks: the part of an array that a grid step accesses, and its buffers in SMEM."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, types
from pallas_gpu.entry import scope


@dataclasses.dataclass(frozen=True)
class Stream:
    """An array that a loop over a grid accesses block by block.

    Attributes:
      ref: reference in GMEM, or a part of one.
      spec: the array's block spec.
      grid_rank: number of the grid's axes.
      what: name of the argument for error messages.
    """

    ref: Any
    spec: types.BlockSpec
    grid_rank: int
    what: str

    @property
    def buffered(self) -> bool:
        """Whether blocks are copied to SMEM; otherwise the body accesses GMEM."""
        return self.spec.memory_space is not types.GMEM

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Size of a block in each dimension of the array."""
        return self.spec.sizes(tuple(self.ref.shape), self.what)

    @functools.cached_property
    def _index_jaxpr(self) -> _jax.Jaxpr:
        scalars = [jax.core.ShapedArray((), jnp.int32)] * self.grid_rank
        return _jax.trace(lambda *i: tuple(self.block_index(i)), scalars)[0].jaxpr

    @functools.cached_property
    def axes(self) -> frozenset[int]:
        """The grid axes that the block depends on."""
        return frozenset().union(*dependencies(self._index_jaxpr))

    def follows(self, axis: int) -> bool:
        """Whether an index of the block is that of a grid axis, unchanged."""
        jaxpr = self._index_jaxpr
        return any(x is jaxpr.invars[axis] for x in jaxpr.outvars)

    def buffers(self, slots: int) -> types.ScratchType:
        """Returns the declaration of SMEM for a number of blocks."""
        squeezed = self.spec.squeezed(len(self.sizes))
        kept = [s for s, gone in zip(self.sizes, squeezed, strict=True) if not gone]
        storage = types.Storage(tuple(self.spec.transforms))
        dtype = jnp.dtype(self.ref.dtype)
        return types.ScratchType(types.SMEM, (slots, *kept), dtype, storage)

    def block_index(self, indices: Sequence[Any]) -> list[Any]:
        """Returns the index of the block at a position on the grid.

        Raises:
          ArgumentError: the index map has the wrong arguments or results.
        """
        rank, index_map = len(self.ref.shape), self.spec.index_map
        if self.spec.block_shape is None or index_map is None:
            return [0] * rank
        _check_signature(index_map, len(indices), self.what)
        index = index_map(*indices)
        index = list(index) if isinstance(index, tuple | list) else [index]
        if len(index) != rank:
            raise errors.ArgumentError(
                f"BlockSpec of {self.what}: the index map returns the wrong number of "
                "indices",
                expected=f"{rank}, one per dimension of the array",
                got=f"{len(index)}",
                hint="return an index for squeezed dimensions too",
                where=scope.location(index_map),
            )
        return index

    def window(self, indices: Sequence[Any]) -> types.RefView:
        """Returns the part of the array at a position on the grid."""
        shape = tuple(self.ref.shape)
        entries = self.spec.block_shape or (None,) * len(shape)
        squeezed = self.spec.squeezed(len(shape))
        steps = [
            i if gone else _jax.Slice(_start(i, size, entry), size, 1)
            for i, size, entry, gone in zip(
                self.block_index(indices), self.sizes, entries, squeezed, strict=True
            )
        ]
        base, before = self.ref, ()
        if isinstance(base, _jax.TransformedRef):
            base, before = base.ref, tuple(base.transforms)
        return types.RefView(base, (*before, _jax.indexer(steps, shape)))


def _start(index: Any, size: int, entry: Any) -> Any:
    return index if isinstance(entry, types.Element) else index * size


def _check_signature(index_map: Callable[..., Any], rank: int, what: str) -> None:
    try:
        inspect.signature(index_map).bind(*range(rank))
    except TypeError as error:
        raise errors.ArgumentError(
            f"BlockSpec of {what}: the index map cannot be called",
            expected=f"a function of {rank} grid indices",
            got=str(error),
            hint="define the index map with one argument per grid axis",
            where=scope.location(index_map),
        ) from None


def dependencies(jaxpr: _jax.Jaxpr) -> tuple[frozenset[int], ...]:
    """Returns for each result of a jaxpr the positions of its inputs that affect it."""
    nothing: frozenset[int] = frozenset()
    known = {v: frozenset({i}) for i, v in enumerate(jaxpr.invars)}

    def of(atom: Any) -> frozenset[int]:
        return nothing if isinstance(atom, _jax.Literal) else known.get(atom, nothing)

    for eqn in jaxpr.eqns:
        affects = nothing.union(*(of(x) for x in eqn.invars))
        known.update(dict.fromkeys(eqn.outvars, affects))
    return tuple(of(x) for x in jaxpr.outvars)
