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
from pallas_gpu.entry import check, scope
from pallas_gpu.layouts.window import Window
from pallas_gpu.types import values

# What Python's and NumPy's sequences raise for an index that is being traced.
_INDEXED_WITH_A_TRACER = (
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    IndexError,
)


def itself(*indices: Any) -> tuple[Any, ...]:
    """The position of an index map that takes the loop's indices."""
    return indices


@dataclasses.dataclass(frozen=True)
class Stream:
    """An array that a loop over a grid accesses block by block.

    Attributes:
      ref: reference in GMEM, or a part of one.
      spec: the array's block spec.
      grid_rank: number of the loop's axes.
      what: name of the argument for error messages.
      name: the body's name of the block.
      position: maps the loop's indices to the arguments of the index map.
      direct: whether the body accesses the block in GMEM, without a copy.
    """

    ref: Any
    spec: types.BlockSpec
    grid_rank: int
    what: str
    name: str = ""
    position: Callable[..., Sequence[Any]] = itself
    direct: bool = False

    @property
    def buffered(self) -> bool:
        """Whether blocks are copied to SMEM."""
        return self.spec.memory_space is not types.GMEM and not self.direct

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Size of a block in each dimension of the array."""
        return self.spec.sizes(tuple(self.ref.shape), self.what)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of the body's reference."""
        squeezed = self.spec.squeezed(len(self.sizes))
        kept = zip(self.sizes, squeezed, strict=True)
        return tuple(size for size, gone in kept if not gone)

    # --- which block ------------------------------------------------------------------

    @functools.cached_property
    def _index_jaxpr(self) -> _jax.Jaxpr:
        scalars = [jax.core.ShapedArray((), jnp.int32)] * self.grid_rank
        return _jax.trace(lambda *i: tuple(self.block_index(i)), scalars)[0].jaxpr

    @functools.cached_property
    def axes(self) -> frozenset[int]:
        """The loop's axes that the block depends on."""
        return frozenset[int]().union(*dependencies(self._index_jaxpr))

    def follows(self, axis: int) -> bool:
        """Whether an index of the block is that of an axis of the loop, unchanged."""
        jaxpr = self._index_jaxpr
        return any(x is jaxpr.invars[axis] for x in jaxpr.outvars)

    def block_index(self, indices: Sequence[Any]) -> list[Any]:
        """Returns the index of the block at a position of the loop."""
        return block_index(
            self.spec, self.position(*indices), len(self.ref.shape), self.what
        )

    def window(self, indices: Sequence[Any]) -> types.RefView:
        """Returns the part of the array at a position of the loop."""
        shape = tuple(self.ref.shape)
        entries = self.spec.block_shape or (None,) * len(shape)
        squeezed = self.spec.squeezed(len(shape))
        steps = [
            _start(i, size, entry) if gone else _range(i, size, entry)
            for i, size, entry, gone in zip(
                self.block_index(indices), self.sizes, entries, squeezed, strict=True
            )
        ]
        base, before = self.ref, ()
        if isinstance(base, _jax.TransformedRef):
            base, before = base.ref, tuple(base.transforms)
        return types.RefView(base, (*before, _jax.indexer(steps, shape)))

    # --- its buffers ------------------------------------------------------------------

    def buffers(self, slots: int) -> types.ScratchType:
        """Returns the declaration of SMEM for a number of blocks."""
        storage = types.Storage(tuple(self.spec.transforms))
        dtype = jnp.dtype(self.ref.dtype)
        shape = (slots, *self.block_shape)
        return types.ScratchType(types.SMEM, shape, dtype, storage)

    def where_it_fits(self, indices: Sequence[Any]) -> Stream:
        """Returns the stream, `direct` if TMA cannot copy its blocks.

        Raises:
          LayoutError: TMA cannot copy a block that may exceed the array, or one with
            transforms.
        """
        if not self.buffered or 0 in self.block_shape:
            return dataclasses.replace(self, direct=self.buffered)
        problem = self._tma_problem(indices)
        if problem is None:
            return self
        shape = tuple(self.ref.shape)
        divides = all(n % s == 0 for n, s in zip(shape, self.sizes, strict=True))
        if self.spec.transforms or not divides:
            problem.what = f"{self.what}: {problem.what}"
            raise problem
        return dataclasses.replace(self, direct=True)

    def _tma_problem(self, indices: Sequence[Any]) -> errors.LayoutError | None:
        """Returns the reason why TMA cannot copy a block, None if it can."""
        view, smem = self.window(indices), self.buffers(1).to_ref()
        aval = types.base_aval(view)
        source = types.resolve(tuple(aval.shape), view.transforms)
        whole = Window.whole((1, *self.block_shape))
        one = whole.slice([0] * (len(self.block_shape) + 1), [None, *self.block_shape])
        try:
            check.check_copy(aval, source, smem, one)
        except errors.LayoutError as error:
            return error
        return None


