# SPDX-License-Identifier: Apache-2.0
"""Loops, branches and calls: JAX's control flow as scf.

Two things cross a region's border besides what JAX says: the register state that the
body may touch, and a layout for every array. A splat or an iota has no layout, so a
border needs a trial: the body is emitted once into a block that is thrown away, and the
layouts of its results decide. Only carries without a layout pay for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from pallas_gpu.lowering.expansion.walk import Expansion, expand_block, is_array
from pallas_gpu.lowering.inference.constraints import collect_block, is_vector
from pallas_gpu.lowering.inference.network import Network, Variable
from pallas_gpu.lowering.rules import expands, infers, uniform
from pallas_gpu.mosaic import logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import scalars

# A loop counts as this many runs of its body if it has more, or nobody knows; loops
# inside of each other as the product, up to a limit that keeps sums of costs small.
MAX_TRIPS = 8
_MAX_WEIGHT = MAX_TRIPS**4

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


# --- layouts that loops and branches require ------------------------------------------


@infers("scf.yield", "scf.condition")
def _infer_end(network: Network, op: ir.Operation, key: int) -> None:
    """The operation around has rules for what its regions yield."""


@infers("scf.for")
def _infer_for(network: Network, op: ir.Operation, key: int) -> None:
    block = op.regions[0].blocks[0]
    low, high, step = (scalars.known(op.operands[i]) for i in range(3))
    trips = MAX_TRIPS
    if low is not None and high is not None and step is not None:
        trips = -((low - high) // step)
    carries: dict[int, Variable] = {}
    for i, result in enumerate(op.results):
        if is_vector(result):
            variable = network.variable(op, result.type, key, role=f"carry {i}")
            network.consume(op, 3 + i, variable)
            network.produce(block.arguments[1 + i], variable)
            network.produce(result, variable)
            carries[i] = variable
    _in_loop(network, block, key, trips)
    _consume_yields(network, _last(block), carries, trips)


@infers("scf.while")
def _infer_while(network: Network, op: ir.Operation, key: int) -> None:
    test, body = (region.blocks[0] for region in op.regions)
    carries: dict[int, Variable] = {}
    for i, argument in enumerate(test.arguments):
        if is_vector(argument):
            variable = network.variable(op, argument.type, key, role=f"carry {i}")
            network.consume(op, i, variable)
            network.produce(argument, variable)
            carries[i] = variable
    passed: dict[int, Variable] = {}
    for i, result in enumerate(op.results):
        if is_vector(result):
            variable = network.variable(op, result.type, key, role=f"result {i}")
            network.produce(body.arguments[i], variable)
            network.produce(result, variable)
            passed[1 + i] = variable
    _in_loop(network, test, key, MAX_TRIPS)
    _consume_yields(network, _last(test), passed, MAX_TRIPS)
    _in_loop(network, body, key, MAX_TRIPS)
    _consume_yields(network, _last(body), carries, MAX_TRIPS)


@infers("scf.if")
def _infer_branch(network: Network, op: ir.Operation, key: int) -> None:
    chosen = {
        i: network.variable(op, result.type, key, role=f"result {i}")
        for i, result in enumerate(op.results)
        if is_vector(result)
    }
    for region in op.regions:
        for block in region.blocks:
            network.name_arguments(block, key)
            collect_block(network, block)
            _consume_yields(network, _last(block), chosen, 1)
    for i, variable in chosen.items():
        network.produce(op.results[i], variable)


def _last(block: ir.Block) -> ir.Operation:
    return block.operations[len(block.operations) - 1].operation


def _in_loop(network: Network, block: ir.Block, key: int, trips: int) -> None:
    network.name_arguments(block, key)
    before = network.weight
    network.weight = _inside(before, trips)
    collect_block(network, block)
    network.weight = before


def _inside(weight: int, trips: int) -> int:
    return min(weight * min(max(trips, 1), MAX_TRIPS), _MAX_WEIGHT)


def _consume_yields(
    network: Network, end: ir.Operation, carries: dict[int, Variable], trips: int
) -> None:
    """What a loop's body yields arrives in the carries' layouts, once each run."""
    before = network.weight
    network.weight = _inside(before, trips)
    for i, variable in carries.items():
        network.consume(end, i, variable)
    network.weight = before


# --- loops and branches of registers --------------------------------------------------
#
# An operation is entered as dead before those of its regions: what its blocks were
# given is used until they are gone.


@dataclasses.dataclass(frozen=True)
class _Crossing:
    """How values cross: scalars as they are, arrays as their registers."""

    expansion: Expansion
    specs: tuple[vals.Packed | None, ...]  # None: a scalar

    @classmethod
    def of(cls, expansion: Expansion, values: Sequence[ir.Value]) -> _Crossing:
        """Returns the border that values of these layouts cross."""
        return cls(expansion, tuple(_spec(expansion, v) for v in values))

    def types(self, values: Sequence[ir.Value]) -> list[ir.Type]:
        """Returns the types of the SSA values that stand for some values."""
        result: list[ir.Type] = []
        for spec, value in zip(self.specs, values, strict=True):
            result += [value.type] if spec is None else spec.types
        return result

    def pack(self, op: Any, first: int = 0) -> list[ir.Value]:
        """Returns the SSA values of an operation's operands, from the first on."""
        result: list[ir.Value] = []
        for i, spec in enumerate(self.specs, first):
            if spec is None:
                result.append(op.operands[i])
                continue
            array = self.expansion.array(op.operands[i])
            placed = self.expansion.in_layout(array, spec.layout)
            assert isinstance(placed, regs.RegisterArray)
            result += placed.values
        return result

    def unpack(self, old: Sequence[ir.Value], new: Sequence[ir.Value]) -> None:
        """Enters what has become of values."""
        new = list(new)
        for spec, value in zip(self.specs, old, strict=True):
            if spec is None:
                value.replace_all_uses_with(new.pop(0))
                continue
            self.expansion.arrays[value] = spec.unpack(new[: spec.count])
            del new[: spec.count]


