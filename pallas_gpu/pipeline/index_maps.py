# SPDX-License-Identifier: Apache-2.0
"""Index maps: from a position of a loop to the index of an array's block."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.entry import scope
from pallas_gpu.primitives.indices.facts import Axis, Fact
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import Facts
from pallas_gpu.types import values

# What Python's and NumPy's sequences raise for an index that is being traced.
_INDEXED_WITH_A_TRACER = (
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    IndexError,
)


def block_index(
    spec: Any,
    arguments: Sequence[Any],
    rank: int,
    what: str,
    names_rows: Callable[[Any], bool] = lambda entry: False,
) -> list[Any]:
    """Returns the result of a spec's index map, one index per dimension of the array.

    Of a slice (`BoundedSlice`) it returns the start. `names_rows` says of an entry of
    the block's shape whether its index is returned as it is.
    """
    index_map = spec.index_map
    if spec.block_shape is None or index_map is None:
        return [0] * rank
    index = index_map(*arguments)
    index = list(index) if isinstance(index, (tuple, list)) else [index]
    if len(index) != rank:
        raise errors.ArgumentError(
            f"BlockSpec of {what}: the index map returns the wrong number of indices",
            expected=f"{rank}, one per dimension of the array",
            got=f"{len(index)}",
            hint="return an index for squeezed dimensions too",
            where=scope.location(index_map),
        )
    with scope.locating(index_map):
        name = f"BlockSpec of {what}: an index of the index map"
        return [
            i
            if names_rows(entry)
            else values.index(_start_of_slice(i, entry, what), name)
            for i, entry in zip(index, spec.block_shape, strict=True)
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class Indexed:
    """An array of which each position of a loop has a block.

    Attributes:
      ref: reference in GMEM, or a part of one.
      spec: the array's block spec.
      grid_rank: number of the loop's axes.
      what: name of the argument for error messages.
      name: the body's name of the block.
      position: maps the loop's indices to the arguments of the index map: the grid
        indices, and the references that it reads.
    """

    ref: Any
    spec: types.BlockSpec
    grid_rank: int
    what: str
    name: str = ""
    position: Callable[..., Sequence[Any]] = lambda *indices: indices

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        return self.spec.sizes(tuple(self.ref.shape), self.what)

    @property
    def _map(self) -> Any:
        return None if self.spec.block_shape is None else self.spec.index_map

    def block_index(self, indices: Sequence[Any]) -> list[Any]:
        """Returns the index of the block at a position of the loop."""
        _ = self._facts  # the trace checks the index map, once
        return self._index_at(self.position(*indices))

    def _index_at(self, arguments: Sequence[Any]) -> list[Any]:
        return block_index(self.spec, arguments, len(self.sizes), self.what)

    # --- what is known of the index ---------------------------------------------------

    @functools.cached_property
    def _facts(self) -> list[Fact]:
        """What is known of each index of the block, from a trace of the index map."""

        def indices(*loop: Any) -> tuple[Any, ...]:
            arguments = self.position(*loop)
            if self._map is not None:
                _check_signature(self._map, arguments, self.what)
            return tuple(self._index_at(arguments))

        axes = [jax.core.ShapedArray((), jnp.int32)] * self.grid_rank
        try:
            traced, _ = _jax.trace(indices, axes)
        except _INDEXED_WITH_A_TRACER as error:
            if isinstance(error, errors.PallasGpuError):
                raise
            array = "a list or an array of NumPy, indexed with a grid index"
            raise self._closed_over(array) from None
        for var in traced.jaxpr.constvars:
            if var.aval.shape and not isinstance(var.aval, _jax.AbstractRef):
                raise self._closed_over(f"{var.aval.dtype}{list(var.aval.shape)}")
        return facts_along(traced.jaxpr)

    def _closed_over(self, array: str) -> errors.ClosureError:
        return errors.ClosureError(
            f"BlockSpec of {self.what}: the index map uses an array from the enclosing "
            "function",
            expected="an index computed from the grid indices and numbers",
            got=array,
            hint="pass it as the first argument of the call, with grid_spec="
            "plgpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, ...): the index map "
            "gets its reference after the grid indices; in a pipeline, close over the "
            "reference of an array",
            where=scope.location(self._map),
        )

    @functools.cached_property
    def axes(self) -> frozenset[int]:
        return frozenset(
            axis
            for axis in range(self.grid_rank)
            if any(fact.depends_on(loop_axis(axis)) for fact in self._facts)
        )

    def steps_along(self, axis: int) -> list[int | None]:
        """By how much each index grows along an axis of the loop, if that is known."""
        return [fact.factor(loop_axis(axis)) for fact in self._facts]

    def moves_along(self, axis: int) -> bool:
        """Whether positions that differ on an axis of the loop have other blocks.

        An index of the block is a multiple of the position there, plus what does not
        depend on it.
        """
        return any(self.steps_along(axis))

    def is_disjoint(self, sizes: Mapping[int, Any]) -> bool:
        """Whether it is certain that different positions have blocks without overlap.

        An index that is a sum of multiples of positions determines them if each
        multiple exceeds what the smaller ones add up to, like the digits of a number.
        """
        entries = self.spec.block_shape or ()
        slope = {axis: self.steps_along(axis) for axis in sizes}
        unknown = set(sizes)
        for _ in sizes:
            for d, entry in enumerate(entries):
                steps = {axis: slope[axis][d] for axis in unknown}
                reach = self.sizes[d] if isinstance(entry, types.Element) else 1
                if None not in steps.values() and _are_digits(steps, sizes, reach):
                    unknown -= {axis for axis, step in steps.items() if step}
        return not unknown


def _are_digits(steps: Mapping[int, Any], sizes: Mapping[int, Any], apart: int) -> bool:
    """Whether a sum of multiples differs by `apart` for all different positions."""
    reach: int | None = apart
    for axis, step in sorted(steps.items(), key=lambda item: abs(item[1])):
        if step:
            if reach is None or abs(step) < reach:
                return False
            size = sizes[axis]
            reach = reach + abs(step) * (size - 1) if isinstance(size, int) else None
    return True


def _start_of_slice(index: Any, entry: Any, what: str) -> Any:
    if not isinstance(entry, types.BoundedSlice):
        return index
    is_slice = isinstance(index, _jax.Slice)
    size = index.size if is_slice else None
    fits = size is None or not isinstance(size, int) or size <= entry.block_size
    if not is_slice or not fits or index.stride != 1:
        raise errors.ArgumentError(
            f"BlockSpec of {what}: the index map returns no slice for a BoundedSlice",
            expected=f"plgpu.ds(start, size) with a size of at most {entry.block_size}",
            got=f"plgpu.ds with size {size} and stride {index.stride}"
            if is_slice
            else expect.shown(index),
            hint="return plgpu.ds(start, size), or use plgpu.Element for a start alone",
        )
    return index.start


def _check_signature(
    index_map: Callable[..., Any], arguments: Sequence[Any], what: str
) -> None:
    try:
        inspect.signature(index_map).bind(*arguments)
    except TypeError as error:
        refs = sum(map(values.is_ref, arguments))
        others = f" and {refs} references" if refs else ""
        each = ", and one for each argument that num_scalar_prefetch counts"
        raise errors.ArgumentTypeError(
            f"BlockSpec of {what}: the index map cannot be called",
            expected=f"a function of {len(arguments) - refs} grid indices{others}",
            got=str(error),
            hint="define the index map with one argument per grid axis"
            + (each if refs else ""),
            where=scope.location(index_map),
        ) from None


class _Function(Facts):
    """The facts of an index map, which reads memory that nobody writes meanwhile."""

    memory_is_constant = True


def facts_along(jaxpr: _jax.Jaxpr) -> list[Fact]:
    """Returns what is known of indices along the axes of a loop, named `loop_axis`."""
    function, n = _Function(), len(jaxpr.constvars)
    region = region_of(_jax.convert_constvars_jaxpr(jaxpr))
    inputs = function.inputs_of(region)
    inputs[n:] = [
        Fact.along(Axis(loop_axis(axis))) for axis in range(len(jaxpr.invars))
    ]
    return function.run(region, inputs)


def loop_axis(axis: int) -> str:
    return f"axis {axis}"
