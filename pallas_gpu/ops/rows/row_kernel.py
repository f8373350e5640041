# SPDX-License-Identifier: Apache-2.0
"""Kernels that reduce each row, and apply what they found to its elements."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.rows import rows
from pallas_gpu.ops.rows.rows import Launch, Rows
from pallas_gpu.ops.rules import Interpret, Positive, array, check_array

# Columns of one array that the registers of a warpgroup hold.
MOST_COLUMNS = 16384


@dataclasses.dataclass(frozen=True)
class Row:
    """What a warpgroup has of its rows: some whole rows, or a part of one.

    Attributes:
      elements: of each array, float32.
      axis: of the elements, along which those of a row are.
      columns: loads the same columns of an array that all rows share.
    """

    elements: tuple[jax.Array, ...]
    axis: int
    columns: Callable[[int], jax.Array]

    def column(self, i: int) -> jax.Array:
        """Returns what the i-th array that all rows share has for each element."""
        x, shape = self.columns(i).astype(jnp.float32), self.elements[0].shape
        return x if len(shape) == 1 else lax.broadcast_in_dim(x, shape, (1,))

    def sum(self, x: jax.Array) -> jax.Array:
        return jnp.sum(x, self.axis)

    def max(self, x: jax.Array) -> jax.Array:
        return jnp.max(x, self.axis)

    def spread(self, number: Any) -> Any:
        """Returns a number of each row for each element."""
        x = self.elements[0]
        if not jnp.ndim(number) or x.ndim == 1:
            return number
        return lax.broadcast_in_dim(number, x.shape, (1 - self.axis % 2,))


@expect.arguments()
@dataclasses.dataclass(frozen=True)
class Reduction:
    """A reduction of rows.

    Attributes:
      initial: a number, or a pytree of them.
      step: `step(carry, row, *found)` returns the carry with the elements of a row, see
        `row_kernel`, added. It is called once with whole rows, or for each part of a
        row in order. `found` has the results of the reductions before.
      finish: `finish(carry, size)` returns the result from the last carry and the
        number of columns; default: the carry.
    """

    initial: Any
    step: Callable[..., Any]
    finish: Callable[[Any, int], Any] = lambda carry, size: carry


def _reductions(value: Any, what: str) -> tuple[Reduction, ...]:
    if expect.is_sequence(value) and all(isinstance(x, Reduction) for x in value):
        return tuple(value)
    expected = "a sequence of ops.Reduction"
    raise expect.wrong_type(what, expected, expected, value, "[ops.Reduction(0.0, f)]")


@expect.arguments(reduce=_reductions)
def row_kernel(
    reduce: Sequence[Reduction],
    apply: Callable[..., Any],
    *,
    out_dtype: Any = None,
    name: str = "row_kernel",
    return_reductions: bool = False,
    most_columns: Positive = MOST_COLUMNS,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> Callable[..., Any]:
    """Makes a kernel that reduces each row, and applies the results to its elements.

    Short rows are read once: several of them are in the registers of a warpgroup. Of
    rows with more than `most_columns` a warpgroup reads part by part, once for each
    reduction and once for `apply`. `softmax`, `layer_norm`, `rms_norm` and their
    derivatives are made by it.

    Since: sm_90a. Issued by: the host; the kernel composes with `jax.jit` and
    `jax.vmap`. It has no derivative: `jax.custom_vjp` gives it one.

    Args:
      reduce: the reductions, in order.
      apply: `apply(row, *found)` returns the elements of the result, or of a tuple of
        results, from a row and the results of all reductions. A row, or several, or a
        part of one, has `row.elements`, a tuple of the arrays' elements in float32,
        `row.column(i)`, those of an array that all rows share, `row.sum(x)` and
        `row.max(x)`, a number for each row, and `row.spread(number)`, such a number for
        each element.
      out_dtype: type of the result; a tuple of types if there are several. Default: the
        type of the first array.
      name: of the kernel.
      return_reductions: the results of the reductions, float32 of each row, are
        returned, too, as a list.
      most_columns: how many columns the registers hold; fewer for several arrays, but
        not fewer than the 4096 of a part.
      compiler_params, interpret: see `softmax`.

    Returns:
      A function of arrays (..., columns) of float32, float16 or bfloat16, with the
      option `columns`: arrays (columns,) that all rows share. It returns an array of
      the shape of the first one, or a tuple of them.

    Raises:
      ArgumentTypeError: a function does not take what it is called with.
      ShapeError, DTypeError: when the function is called: arrays that do not match, or
          other types; a step that does not return a number for each row.
      ArgumentError: when the function is called: no array, another carry than that of
          `initial`, or other results than those of `out_dtype`.

    Example:
      >>> def largest(top, row):
      ...     return jnp.maximum(top, row.max(jnp.abs(row.elements[0])))
      >>> def scaled(row, top):
      ...     return row.elements[0] / row.spread(top)
      >>> y = ops.row_kernel([ops.Reduction(0.0, largest)], scaled)(x)
    """
    for i, one in enumerate(reduce):
        _takes(f"{name}: step of reduction {i}", one.step, "carry, row", i)
        _takes(f"{name}: finish of reduction {i}", one.finish, "carry, size", 0)
    _takes(f"{name}: apply", apply, "row", len(reduce))

    @expect.arguments(name)
    def kernel(*arrays: Any, columns: Sequence[Any] = ()) -> Any:
        if not arrays:
            raise errors.ArgumentError(
                f"{name}: there is no array",
                expected="one array or more",
                got="none",
                hint="pass the arrays whose rows are reduced",
            )
        given = [array(x, f"argument {i}") for i, x in enumerate(arrays)]
        shared = [array(x, f"columns[{i}]") for i, x in enumerate(columns)]
        _check(name, given, shared)
        several = isinstance(out_dtype, tuple)
        dtypes = out_dtype if several else (out_dtype or given[0].dtype,)
        results, found = call(
            *(Rows(given[0].shape), reduce, apply, given, dtypes),
            Launch(name, rows.params(compiler_params, given[0].dtype), interpret),
            shared=shared,
            most_columns=most_columns,
            return_reductions=return_reductions,
        )
        out = tuple(results) if several else results[0]
        return (out, found) if return_reductions else out

    return kernel


def _takes(what: str, f: Callable[..., Any], names: str, found: int) -> None:
    """Checks that a function has parameters for names, and for reductions before it."""
    given = [*names.split(", "), *(f"found_{i}" for i in range(found))]
    expect.takes(f, what, given, f"it is called with ({', '.join(given)})")


def _check(name: str, arrays: Sequence[Any], shared: Sequence[Any]) -> None:
    named = {f"argument {i}": x for i, x in enumerate(arrays)}
    wanted = dict.fromkeys(named, arrays[0].shape)
    of_columns = {f"columns[{i}]": x for i, x in enumerate(shared)}
    wanted |= dict.fromkeys(of_columns, arrays[0].shape[-1:])
    rows.check(name, **named, **of_columns)
    for which, x in (named | of_columns).items():
        each = "jnp.broadcast_to gives arrays the shape of the first one"
        check_array(name, which, x, [wanted[which]], each)


def call(
    r: Rows,
    reduce: Sequence[Reduction],
    apply: Callable[..., Any],
    arrays: Sequence[jax.Array],
    dtypes: Sequence[Any],
    launch: Launch,
    *,
    shared: Sequence[jax.Array] = (),
    most_columns: int = MOST_COLUMNS,
    return_reductions: bool = False,
) -> tuple[list[jax.Array], list[Any]]:
    """Returns the results, and those of the reductions if they are asked for."""
    initial = [one.initial for one in reduce] if return_reductions else []
    kept, tree = jax.tree.flatten(initial)
    whole = r.columns <= max(most_columns, rows.BLOCK)

    def body(*refs: Any) -> None:
        inputs, outputs = refs[: len(arrays)], refs[len(arrays) + len(shared) :]
        columns = refs[len(arrays) : len(arrays) + len(shared)]
        found: list[Any] = []

        def part(start: Any, size: int) -> tuple[Row, Any]:
            at = ... if whole else plgpu.ds(start, size)
            place = at if whole else (0, at)
            elements = tuple(ref[place].astype(jnp.float32) for ref in inputs)
            axis = r.axis if whole else -1
            return Row(elements, axis, lambda i: columns[i][at]), place

        # Whole rows are loaded once.
        part = functools.cache(part) if whole else part

        def over_parts(step: Callable[[Row, Any, Any], Any], carry: Any) -> Any:
            if whole:
                return step(*part(0, r.columns), carry)
            numbers = jax.tree.map(jnp.float32, carry)
            return r.over_parts(lambda i, n, carry: step(*part(i, n), carry), numbers)

        for one in reduce:

            def add(row: Row, place: Any, carry: Any, one=one, seen=(*found,)) -> Any:
                return _carry(one, one.step(carry, row, *seen), row)

            found.append(one.finish(over_parts(add, one.initial), r.columns))

        def write(row: Row, place: Any, carry: Any) -> Any:
            _write(apply(row, *found), outputs[: len(dtypes)], place)
            return carry

        over_parts(write, 0)
        numbers = outputs[len(dtypes) :]
        for ref, number in zip(numbers, jax.tree.leaves(found), strict=False):
            ref[slice(None) if whole else 0, 0] = number

    out = [*((r.columns, d) for d in dtypes), *[(1, jnp.float32)] * len(kept)]
    results = r.call(body, arrays, out, launch, shared)
    found = [x[..., 0] for x in results[len(dtypes) :]]
    return results[: len(dtypes)], jax.tree.unflatten(tree, found)


def _carry(one: Reduction, carry: Any, row: Row) -> Any:
    """Returns what a step returns, if it is a number for each row."""
    elements = jax.typeof(row.elements[0]).shape
    wanted = tuple(np.delete(elements, row.axis).tolist())
    leaves, tree = jax.tree.flatten(carry)
    if tree != jax.tree.structure(one.initial):
        raise errors.ArgumentError(
            "Reduction.step does not return a carry as `initial`",
            expected=jax.tree.structure(one.initial),
            got=tree,
            hint="return the carry with the elements of the row added",
        )
    for x in leaves:
        if jnp.shape(x) != wanted and not isinstance(x, (int, float)):
            raise errors.ShapeError(
                "Reduction.step does not return a number for each row",
                expected=f"shape {wanted}, of elements of shape {elements}",
                got=f"shape {jnp.shape(x)}",
                hint="row.sum and row.max reduce the elements of each row",
            )
    return carry


def _write(values: Any, refs: Any, at: Any) -> None:
    values = values if isinstance(values, tuple) else (values,)
    if len(values) != len(refs) or any(x is None for x in values):
        raise errors.ArgumentError(
            "row_kernel: apply does not return what out_dtype declares",
            expected=f"the elements of {len(refs)} result{'s' * (len(refs) > 1)}",
            got=", ".join(map(expect.shown, values)) or "an empty tuple",
            hint="out_dtype=(jnp.float32, jnp.float32) declares two results",
        )
    for ref, value in zip(refs, values, strict=True):
        ref[at] = value.astype(ref.dtype)
