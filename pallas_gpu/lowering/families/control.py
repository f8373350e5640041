# SPDX-License-Identifier: Apache-2.0
"""Loops, branches and calls: JAX's control flow as scf, and scf on registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_gpu import _jax
from pallas_gpu.lowering import borders
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.borders import Border, Branch, StateBorder
from pallas_gpu.lowering.context import RuleContext, lower_jaxpr, state_keys
from pallas_gpu.lowering.expansion.walk import Expansion, expand_block, is_array
from pallas_gpu.lowering.inference.constraints import collect_block, is_vector
from pallas_gpu.lowering.inference.network import Key, Network, Variable
from pallas_gpu.lowering.rules import expands, infers, uniform
from pallas_gpu.mosaic import logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes, scalars
from pallas_gpu.mosaic.registers import default_placement

# Maximum assumed trip count of a loop, and the count where it is unknown; nested loops
# multiply, up to a limit that keeps sums of costs small.
MAX_TRIPS = 8
_MAX_WEIGHT = MAX_TRIPS**4

# --- calls ----------------------------------------------------------------------------


@uniform("jit")
def _jit(ctx: RuleContext, *args, jaxpr=None):
    return _call(ctx, ctx.eqn.params["jaxpr"], args)


@uniform("checkpoint")
def _checkpoint(ctx: RuleContext, *args):
    """`jax.checkpoint`: a kernel has no backward pass that could recompute."""
    return _call(ctx, ctx.eqn.params["jaxpr"], args)


@uniform("name")
def _name(ctx: RuleContext, x):
    """`checkpoint_name`, which only a backward pass would use."""
    return x


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


# --- loops ----------------------------------------------------------------------------


@uniform("scan")
def _scan(ctx: RuleContext, *args):
    params = ctx.eqn.params
    n_consts, _ = _jax.scan_arity(params)
    consts, carry = list(args[:n_consts]), list(args[n_consts:])
    borders.check_carry(carry, "a loop")
    kernel, body = ctx.kernel, _open(params["jaxpr"])
    length, unroll = params["length"], int(params["unroll"])

    def steps(values: list[Any]) -> list[Any]:
        for _ in range(unroll):
            values = lower_jaxpr(kernel, body, [*consts, *values])
        return values

    if length == unroll:
        return steps(carry)
    carry = borders.place_carry(kernel, carry, steps)
    keys = state_keys(kernel, body, consts)
    border = StateBorder(kernel, keys, borders.specs_of(carry))
    if (known := borders.results_in_trial(kernel, border)) is not None:
        return known
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
    borders.check_carry(carry, "a while loop")
    kernel = ctx.kernel
    cond, body = _open(params["cond_jaxpr"]), _open(params["body_jaxpr"])

    def step(values: list[Any]) -> list[Any]:
        return lower_jaxpr(kernel, body, [*body_consts, *values])

    carry = borders.place_carry(kernel, carry, step)
    touched = {*state_keys(kernel, body, body_consts)}
    touched |= {*state_keys(kernel, cond, cond_consts)}
    keys = [key for key in kernel.state if key in touched]
    border = StateBorder(kernel, keys, borders.specs_of(carry))
    if (known := borders.results_in_trial(kernel, border)) is not None:
        return known
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


# --- branches -------------------------------------------------------------------------


@uniform("cond")
def _cond(ctx: RuleContext, index, *args):
    kernel = ctx.kernel
    bodies = [_open(b) for b in ctx.eqn.params["branches"]]
    touched: set[Any] = set()
    for body in bodies:
        touched |= {*state_keys(kernel, body, args)}
    keys = [key for key in kernel.state if key in touched]
    branches = [Branch(kernel, body, args) for body in bodies]
    border = StateBorder(kernel, keys, _branch_results(ctx, branches))
    choice = vals.scalar_value(index)
    return border.unpack(_emit_choice(choice, branches, border))


def _branch_results(ctx: RuleContext, branches: Sequence[Branch]) -> list[vals.Packed]:
    """Returns how each result crosses; an array has the layout from a branch."""

    def packed(i: int, aval: Any) -> vals.Packed:
        return ctx.kernel.semantics.packed(
            vals.numpy_dtype(aval),
            tuple(aval.shape),
            lambda: [branch.layout(i) for branch in branches],
        )

    return [packed(i, var.aval) for i, var in enumerate(ctx.eqn.outvars)]


def _emit_choice(
    choice: ir.Value, branches: Sequence[Branch], border: StateBorder
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


@infers("scf.yield", "scf.condition")
def _infer_end(network: Network, op: ir.Operation, key: Key) -> None:
    """Does nothing: the rule of the parent operation handles the yielded values."""


@infers("scf.for")
def _infer_for(network: Network, op: ir.Operation, key: Key) -> None:
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
def _infer_while(network: Network, op: ir.Operation, key: Key) -> None:
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
def _infer_branch(network: Network, op: ir.Operation, key: Key) -> None:
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


def _in_loop(network: Network, block: ir.Block, key: Key, trips: int) -> None:
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
    """Consumes a body's yielded values in the carries' layouts, once per iteration."""
    before = network.weight
    network.weight = _inside(before, trips)
    for i, variable in carries.items():
        network.consume(end, i, variable)
    network.weight = before


# --- expansion of loops and branches --------------------------------------------------
#
# An operation is marked dead before those of its regions: the arguments of its blocks
# are used until they are erased.


@expands("scf.for")
def _expand_for(expansion: Expansion, op: Any) -> None:
    if not any(map(is_array, op.results)):
        _expand_regions(expansion, op)
        return
    expansion.dead.append(op.operation)
    old = op.regions[0].blocks[0]
    induction, *carried = old.arguments
    border = _border(expansion, carried)
    bounds = [op.operands[i] for i in range(3)]
    loop = scf.ForOp(*bounds, border.pack(_operands(expansion, op, first=3)))
    induction.replace_all_uses_with(loop.induction_variable)
    _replace(expansion, carried, border.unpack(loop.inner_iter_args))
    borders.move_operations(old, loop.body)
    expand_block(expansion, loop.body)
    _yield(expansion, loop.body, border)
    _replace(expansion, op.results, border.unpack(loop.results))


@expands("scf.while")
def _expand_while(expansion: Expansion, op: Any) -> None:
    if not any(map(is_array, (*op.results, *op.operands))):
        _expand_regions(expansion, op)
        return
    expansion.dead.append(op.operation)
    before, after = (region.blocks[0] for region in op.regions)
    outer = _border(expansion, before.arguments)
    inner = _border(expansion, after.arguments)
    loop = scf.WhileOp(inner.types, outer.pack(_operands(expansion, op)))
    new_before = loop.before.blocks.append(*outer.types)
    new_after = loop.after.blocks.append(*inner.types)
    for border, old, new in ((outer, before, new_before), (inner, after, new_after)):
        _replace(expansion, old.arguments, border.unpack(new.arguments))
        borders.move_operations(old, new)
        expand_block(expansion, new)
    condition = _last(new_before)
    with ir.InsertionPoint(condition), ir.Location.unknown():
        passed = _operands(expansion, condition, first=1)
        scf.condition(condition.operands[0], inner.pack(passed))
    expansion.dead.append(condition)
    _yield(expansion, new_after, outer)
    _replace(expansion, op.results, inner.unpack(loop.results))


@expands("scf.if")
def _expand_if(expansion: Expansion, op: Any) -> None:
    if not any(map(is_array, op.results)):
        _expand_regions(expansion, op)
        return
    expansion.dead.append(op.operation)
    border = _border(expansion, op.results)
    new = scf.IfOp(op.operands[0], border.types, has_else=True)
    for region, block in zip(op.regions, (new.then_block, new.else_block), strict=True):
        borders.move_operations(region.blocks[0], block)
        expand_block(expansion, block)
        _yield(expansion, block, border)
    _replace(expansion, op.results, border.unpack(new.results))


@expands("scf.yield", "scf.condition")
def _expand_terminator(expansion: Expansion, op: Any) -> None:
    """Does nothing: the rule of the parent operation replaces the terminator."""


def _expand_regions(expansion: Expansion, op: Any) -> None:
    for region in op.regions:
        for block in region.blocks:
            expand_block(expansion, block)


def _yield(expansion: Expansion, block: Any, border: Border) -> None:
    """Replaces a block's terminator by one of registers."""
    old = _last(block)
    with ir.InsertionPoint(old), ir.Location.unknown():
        scf.yield_(border.pack(_operands(expansion, old)))
    expansion.dead.append(old)


