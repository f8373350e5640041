# SPDX-License-Identifier: Apache-2.0
"""Looking into a running kernel: printed lines, checks, and the layouts of values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.tensor_cores import tmem
from pallas_gpu.types import formats
from pallas_gpu.types import values as value_rules

__all__ = ["debug_print", "debug_check", "print_layout"]

debug_print_p, debug_check_p = (
    registry.define(name, "debug", observable=True)
    for name in ("debug_print", "debug_check")
)
print_layout_p = registry.define("print_layout", "debug", reads=("x",))
# The primitive of `jax.debug.print`.
registry.describe(_jax.debug_print_p, "debug", observable=True)


def _printed(value: Any, what: str) -> Any:
    return value if _is_in_tmem(value) else value_rules.array(value, what)


def _is_in_tmem(value: Any) -> bool:
    aval = types.base_aval(value)
    return aval is not None and aval.memory_space is types.TMEM


@expect.arguments(args=_printed)
def debug_print(fmt: str, *args: Any) -> None:
    """Prints a line with values: one, or one for each element of the arrays among them.

    A GPU and the emulator print the same text. In the emulator it appears at once; on a
    GPU when the host next synchronizes with the device, lines of different threads in
    any order, and what exceeds CUDA's buffer of 1 MiB is lost. `jax.debug.print` in a
    kernel does the same. A kernel that prints is launched even if none of its results
    is used.

    PTX: a call of vprintf. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp. Of scalars one thread prints;
    of an array each element's thread, with its position in front: `[3, 17]: 0.5`.

    Args:
      fmt: a format string of Python with a `{}` for each value, or with the positions
        of the values, `{1} {0}`. A format may follow a colon: alignment `<` or `>`,
        sign, `0`, width, precision, and d, x, X, o, e, f or g, as in `{:8.3f}`. x and o
        show the bits of negative integers. Floats without a format have six digits.
        `{!s}` is an element of an array without its position.
      *args: scalars, and arrays of one shape: bools, integers, floats. A reference in
        TMEM is read, `ref[...]`, and printed as it lies: `lane 3, column 17, [3, 17]:
        0.5`, with `bit 16` where elements share columns. The lane is the first one of
        copies, and columns count from that of the whole array.

    Raises:
      ArgumentError: the placeholders do not match the values.
      DTypeError: a format does not suit the type of its value.
      ShapeError: two arrays have different shapes.

    Example:
      >>> plgpu.debug_print("tile {}: {:.3f}", i, jnp.max(x))
    """
    line, given = _with_places(printed_line(fmt, len(args)), args)
    require_printable(line, [jax.typeof(value) for value in given])
    ops.bind(debug_print_p, given, fmt=str(line))


def _with_places(
    line: formats.Line, args: Sequence[Any]
) -> tuple[formats.Line, tuple[jax.Array, ...]]:
    """Replaces references in TMEM by their elements, with the places in front."""
    given: list[jax.Array] = []
    # Of each argument the texts, and numbers of the values, in front of it.
    fronts: list[list[tuple[str, int]]] = []
    for value in args:
        fronts.append([])
        if _is_in_tmem(value):
            view = types.as_view(value)
            for name, number in tmem.places(view).items():
                fronts[-1].append((f"{name} ", len(given)))
                given.append(number)
            value = view.get()
        given.append(jnp.asarray(value))
    last = np.cumsum([len(front) + 1 for front in fronts]) - 1
    texts, fields = [line.texts[0]], []
    for field, after in zip(line.fields, line.texts[1:], strict=True):
        for before, number in fronts[field.value]:
            texts[-1] += before
            fields.append(formats.Field(number, bare=True))
            texts.append(", ")
        fields.append(dataclasses.replace(field, value=int(last[field.value])))
        texts.append(after)
    return formats.Line(tuple(texts), tuple(fields)), tuple(given)


def printed_line(fmt: str, count: int) -> formats.Line:
    """Returns the line of a format; raises unless it has a place for each value."""
    line = formats.line_of(fmt, count, {}, {})
    if line is None:
        raise _mismatch(fmt, count)
    return line


def _mismatch(fmt: str, count: int) -> errors.ArgumentError:
    return errors.ArgumentError(
        "debug_print: the format does not match the values",
        expected=f"{count} times {{}}, or the values' positions, such as {{0}}, each "
        "with a format of numbers or none, such as {:8.3f}",
        got=repr(fmt),
        hint="write {{ and }} for braces",
    )


def refuse_reference(value: Any) -> None:
    """Raises ArgumentTypeError for a reference, or the type of one."""
    aval = value if isinstance(value, _jax.AbstractRef) else types.base_aval(value)
    if aval is not None:
        raise errors.ArgumentTypeError(
            "debug_print: a value is a reference",
            expected="arrays and scalars",
            got=types.describe(value),
            hint="read the reference: x_ref[...]",
        )


def require_printable(line: formats.Line, avals: Sequence[Any]) -> None:
    """Raises unless the values can be printed in a format."""
    line.conversions([aval.dtype for aval in avals])
    shapes = list(dict.fromkeys(tuple(aval.shape) for aval in avals if aval.shape))
    if len(shapes) > 1:
        raise errors.ShapeError(
            "debug_print: the arrays have different shapes",
            expected=f"scalars, and arrays of one shape, e.g. {list(shapes[0])}",
            got=" and ".join(str(list(shape)) for shape in shapes),
            hint="print each of them with a debug_print of its own",
        )


def line_of(eqn: _jax.JaxprEqn) -> formats.Line:
    """Returns the line that an equation prints: ours, or one of `jax.debug.print`.

    The positions in it are those of the operands.
    """
    if eqn.primitive is debug_print_p:
        return formats.parse(eqn.params["fmt"])
    return line_of_jax(eqn.params)


def line_of_jax(params: dict[str, Any]) -> formats.Line:
    """Returns the line of `jax.debug.print`: its static values are part of the text."""
    static = dict(params["static_args"])
    leaves = range(params["in_tree"].num_leaves)
    args, named = jax.tree.unflatten(params["in_tree"], list(leaves))
    given = [*args, *named.values()]
    wrong = next((x for x in given if not isinstance(x, int)), None)
    if params["ordered"] or wrong is not None:
        raise errors.UnsupportedError(
            "jax.debug.print in a kernel: "
            + ("ordered=True" if params["ordered"] else "a value is a collection"),
            expected="ordered=False, and arrays and scalars",
            got="ordered=True" if params["ordered"] else type(wrong).__name__,
            hint="the threads of a kernel print in any order: put the position into "
            "the line, `plgpu.debug_print`"
            if params["ordered"]
            else "pass each array of it by itself",
        )
    names = dict(zip(named, range(len(args), len(given)), strict=True))
    texts = {i: static[leaf] for i, leaf in enumerate(given) if leaf in static}
    line = formats.line_of(params["fmt"], len(args), names, texts)
    if line is None:
        raise _mismatch(params["fmt"], len(given))
    dynamic = [leaf for leaf in leaves if leaf not in static]
    fields = (
        dataclasses.replace(field, value=dynamic.index(given[field.value]))
        for field in line.fields
    )
    return formats.Line(line.texts, tuple(fields))


# --- checks ---------------------------------------------------------------------------


@expect.arguments()
def debug_check(condition: Any, message: str) -> None:
    """Checks a condition while the kernel runs.

    The emulator raises an error if it does not hold. On a GPU the check is compiled
    with `CompilerParams(debug_checks=True)`, `PALLAS_GPU_DEBUG_CHECKS=1` or in
    `enable_debug_checks(True)` only: a thread prints the message with its line and
    position, and ends the launch with an error. Otherwise the kernel contains neither
    the check nor what only the check reads. A kernel with a check is launched even if
    none of its results is used.

    PTX: vprintf and trap. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp, of which one thread prints.

    Args:
      condition: a scalar bool; `jnp.all` makes one from an array.
      message: what is wrong if the condition is False.

    Raises:
      ShapeError: the condition is not a scalar bool.
      DebugCheckError: in the emulator: the condition is False.

    Example:
      >>> plgpu.debug_check(jnp.all(x >= 0), "a negative weight")
    """
    given = ops.require_scalar_bool(condition, "debug_check")
    ops.bind(debug_check_p, {"condition": given}, message=message)


@registry.checks(_jax.debug_print_p)
def _check_line(op: Any, mesh: types.Mesh) -> None:
    # JAX itself does not check its own `debug.print` for kernels.
    avals = [var.aval for var in op.equation.invars]
    for aval in avals:
        refuse_reference(aval)
    require_printable(line_of(op.equation), avals)


# --- layouts --------------------------------------------------------------------------


@expect.arguments()
def print_layout(fmt: str, x: Any) -> None:
    """Prints the layout of a value or of a reference while the kernel is compiled.

    It has no effect on the kernel. For an array that is the register layout, for a
    reference in SMEM tiling and swizzle. The emulator has no layouts, and says so.

    PTX: none. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp.

    Args:
      fmt: a format string of Python with one `{}`.
      x: an array, or a reference in SMEM, GMEM or registers.

    Raises:
      ArgumentError: the format does not have exactly one placeholder.
      MemorySpaceError: `x` is a barrier.

    Example:
      >>> plgpu.print_layout("the sum: {}", x + y)
    """
    line = formats.line_of(fmt, 1, {}, {})
    if line is None or line.fields != (formats.Field(0),):
        raise errors.ArgumentError(
            "print_layout: the format does not have one placeholder",
            expected="one {}",
            got=repr(fmt),
            hint="write {{ and }} for braces",
        )
    if types.base_aval(x) is None:
        ops.bind(
            print_layout_p, {"x": value_rules.array(x, "print_layout: x")}, fmt=fmt
        )
        return
    if types.base_aval(x).memory_space is types.BARRIERS:
        raise errors.MemorySpaceError(
            "print_layout: a barrier has no layout",
            expected="an array, or a reference in SMEM, GMEM or registers",
            got=types.describe(x),
            hint="a barrier occupies 8 bytes of SMEM",
        )
    ops.bind(print_layout_p, {"x": x}, fmt=fmt)
