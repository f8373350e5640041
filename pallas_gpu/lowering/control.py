# SPDX-License-Identifier: Apache-2.0
"""Loops, branches and calls: JAX's control flow as scf.

Two things cross a region's border besides what JAX says: the register state that the
body may touch, and a layout for every array. A splat or an iota has no layout, so a
border needs a trial: the body is emitted once into a block that is thrown away, and the
layouts of its results decide. Only carries without a layout pay for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_gpu import _jax, errors
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import (
    KernelState,
    RuleContext,
    lower_jaxpr,
    state_keys,
)
from pallas_gpu.lowering.rules import uniform
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import scalars

# --- what crosses a border ------------------------------------------------------------


class _Border:
    """Values and register state that cross a region's border together."""

    def __init__(
        self, kernel: KernelState, keys: Sequence[Any], specs: Sequence[vals.Packed]
    ):
        self.kernel = kernel
        self.keys = list(keys)
        state = [vals.pack(kernel.state[key])[1] for key in keys]
        self.specs = [*state, *specs]

    @property
    def types(self) -> list[ir.Type]:
        """Types of the SSA values that cross."""
        return [kind for spec in self.specs for kind in spec.types]

    def pack(self, values: Sequence[Any]) -> list[ir.Value]:
        """Returns SSA values: the register state, then the values."""
        state = [self.kernel.state[key] for key in self.keys]
        ssa: list[ir.Value] = []
        for value, spec in zip([*state, *values], self.specs, strict=True):
            ssa += vals.pack(_match(value, spec))[0]
        return ssa

    def unpack(self, ssa: Sequence[ir.Value]) -> list[Any]:
        """Takes over the register state and returns the values."""
        ssa, values = list(ssa), []
        for spec in self.specs:
            values.append(spec.unpack(ssa[: spec.count]))
            del ssa[: spec.count]
        self.kernel.state.update(zip(self.keys, values, strict=False))
        return values[len(self.keys) :]


def _match(value: Any, spec: vals.Packed) -> Any:
    """Gives a value the form that a border was built for."""
    if spec.layout is None or not isinstance(value, regs.Array):
        return value
    if isinstance(value, regs.Deferred):
        return value.materialize(spec.layout)
    if value.layout != spec.layout:
        before, after = regs.describe(spec.layout), regs.describe(value.layout)
        raise errors.LayoutError(
            "an array changes its layout on the way through a loop or a branch",
            expected=before,
            got=after,
            hint=f"use layout_cast(x, {before}) on the result, or layout_cast the "
            f"initial value to {after}",
        )
    return value


@contextlib.contextmanager
def _trial(kernel: KernelState) -> Iterator[None]:
    """Emits into a block that is thrown away; the register state is restored."""
    saved = dict(kernel.state)
    top = kernel.smem_top_bytes
    region = scf.ExecuteRegionOp([])
    block = region.regions[0].blocks.append()
    try:
        with ir.InsertionPoint(block):
            yield
    finally:
        kernel.state, kernel.smem_top_bytes = saved, top
        region.operation.erase()


def _specs(values: Sequence[Any]) -> list[vals.Packed]:
    return [vals.pack(v)[1] for v in values]


def _has_no_layout(value: Any) -> bool:
    return isinstance(value, regs.Deferred) and not vals.is_scalar(value)


