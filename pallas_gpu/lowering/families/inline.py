# SPDX-License-Identifier: Apache-2.0
"""Inline code is emitted in its place, with handles of what it is given; inline PTX."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from typing import Any

import jax
import jaxlib
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _mlir
from jaxlib.mlir.dialects import arith

from pallas_gpu import errors, types
from pallas_gpu.emitters import elementwise
from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.emitters.elements import inline as asm
from pallas_gpu.entry import scope
from pallas_gpu.layouts import WGSplatLayout, to_layout
from pallas_gpu.layouts.registers.placement import describe, place
from pallas_gpu.lowering import parities
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.elementwise import wide
from pallas_gpu.lowering.inference.collect import Memory, Node
from pallas_gpu.lowering.references import I32, Reference, add_indices
from pallas_gpu.lowering.rules import emits, emits_and_relates, relates
from pallas_gpu.primitives import inline
from pallas_gpu.program.nodes import Access


@emits(inline.inline_mgpu_p)
def _inline(ctx: RuleContext, *invals: Any, code: Any) -> list[Any]:
    handles = inline.handles()
    operands = [x["operand"] for x in ctx.operands(invals)]
    ordered = code.synchronized and any(_may_be_written(ctx, x) for x in operands)
    with ctx.in_order() if ordered else contextlib.nullcontext():
        given = [_given(ctx, code, handles, i, x) for i, x in enumerate(operands)]
        args = jax.tree.unflatten(code.given_tree, given)
        context = handles.context(ctx.kernel.recorder)
        try:
            with _authors_lines(ctx):
                made = code.emit(context, *args)
        except errors.PallasGpuError as error:
            raise error.with_location(scope.raised_at(error)) from None
        except (AttributeError, TypeError) as error:
            _require_arguments(code, error)
            raise
        for x, handle in zip(operands, given, strict=True):
            if isinstance(x, Reference) and isinstance(x.handle, vals.BarrierHandle):
                _count_waits(ctx, x, handles.parities(handle))
        return _made(code, handles, made)


def _authors_lines(ctx: RuleContext) -> contextlib.AbstractContextManager[None]:
    """Operations get the lines of the author's code, if they carry any."""
    if not ctx.kernel.keeps_lines:
        return contextlib.nullcontext()
    _leave_out()
    return ir.loc_tracebacks(max_depth=1)


@functools.cache
def _leave_out() -> None:
    """Excludes what the author's code calls from the lines of operations."""
    for folder in (jax, jaxlib, errors):
        path = os.path.join(os.path.dirname(str(folder.__file__)), "")
        _mlir.globals.register_traceback_file_exclusion(path)
    _mlir.globals.register_traceback_file_exclusion(contextlib.__file__)


def _require_arguments(code: Any, error: Exception) -> None:
    """Raises KernelError for code that has failed, and captures arrays."""
    if names := code.captured():
        raise errors.KernelError(
            f"{code.name}: the function fails, and captures what has no handle in it",
            expected="arrays and references as arguments; scalars may be captured",
            got=f"{', '.join(names)} of the kernel, and {type(error).__name__}",
            hint="pass it: add its type to arg_types, and a parameter",
            where=scope.raised_at(error),
        ) from error


def _may_be_written(ctx: RuleContext, x: Any) -> bool:
    """Whether an operand is memory, and not an input of the kernel."""
    handle = getattr(x, "handle", None)
    if isinstance(handle, vals.GmemHandle):
        return handle.buffer_index >= ctx.kernel.params.num_inputs
    return handle is not None


def _given(ctx: RuleContext, code: Any, handles: Any, i: int, x: Any) -> Any:
    """Returns the handle of an operand."""
    if isinstance(x, Reference):
        if not isinstance(x.handle, vals.BarrierHandle):
            return handles.memref(ctx.view(x))
        return _barriers(ctx, handles, x)
    if not x.shape:
        return handles.array(x)
    placement = place(code.given[i], x.shape)
    if isinstance(placement, WGSplatLayout):
        if isinstance(x, regs.Splat):
            return handles.array(x)
        raise errors.LayoutError(
            f"{code.name}: argument {i} is declared as a splat",
            expected="a scalar broadcast to a shape",
            got=f"an array of shape {x.shape} whose elements may differ",
            hint="declare the layout in which the code handles it",
        )
    x = ctx.operand(x, i)
    if isinstance(x, regs.Deferred):
        x = regs.placed(x, placement)
    if x.layout != placement:
        name = describe(placement)
        raise errors.LayoutError(
            f"{code.name}: argument {i} is in another layout than declared",
            expected=name,
            got=describe(x.layout),
            hint="convert it: plgpu.layout_cast"
            + (f"(x, plgpu.{name})" if name.startswith("Layout.") else ""),
        )
    return handles.array(x, to_layout(code.given[i]))


