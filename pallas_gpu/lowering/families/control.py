# SPDX-License-Identifier: Apache-2.0
"""Loops, branches and calls: JAX's control flow as scf, and scf on registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_gpu import _jax, errors
from pallas_gpu.emitters.elements import dtypes, scalars
from pallas_gpu.emitters.registers import default_placement
from pallas_gpu.lowering import borders
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.borders import Border, Branch
from pallas_gpu.lowering.context import RuleContext, state_keys
from pallas_gpu.lowering.inference.collect import MAX_TRIPS, Node, Symbol, inside
from pallas_gpu.lowering.inference.network import Variable
from pallas_gpu.lowering.rules import emits, emits_and_relates
from pallas_gpu.program.nodes import Value

# --- calls ----------------------------------------------------------------------------


def _inlined(ctx: RuleContext, *args):
    raise errors.InternalError(f"{ctx.op.name} is not inlined")


# Their bodies are part of the program that calls them.
for _call in ("jit", "checkpoint", "custom_jvp_call", "custom_vjp_call"):
    emits(_call)(_inlined)


# --- loops ----------------------------------------------------------------------------


@emits_and_relates("scan")
def _scan(on: RuleContext | Node, *args: Any) -> list[Any]:
    params = on.op.params
    n_consts, _ = _jax.scan_arity(params)
    consts, carry = list(args[:n_consts]), list(args[n_consts:])
    length, unroll = params["length"], int(params["unroll"])

    def steps(values: list[Any]) -> list[Any]:
        for copy in range(unroll):
            values = on.run(0, [*consts, *values], copy)
        return values

    if isinstance(on, Node):
        inputs = on.op.regions[0].inputs[n_consts:]
        return (
            steps(carry)
            if length == unroll
            else _loop(on, carry, inputs, length // unroll, steps)
        )
    borders.check_carry(carry, "a loop")
    if length == unroll:
        return steps(carry)
    kernel = on.kernel
    carry = kernel.layouts.carried(on, carry, steps)
    border = Border(kernel, state_keys(on, args), borders.specs_of(carry))
    if (known := borders.results_in_trial(kernel, border)) is not None:
        return known
    index = ir.IndexType.get()
    bounds = [arith.constant(index, n) for n in (0, length // unroll, 1)]
    loop = scf.ForOp(*bounds, border.pack(carry))
    with kernel.in_block(loop.body):
        results = steps(border.unpack(loop.inner_iter_args))
        scf.yield_(border.pack(results))
    return border.unpack(loop.results)


@emits_and_relates("while")
def _while(on: RuleContext | Node, *args: Any) -> list[Any]:
    params = on.op.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = args[:n_cond], args[n_cond : n_cond + n_body]
    carry = list(args[n_cond + n_body :])

    def proceeds(values: list[Any]) -> Any:
        return on.run(0, [*cond_consts, *values])[0]

    def step(values: list[Any]) -> list[Any]:
        return on.run(1, [*body_consts, *values])

    if isinstance(on, Node):
        inputs = on.op.regions[1].inputs[n_body:]
        return _loop(on, carry, inputs, MAX_TRIPS, step, proceeds)
    borders.check_carry(carry, "a while loop")
    kernel = on.kernel
    carry = kernel.layouts.carried(on, carry, step)
    border = Border(kernel, state_keys(on, args), borders.specs_of(carry))
    if (known := borders.results_in_trial(kernel, border)) is not None:
        return known
    kinds = border.types
    loop = scf.WhileOp(kinds, border.pack(carry))
    before = loop.before.blocks.append(*kinds)
    after = loop.after.blocks.append(*kinds)
    with kernel.in_block(before):
        values = border.unpack(before.arguments)
        scf.condition(vals.scalar_value(proceeds(values)), border.pack(values))
    with kernel.in_block(after):
        scf.yield_(border.pack(step(border.unpack(after.arguments))))
    return border.unpack(loop.results)


# --- branches -------------------------------------------------------------------------


@emits_and_relates("cond")
def _cond(on: RuleContext | Node, index: Any, *args: Any) -> list[Any]:
    if isinstance(on, Node):
        chosen = [
            (x, on.variable(x, f"result {i}") if x.shape else None)
            for i, x in enumerate(on.op.results)
        ]
        for branch in range(len(on.op.regions)):
            _take_results(on, on.run(branch, args), chosen, f"branch {branch}")
        return _made(on, chosen)
    branches = [Branch(on, i, args) for i in range(len(on.op.regions))]
    border = Border(on.kernel, state_keys(on, args), _branch_results(on, branches))
    choice = vals.scalar_value(index)
    return border.unpack(_emit_choice(choice, branches, border))


def _branch_results(ctx: RuleContext, branches: Sequence[Branch]) -> list[borders.Spec]:
    """Returns how each result crosses; an array has the layout from a branch."""

    def spec(i: int, aval: Any) -> borders.Spec:
        dtype, shape = vals.numpy_dtype(aval), tuple(aval.shape)
        if not shape:
            return dtype, None
        found = ctx.kernel.layouts.of_branches(
            ctx, i, lambda: [branch.layout(i) for branch in branches]
        )
        layout = found or default_placement(shape, dtypes.bits(dtype))
        return dtype, layout

    return [spec(i, var.aval) for i, var in enumerate(ctx.eqn.outvars)]


def _emit_choice(
    choice: ir.Value, branches: Sequence[Branch], border: Border
) -> list[ir.Value]:
    """Emits an scf.if for two branches; more branches nest in its else."""
    condition, first, second = _test(choice), branches[0], branches[1:]
    if condition is not None:
        # JAX represents a predicate as an index: branch 1 is the true branch.
        first, second = branches[1], branches[:1]
    else:
        zero = scalars.constant(0, np.dtype(np.int32))
        condition = arith.cmpi(arith.CmpIPredicate.sle, choice, zero)
    kinds = border.types
    nothing = not kinds and len(second) == 1 and second[0].is_empty
    op = scf.IfOp(condition, kinds, has_else=not nothing)
    first.emit(op.then_block, border)
    if nothing:
        return []
    if len(second) == 1:
        second[0].emit(op.else_block, border)
        return list(op.results)
    with ir.InsertionPoint(op.else_block):
        one = scalars.constant(1, np.dtype(np.int32))
        rest = arith.subi(choice, one)
        scf.yield_(_emit_choice(rest, second, border))
    return list(op.results)


def _test(choice: ir.Value) -> ir.Value | None:
    """Returns the predicate that was converted to an index."""
    owner = choice.owner
    if isinstance(owner, ir.Operation | ir.OpView) and (
        owner.operation.name == "arith.extui"
    ):
        source = owner.operation.operands[0]
        if source.type == ir.IntegerType.get_signless(1):
            return source
    return None


# --- layouts that loops and branches require ------------------------------------------


def _loop(
    node: Node,
    carry: Sequence[Any],
    inputs: Sequence[Any],
    trips: int,
    body: Callable[[list[Any]], list[Any]],
    before: Callable[[list[Any]], Any] = lambda _: None,
) -> list[Any]:
    """Each array has one layout at the start and the end of an iteration.

    Args:
      inputs: what the body has for the carry.
      before: is collected before the body.
    """
    carries: list[tuple[Any, Variable | None]] = []
    for i, (x, value) in enumerate(zip(carry, inputs, strict=True)):
        if not isinstance(x, Symbol):
            carries.append((x, None))
            continue
        variable = None
        if x.shape:
            variable = node.variable(x, f"carry {i}")
            node.take(x, variable, f"initial {i}")
        carries.append((node.argument(value, i, variable), variable))
    outer, values = node.network.weight, [x for x, _ in carries]
    node.network.weight = inside(outer, trips)
    before(values)
    _take_results(node, body(values), carries)
    node.network.weight = outer
    return _made(node, carries)


def _take_results(
    node: Node, results: Sequence[Any], made: Sequence[Any], role: str = "yielded"
) -> None:
    for i, (x, (_, variable)) in enumerate(zip(results, made, strict=True)):
        if variable is not None:
            node.take(x, variable, f"{role} {i}")


def _made(node: Node, chosen: Sequence[Any]) -> list[Any]:
    return [
        x
        if not isinstance(x, Symbol | Value)
        else node.scalar(x, i)
        if variable is None
        else node.make(variable, x, i)
        for i, (x, variable) in enumerate(chosen)
    ]