def _border(expansion: Expansion, values: Sequence[ir.Value]) -> Border:
    """Returns the border of values in their assigned layouts."""

    def fit(value: Any, spec: vals.Packed) -> Any:
        return value if spec.layout is None else expansion.in_layout(value, spec.layout)

    return Border(tuple(_spec(expansion, value) for value in values), fit)


def _spec(expansion: Expansion, value: ir.Value) -> vals.Packed:
    dtype = logical.dtype_of(value.type)
    if not is_array(value):
        return vals.Packed(dtype)
    layout = expansion.assignment.result(value)
    if layout is None:
        layout = default_placement(tuple(value.type.shape), dtypes.bits(dtype))
    return vals.Packed(dtype, layout=layout)


def _operands(expansion: Expansion, op: Any, first: int = 0) -> list[regs.Array]:
    """Returns an operation's operands from index `first`."""
    return [
        expansion.array(x) if is_array(x) else regs.Splat(x, logical.dtype_of(x.type))
        for x in list(op.operands)[first:]
    ]


def _replace(expansion: Expansion, old: Sequence[ir.Value], new: Sequence[Any]) -> None:
    """Records the arrays of values."""
    for value, array in zip(old, new, strict=True):
        if is_array(value):
            expansion.arrays[value] = array
        else:
            value.replace_all_uses_with(array.value)