def _barriers(ctx: RuleContext, handles: Any, x: Reference) -> Any:
    barrier, groups, leader_tracked = x.handle.barrier, None, False
    if isinstance(barrier, types.ClusterBarrier):
        groups = [ctx.group(axes) for axes in barrier.groups]
        leader_tracked = barrier.leader_tracked
    count = math.prod(x.window.sizes)
    return handles.barriers(
        ctx.view(x), count, _parities(ctx, x), groups, leader_tracked
    )


def _numbers(x: Reference) -> list[Any]:
    """Returns the index of each barrier of an operand in its declaration."""
    return [add_indices(x.element(), i) for i in range(math.prod(x.window.sizes))]


def _only_word(x: Reference) -> Any:
    """The word of which an operand's parities are the lowest bits; None without one."""
    keys = x.handle.keys
    return keys[0] if len(keys) == 1 and _numbers(x)[0] == 0 else None


def _parities(ctx: RuleContext, x: Reference) -> ir.Value:
    """Returns the parities of an operand's barriers, a bit for each."""
    if (key := _only_word(x)) is not None:
        return vals.scalar_value(ctx.kernel.state[key])
    bits = ctx.builder.i32(0)
    for i, number in enumerate(_numbers(x)):
        parity = parities.parity(ctx.kernel, x.handle, number)
        bits = arith.ori(bits, arith.shli(parity, ctx.builder.i32(i)))
    return bits


def _count_waits(ctx: RuleContext, x: Reference, bits: ir.Value) -> None:
    """Takes the parities over that code leaves of an operand's barriers."""
    if (key := _only_word(x)) is not None:
        ctx.kernel.state[key] = elementwise.scalar(bits, I32)
        return
    changed = arith.xori(bits, _parities(ctx, x))
    for i, number in enumerate(_numbers(x)):
        bit = arith.andi(arith.shrui(changed, ctx.builder.i32(i)), ctx.builder.i32(1))
        flipped = arith.cmpi(arith.CmpIPredicate.ne, bit, ctx.builder.i32(0))
        parities.flip(ctx.kernel, x.handle, number, where=flipped)


@relates(inline.inline_mgpu_p)
def _relate(node: Node, *_: Any, code: Any) -> list[Any]:
    """Arrays have the layouts that are declared, those in SMEM the transforms."""
    for i, named in enumerate(node.operands):
        _relate_operand(node, i, named["operand"], code)
    return [
        _related_result(node, i, code.made[i], x) for i, x in enumerate(node.op.results)
    ]


def _relate_operand(node: Node, i: int, x: Any, code: Any) -> None:
    if isinstance(x, Access):
        memory = node.reference(x)
        if isinstance(memory, Memory) and memory.space is types.SMEM:
            declared = code.transforms(i)
            stored = types.smem_layout(memory.shape, memory.dtype, declared)
            node.use(node.part(x), "pointer", stored=stored)
        elif isinstance(memory, Memory) and memory.space is types.TMEM:
            node.network.array(node.part(x))
        return
    placement = place(code.given[i], x.shape) if x.shape else None
    if placement is not None and not isinstance(placement, WGSplatLayout):
        role = f"argument {i}"
        node.take(x, node.variable(x, role=role, fixed=placement), i)


def _related_result(node: Node, i: int, made: Any, x: Any) -> Any:
    if not made.shape:
        return node.scalar(x, i)
    placement = place(made.layout, made.shape)
    if isinstance(placement, WGSplatLayout):
        return node.defer("splat", x, i)
    return node.make(node.variable(x, role=f"result {i}", fixed=placement), x, i)


# --- results --------------------------------------------------------------------------