def _spec(expansion: Expansion, value: ir.Value) -> vals.Packed | None:
    if not is_array(value):
        return None
    dtype = logical.dtype_of(value.type)
    layout = expansion.assignment.result(value)
    if layout is None:
        layout = regs.default_placement(tuple(value.type.shape), dtype)
    return vals.Packed(dtype, layout=layout)


def _move(source: Any, target: Any) -> None:
    for op in list(source.operations):
        target.append(op)


def _expand_regions(expansion: Expansion, op: Any) -> None:
    for region in op.regions:
        for block in region.blocks:
            expand_block(expansion, block)


@expands("scf.for")
def _expand_for(expansion: Expansion, op: Any) -> None:
    if not any(map(is_array, op.results)):
        _expand_regions(expansion, op)
        return
    expansion.dead.append(op.operation)
    old = op.regions[0].blocks[0]
    induction, *carried = old.arguments
    border = _Crossing.of(expansion, carried)
    bounds = [op.operands[i] for i in range(3)]
    loop = scf.ForOp(*bounds, border.pack(op, first=3))
    induction.replace_all_uses_with(loop.induction_variable)
    border.unpack(carried, loop.inner_iter_args)
    _move(old, loop.body)
    expand_block(expansion, loop.body)
    _yield(expansion, loop.body, border)
    border.unpack(op.results, loop.results)


@expands("scf.while")
def _expand_while(expansion: Expansion, op: Any) -> None:
    if not any(map(is_array, (*op.results, *op.operands))):
        _expand_regions(expansion, op)
        return
    expansion.dead.append(op.operation)
    before, after = (region.blocks[0] for region in op.regions)
    outer = _Crossing.of(expansion, before.arguments)
    inner = _Crossing.of(expansion, after.arguments)
    results = inner.types(list(op.results))
    loop = scf.WhileOp(results, outer.pack(op))
    new_before = loop.before.blocks.append(*outer.types(list(before.arguments)))
    new_after = loop.after.blocks.append(*results)
    for border, old, new in ((outer, before, new_before), (inner, after, new_after)):
        border.unpack(list(old.arguments), list(new.arguments))
        _move(old, new)
        expand_block(expansion, new)
    condition = list(new_before.operations)[-1]
    with ir.InsertionPoint(condition), ir.Location.unknown():
        scf.condition(condition.operands[0], inner.pack(condition, first=1))
    expansion.dead.append(condition.operation)
    _yield(expansion, new_after, outer)
    inner.unpack(op.results, loop.results)


@expands("scf.if")
def _expand_if(expansion: Expansion, op: Any) -> None:
    if not any(map(is_array, op.results)):
        _expand_regions(expansion, op)
        return
    expansion.dead.append(op.operation)
    results = list(op.results)
    border = _Crossing.of(expansion, results)
    new = scf.IfOp(op.operands[0], border.types(results), has_else=True)
    for region, block in zip(op.regions, (new.then_block, new.else_block), strict=True):
        _move(region.blocks[0], block)
        expand_block(expansion, block)
        _yield(expansion, block, border)
    border.unpack(results, new.results)


def _yield(expansion: Expansion, block: Any, border: _Crossing) -> None:
    """Replaces a block's terminator by one of registers."""
    old = list(block.operations)[-1]
    with ir.InsertionPoint(old), ir.Location.unknown():
        scf.yield_(border.pack(old))
    expansion.dead.append(old.operation)


@expands("scf.yield", "scf.condition")
def _expand_terminator(expansion: Expansion, op: Any) -> None:
    """The operation around it replaces it, once its block is done."""