def _settle(
    kernel: KernelState, carry: list[Any], emit: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """Gives every carry a layout: its own, or the one that the body gives it."""
    for _ in range(len(carry) + 1):
        if not any(map(_has_no_layout, carry)):
            return carry
        with _trial(kernel):
            results = emit(carry)
            layouts = [getattr(r, "layout", None) for r in results]
        settled = [
            value.materialize(layout) if _has_no_layout(value) and layout else value
            for value, layout in zip(carry, layouts, strict=True)
        ]
        if settled == carry:
            break
        carry = settled
    return [_in_default_layout(v) if _has_no_layout(v) else v for v in carry]


def _in_default_layout(value: Any) -> Any:
    return value.materialize(regs.default_placement(value.shape, value.dtype))


def _check_carry(values: Sequence[Any], what: str) -> None:
    for value in values:
        if not isinstance(value, vals.Array):
            raise errors.UnsupportedError(
                f"{what} changes which reference it carries",
                expected="references that stay the same from step to step",
                got=type(value).__name__,
                hint="index one reference with the loop's counter",
            )


# --- rules ----------------------------------------------------------------------------


@uniform("jit")
def _jit(ctx: RuleContext, *args, jaxpr=None):
    return _call(ctx, ctx.eqn.params["jaxpr"], args)


@uniform("custom_jvp_call")
def _custom_jvp(ctx: RuleContext, *args):
    return _call(ctx, ctx.eqn.params["call_jaxpr"], args)


@uniform("custom_vjp_call")
def _custom_vjp(ctx: RuleContext, *args):
    return _call(ctx, ctx.eqn.params["call_jaxpr"], args)


def _call(ctx: RuleContext, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    consts = jaxpr.consts if isinstance(jaxpr, _jax.ClosedJaxpr) else ()
    return lower_jaxpr(ctx.kernel, _open(jaxpr), args, consts)


def _open(jaxpr: Any) -> _jax.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, _jax.ClosedJaxpr) else jaxpr


@uniform("scan")
def _scan(ctx: RuleContext, *args):
    params = ctx.eqn.params
    n_consts, _ = _jax.scan_arity(params)
    consts, carry = list(args[:n_consts]), list(args[n_consts:])
    _check_carry(carry, "a loop")
    kernel, body = ctx.kernel, _open(params["jaxpr"])
    length, unroll = params["length"], int(params["unroll"])

    def steps(values: list[Any]) -> list[Any]:
        for _ in range(unroll):
            values = lower_jaxpr(kernel, body, [*consts, *values])
        return values

    if length == unroll:
        return steps(carry)
    carry = _settle(kernel, carry, steps)
    border = _Border(kernel, state_keys(kernel, body, consts), _specs(carry))
    index = ir.IndexType.get()
    bounds = [arith.constant(index, n) for n in (0, length // unroll, 1)]
    loop = scf.ForOp(*bounds, border.pack(carry))
    with ir.InsertionPoint(loop.body):
        results = steps(border.unpack(loop.inner_iter_args))
        scf.yield_(border.pack(results))
    return border.unpack(loop.results)


@uniform("while")
def _while(ctx: RuleContext, *args):
    params = ctx.eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = args[:n_cond], args[n_cond : n_cond + n_body]
    carry = list(args[n_cond + n_body :])
    _check_carry(carry, "a while loop")
    kernel = ctx.kernel
    cond, body = _open(params["cond_jaxpr"]), _open(params["body_jaxpr"])

    def step(values: list[Any]) -> list[Any]:
        return lower_jaxpr(kernel, body, [*body_consts, *values])

    carry = _settle(kernel, carry, step)
    touched = {*state_keys(kernel, body, body_consts)}
    touched |= {*state_keys(kernel, cond, cond_consts)}
    border = _Border(kernel, [k for k in kernel.state if k in touched], _specs(carry))
    kinds = border.types
    loop = scf.WhileOp(kinds, border.pack(carry))
    before = loop.before.blocks.append(*kinds)
    after = loop.after.blocks.append(*kinds)
    with ir.InsertionPoint(before):
        values = border.unpack(before.arguments)
        (proceed,) = lower_jaxpr(kernel, cond, [*cond_consts, *values])
        scf.condition(vals.scalar_value(proceed), border.pack(values))
    with ir.InsertionPoint(after):
        scf.yield_(border.pack(step(border.unpack(after.arguments))))
    return border.unpack(loop.results)


@uniform("cond")
def _cond(ctx: RuleContext, index, *args):
    kernel = ctx.kernel
    branches = [_open(b) for b in ctx.eqn.params["branches"]]
    touched: set[Any] = set()
    for branch in branches:
        touched |= {*state_keys(kernel, branch, args)}
    specs = _branch_results(kernel, branches, args, ctx.eqn.outvars)
    border = _Border(kernel, [k for k in kernel.state if k in touched], specs)

    def emit(branch: _jax.Jaxpr) -> None:
        saved = dict(kernel.state)
        scf.yield_(border.pack(lower_jaxpr(kernel, branch, args)))
        kernel.state = saved

    choice = vals.scalar_value(index)
    results = _emit_choice(choice, branches, border.types, emit)
    return border.unpack(results)


def _emit_choice(choice, branches, kinds, emit) -> list[ir.Value]:
    """Emits an scf.if for two branches; more branches nest in its else."""
    condition, first, second = _test(choice), branches[0], branches[1:]
    if condition is not None:
        # JAX writes a truth value as an index: branch 1 is the true one.
        first, second = branches[1], branches[:1]
    else:
        zero = scalars.constant(0, np.dtype(np.int32))
        condition = arith.cmpi(arith.CmpIPredicate.sle, choice, zero)
    nothing = not kinds and len(second) == 1 and not second[0].eqns
    op = scf.IfOp(condition, kinds, has_else=not nothing)
    with ir.InsertionPoint(op.then_block):
        emit(first)
    if nothing:
        return []
    with ir.InsertionPoint(op.else_block):
        if len(second) == 1:
            emit(second[0])
        else:
            one = scalars.constant(1, np.dtype(np.int32))
            rest = arith.subi(choice, one)
            scf.yield_(_emit_choice(rest, second, kinds, emit))
    return list(op.results)


def _test(choice: ir.Value) -> ir.Value | None:
    """Returns the truth value that an index was made of."""
    owner = choice.owner
    if isinstance(owner, ir.Operation | ir.OpView) and (
        owner.operation.name == "arith.extui"
    ):
        source = owner.operation.operands[0]
        if source.type == ir.IntegerType.get_signless(1):
            return source
    return None


def _branch_results(kernel, branches, args, outvars) -> list[vals.Packed]:
    """Returns how each result crosses; an array has the layout a branch gives it."""
    dtypes = [vals.numpy_dtype(v.aval) for v in outvars]
    shapes = [v.aval.shape or None for v in outvars]
    if kernel.infers_layouts or not any(shapes):
        return [vals.Packed(d, shape=s) for d, s in zip(dtypes, shapes, strict=True)]
    chosen: list[Any] = [None] * len(outvars)
    for branch in branches:
        with _trial(kernel):
            results = lower_jaxpr(kernel, branch, args)
            _check_carry(results, "a branch")
            layouts = [getattr(r, "layout", None) for r in results]
        chosen = [a or b for a, b in zip(chosen, layouts, strict=True)]
    return [
        vals.Packed(d, layout=s and (layout or regs.default_placement(s, d)))
        for d, s, layout in zip(dtypes, shapes, chosen, strict=True)
    ]