def checked(stream: Stream, *, output: bool, multicast: bool = True) -> Stream:
    """Returns the stream if its spec has an effect.

    Args:
      stream: an input or output of a pipeline.
      output: which of the two.
      multicast: whether the pipeline supports collective axes of inputs.

    Raises:
      MemorySpaceError: blocks in another memory.
      UnsupportedError: a field of the spec that the pipeline does not use.
    """
    spec = stream.spec
    if spec.memory_space not in (None, types.SMEM, types.GMEM):
        raise errors.MemorySpaceError(
            f"BlockSpec of {stream.what}: blocks must be in SMEM or GMEM",
            expected="memory_space SMEM (default) or GMEM",
            got=f"memory_space {spec.memory_space.name}",
            hint="omit memory_space",
        )
    reason = None
    if spec.collective_axes and (output or not multicast):
        reason = "blocks are not multicast", "collective_axes"
    elif spec.collective_axes and not stream.axes:
        reason = "a block that no axis changes is not multicast", "collective_axes"
    elif output and spec.delay_release:
        reason = "the buffers of outputs are not read asynchronously", "delay_release"
    if reason is not None:
        raise errors.UnsupportedError(
            f"BlockSpec of {stream.what}: {reason[0]}",
            expected=f"a BlockSpec without {reason[1]}",
            got=f"{reason[1]}={getattr(spec, reason[1])!r}",
            hint="leave it out, or use emit_pipeline_warp_specialized"
            if not multicast and not output
            else "leave it out",
        )
    return stream


def _start(index: Any, size: int, entry: Any) -> Any:
    return index if isinstance(entry, types.Element) else index * size


def _range(index: Any, size: int, entry: Any) -> Any:
    return _jax.Slice(_start(index, size, entry), size, 1)


def block_index(
    spec: types.BlockSpec, indices: Sequence[Any], rank: int, what: str
) -> list[Any]:
    """Returns the result of a spec's index map, one index per dimension of the array.

    Raises:
      ArgumentError, ArgumentTypeError: the map has the wrong arguments or results.
      ClosureError: it uses an array from the enclosing function.
    """
    index_map = spec.index_map
    if spec.block_shape is None or index_map is None:
        return [0] * rank
    _check_signature(index_map, len(indices), what)
    _refuse_arrays(index_map, len(indices), what)
    index = index_map(*indices)
    index = list(index) if isinstance(index, tuple | list) else [index]
    with scope.locating(index_map):
        name = f"BlockSpec of {what}: an index of the index map"
        index = [values.index(i, name) for i in index]
    if len(index) != rank:
        raise errors.ArgumentError(
            f"BlockSpec of {what}: the index map returns the wrong number of indices",
            expected=f"{rank}, one per dimension of the array",
            got=f"{len(index)}",
            hint="return an index for squeezed dimensions too",
            where=scope.location(index_map),
        )
    return index


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


def _refuse_arrays(index_map: Callable[..., Any], rank: int, what: str) -> None:
    """Raises for an index map that closes over an array."""
    index = jax.core.ShapedArray((), jnp.int32)
    try:
        traced, _ = _jax.trace(index_map, [index] * rank)
    except _INDEXED_WITH_A_TRACER:
        closed_over = ["a list or an array of NumPy, indexed with a grid index"]
    else:
        avals = [v.aval for v in traced.jaxpr.constvars]
        arrays = [a for a in avals if a.shape and not isinstance(a, _jax.AbstractRef)]
        closed_over = [f"{a.dtype}{list(a.shape)}" for a in arrays]
    if closed_over:
        raise errors.ClosureError(
            f"BlockSpec of {what}: the index map uses an array from the enclosing "
            "function",
            expected="an index computed from the grid indices and numbers",
            got=closed_over[0],
            hint="pass both arrays as arguments in memory_space=plgpu.GMEM, and index "
            "one with the other in the body: `x_ref[index_ref[i]]`",
            where=scope.location(index_map),
        )


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
