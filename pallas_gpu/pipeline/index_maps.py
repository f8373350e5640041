# SPDX-License-Identifier: Apache-2.0
"""Index maps: from a position of a grid to the index of a block."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
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
    index = list(index) if isinstance(index, tuple | list) else [index]
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


def index_jaxpr(
    spec: types.BlockSpec,
    position: Callable[..., Sequence[Any]],
    grid_rank: int,
    rank: int,
    what: str,
) -> _jax.Jaxpr:
    """Traces the index of a block as a function of the position of a loop."""
    index_map = spec.index_map if spec.block_shape is not None else None

    def indices(*loop: Any) -> tuple[Any, ...]:
        arguments = position(*loop)
        if index_map is not None:
            _check_signature(index_map, arguments, what)
        return tuple(block_index(spec, arguments, rank, what))

    try:
        traced, _ = _jax.trace(
            indices, [jax.core.ShapedArray((), jnp.int32)] * grid_rank
        )
    except _INDEXED_WITH_A_TRACER as error:
        if isinstance(error, errors.PallasGpuError):
            raise
        array = "a list or an array of NumPy, indexed with a grid index"
        raise _closed_over(index_map, array, what) from None
    for var in traced.jaxpr.constvars:
        if var.aval.shape and not isinstance(var.aval, _jax.AbstractRef):
            array = f"{var.aval.dtype}{list(var.aval.shape)}"
            raise _closed_over(index_map, array, what)
    return traced.jaxpr


def _closed_over(index_map: Any, array: str, what: str) -> errors.ClosureError:
    return errors.ClosureError(
        f"BlockSpec of {what}: the index map uses an array from the enclosing function",
        expected="an index computed from the grid indices and numbers",
        got=array,
        hint="pass it as the first argument of the call, with grid_spec="
        "plgpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, ...): the index map "
        "gets its reference after the grid indices; in a pipeline, close over the "
        "reference of an array",
        where=scope.location(index_map),
    )


def _start_of_slice(index: Any, entry: Any, what: str) -> Any:
    """Returns the start of the slice that an index map returns for a BoundedSlice."""
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


def _is_ref(x: Any) -> bool:
    return isinstance(types.base_aval(x), _jax.AbstractRef)


def _check_signature(
    index_map: Callable[..., Any], arguments: Sequence[Any], what: str
) -> None:
    try:
        inspect.signature(index_map).bind(*arguments)
    except TypeError as error:
        refs = sum(map(_is_ref, arguments))
        expected = f"a function of {len(arguments) - refs} grid indices"
        raise errors.ArgumentTypeError(
            f"BlockSpec of {what}: the index map cannot be called",
            expected=expected + (f" and {refs} references" if refs else ""),
            got=str(error),
            hint="define the index map with one argument per grid axis, and one for "
            "each argument that num_scalar_prefetch counts"
            if refs
            else "define the index map with one argument per grid axis",
            where=scope.location(index_map),
        ) from None


class _Function(Facts):
    """The facts of an index map, which reads memory that nobody writes meanwhile."""

    memory_is_constant = True


def facts_along(jaxpr: _jax.Jaxpr) -> list[Fact]:
    """Returns what is known of indices along the axes of a loop.

    The axes are named by `loop_axis`.
    """
    function, n = _Function(), len(jaxpr.constvars)
    region = region_of(_jax.convert_constvars_jaxpr(jaxpr))
    inputs = function.inputs_of(region)
    inputs[n:] = [
        Fact.along(Axis(loop_axis(axis))) for axis in range(len(jaxpr.invars))
    ]
    return function.run(region, inputs)


def loop_axis(axis: int) -> str:
    """Returns the name of an axis of a pipeline's loop in facts."""
    return f"axis {axis}"