def _made(code: Any, handles: Any, returned: Any) -> list[Any]:
    """Returns the results as values of the kernel."""
    leaves = code.leaves(returned, "the function", is_leaf=handles.is_array)
    pairs = zip(leaves, code.made, strict=True)
    return [_result(code, handles, i, x, t) for i, (x, t) in enumerate(pairs)]


def _result(code: Any, handles: Any, i: int, returned: Any, made: Any) -> Any:
    what, dtype = f"{code.name}: result {i}", dtypes.np.dtype(made.dtype)
    x = handles.registers(returned, dtype)
    if x is None:
        raise errors.ArgumentTypeError(
            f"{what} is not an array in registers",
            expected="a mosaic.FragmentedArray",
            got=f"{type(returned).__module__}.{type(returned).__qualname__}",
            hint="load a reference, or build an array with FragmentedArray.splat; the "
            "class is that of this package",
        )
    if tuple(x.shape) != made.shape:
        raise errors.ShapeError(
            f"{what} has another shape than declared",
            expected=f"shape {made.shape}",
            got=f"shape {tuple(x.shape)}",
            hint="return_type is what the function returns",
        )
    if dtypes.mlir_type(x.dtype) != dtypes.mlir_type(dtype):
        raise errors.DTypeError(
            f"{what} has another element type than declared",
            expected=dtype.name,
            got=str(dtypes.mlir_type(x.dtype)),
            hint="convert it in the function: x.astype(...)",
        )
    layout = place(made.layout, made.shape) if made.shape else WGSplatLayout(())
    actual = WGSplatLayout(made.shape) if isinstance(x, regs.Splat) else x.layout
    if isinstance(layout, WGSplatLayout) != isinstance(x, regs.Splat) or (
        isinstance(x, regs.RegisterArray) and x.layout != layout
    ):
        raise errors.LayoutError(
            f"{what} has another layout than declared",
            expected=_text(layout),
            got=_text(actual),
            hint="convert it in the function: x.to_layout(...)",
        )
    if isinstance(x, regs.Splat):
        return regs.Splat(x.value, dtype, made.shape)
    return x.with_values(x.values, dtype)


def _text(layout: Any) -> str:
    return "WG_SPLAT" if isinstance(layout, WGSplatLayout) else describe(layout)


# --- inline PTX -----------------------------------------------------------------------


@emits_and_relates(inline.inline_ptx_p)
def _ptx(on: RuleContext | Node, *operands: Any, shape: tuple[int, ...]) -> list[Any]:
    """All arrays have one layout."""
    if isinstance(on, Node):
        if not shape:
            return [on.scalar(x, i) for i, x in enumerate(on.op.results)]
        same = [wide(on, i, x, shape) for i, x in enumerate(operands)]
        arrays = [(i, x) for i, x in enumerate(same) if x.shape]
        variable = on.variable(arrays[0][1])
        for i, x in arrays:
            on.take(x, variable, i)
        return [on.make(variable, x, i) for i, x in enumerate(on.op.results)]
    params = on.op.params
    made = [dtypes.np.dtype(x) for x in params["dtypes"]]
    elements, layout = _elements(on, operands, shape)
    columns = asm.assemble(
        params["template"], elements, made, params["pack"], volatile=not params["pure"]
    )
    if layout is None:
        return [regs.Splat(x, t) for (x,), t in zip(columns, made, strict=True)]
    n = layout.vector_length
    return [
        regs.RegisterArray(
            tuple(dtypes.pack(x[i : i + n]) for i in range(0, len(x), n)), layout, t
        )
        for x, t in zip(columns, made, strict=True)
    ]


def _elements(
    ctx: RuleContext, operands: Any, shape: tuple[int, ...]
) -> tuple[list[list[Any]], Any]:
    """Returns the elements of a thread, of each operand, and the layout of arrays."""
    if not shape:
        return [[vals.scalar_value(x)] for x in operands], None
    alike = ctx.kernel.layouts.alike(
        ctx, [wide(ctx, i, x, shape) for i, x in enumerate(operands)]
    )
    arrays = [x for x in alike if isinstance(x, regs.RegisterArray)]
    what = "inline_ptx: the operands"
    layout = elementwise.common_layout(arrays or [ctx.placed(alike[0])], what)
    columns = (
        x if isinstance(x, regs.RegisterArray) else x.materialize(layout) for x in alike
    )
    return [[e for v in x.values for e in dtypes.elements(v)] for x in columns], layout
