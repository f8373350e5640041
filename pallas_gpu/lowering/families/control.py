# SPDX-License-Identifier: Apache-2.0
"""Loops, branches and calls: JAX's control flow as scf, and scf on registers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_gpu import _jax, errors
from pallas_gpu.lowering import borders
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.borders import Border, Branch, StateBorder
from pallas_gpu.lowering.context import RuleContext, state_keys
from pallas_gpu.lowering.expansion.walk import Expansion, expand_block, is_array
from pallas_gpu.lowering.inference.collect import Node, Symbol, inside
from pallas_gpu.lowering.inference.constraints import collect_block, is_vector
from pallas_gpu.lowering.inference.network import Key, Network, Variable
from pallas_gpu.lowering.rules import expands, infers, relates, uniform
from pallas_gpu.mosaic import logical
from pallas_gpu.mosaic import registers as regs
from pallas_gpu.mosaic.elements import dtypes, scalars
from pallas_gpu.mosaic.registers import default_placement

# Maximum assumed trip count of a loop, and the count where it is unknown; nested loops
# multiply, up to a limit that keeps sums of costs small.
MAX_TRIPS = 8
_MAX_WEIGHT = MAX_TRIPS**4

# --- calls ----------------------------------------------------------------------------


@uniform("platform_index")
def _platform_index(ctx: RuleContext) -> Any:
    """`lax.platform_dependent`: a branch on a constant."""
    return vals.constant(_jax.code_for_cuda(ctx.eqn), np.int32)


@uniform("name")
def _name(ctx: RuleContext, x):
    """`checkpoint_name`, which only a backward pass would use."""
    return x


def _inlined(ctx: RuleContext, *args):
    raise errors.InternalError(f"{ctx.op.name} is not inlined")


# Their bodies are part of the program that calls them.
for _call in ("jit", "checkpoint", "custom_jvp_call", "custom_vjp_call"):
    uniform(_call)(_inlined)


# --- loops ----------------------------------------------------------------------------


@uniform("scan")
def _scan(ctx: RuleContext, *args):
    params = ctx.eqn.params
    n_consts, _ = _jax.scan_arity(params)
    consts, carry = list(args[:n_consts]), list(args[n_consts:])
    borders.check_carry(carry, "a loop")
    kernel = ctx.kernel
    length, unroll = params["length"], int(params["unroll"])

    def steps(values: list[Any]) -> list[Any]:
        for copy in range(unroll):
            values = ctx.run(0, [*consts, *values], copy)
        return values

    if length == unroll:
        return steps(carry)
    carry = kernel.semantics.carried(ctx, carry, steps)
    keys = state_keys(kernel, params["jaxpr"], consts)
    border = StateBorder(kernel, keys, borders.specs_of(carry))
    if (known := borders.results_in_trial(kernel, border)) is not None:
        return known
    index = ir.IndexType.get()
    bounds = [arith.constant(index, n) for n in (0, length // unroll, 1)]
    loop = scf.ForOp(*bounds, border.pack(carry))
    with kernel.in_block(loop.body):
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

    def step(values: list[Any]) -> list[Any]:
        return ctx.run(1, [*body_consts, *values])

    carry = kernel.semantics.carried(ctx, carry, step)
    touched = {*state_keys(kernel, params["body_jaxpr"], body_consts)}
    touched |= {*state_keys(kernel, params["cond_jaxpr"], cond_consts)}
    keys = [key for key in kernel.state if key in touched]
    border = StateBorder(kernel, keys, borders.specs_of(carry))
    if (known := borders.results_in_trial(kernel, border)) is not None:
        return known
    kinds = border.types
    loop = scf.WhileOp(kinds, border.pack(carry))
    before = loop.before.blocks.append(*kinds)
    after = loop.after.blocks.append(*kinds)
    with kernel.in_block(before):
        values = border.unpack(before.arguments)
        (proceed,) = ctx.run(0, [*cond_consts, *values])
        scf.condition(vals.scalar_value(proceed), border.pack(values))
    with kernel.in_block(after):
        scf.yield_(border.pack(step(border.unpack(after.arguments))))
    return border.unpack(loop.results)


# --- branches -------------------------------------------------------------------------


@uniform("cond")
def _cond(ctx: RuleContext, index, *args):
    kernel = ctx.kernel
    touched: set[Any] = set()
    for body in ctx.eqn.params["branches"]:
        touched |= {*state_keys(kernel, body, args)}
    keys = [key for key in kernel.state if key in touched]
    branches = [Branch(ctx, i, args) for i in range(len(ctx.op.regions))]
    border = StateBorder(kernel, keys, _branch_results(ctx, branches))
    choice = vals.scalar_value(index)
    return border.unpack(_emit_choice(choice, branches, border))


def _branch_results(ctx: RuleContext, branches: Sequence[Branch]) -> list[vals.Packed]:
    """Returns how each result crosses; an array has the layout from a branch."""

    def packed(i: int, aval: Any) -> vals.Packed:
        return ctx.kernel.semantics.packed(
            ctx,
            i,
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


@relates("scan")
def _relate_scan(node: Node, *args: Any) -> list[Any]:
    params = node.params
    n_consts, _ = _jax.scan_arity(params)
    consts, carry = list(args[:n_consts]), list(args[n_consts:])
    length, unroll = params["length"], int(params["unroll"])

    def steps(values: list[Any]) -> list[Any]:
        for copy in range(unroll):
            values = node.run(0, [*consts, *values], copy)
        return values

    if length == unroll:
        return steps(carry)
    carries = _carries(node, carry, node.op.regions[0].inputs[n_consts:])
    with _looping(node, length // unroll):
        _take_results(node, steps([x for x, _ in carries]), carries)
    return _made(node, carries)


@relates("while")
def _relate_while(node: Node, *args: Any) -> list[Any]:
    n_cond, n_body = node.params["cond_nconsts"], node.params["body_nconsts"]
    cond_consts, body_consts = args[:n_cond], args[n_cond : n_cond + n_body]
    carry = args[n_cond + n_body :]
    carries = _carries(node, carry, node.op.regions[1].inputs[n_body:])
    values = [x for x, _ in carries]
    with _looping(node, MAX_TRIPS):
        node.run(0, [*cond_consts, *values])
        _take_results(node, node.run(1, [*body_consts, *values]), carries)
    return _made(node, carries)


Carry = tuple[Any, Variable | None]


def _carries(node: Node, carry: Sequence[Any], inputs: Sequence[Any]) -> list[Carry]:
    """Returns what stands for the carry in the body, and the variables of arrays."""
    carries: list[Carry] = []
    for i, (x, value) in enumerate(zip(carry, inputs, strict=True)):
        if not isinstance(x, Symbol):
            carries.append((x, None))
            continue
        variable = None
        if x.shape:
            variable = node.variable(x, f"carry {i}")
            node.take(x, variable, f"initial {i}")
        carries.append((node.argument(value, i, variable), variable))
    return carries


def _take_results(node: Node, results: Sequence[Any], carries: Sequence[Carry]) -> None:
    for i, (x, (_, variable)) in enumerate(zip(results, carries, strict=True)):
        if variable is not None:
            node.take(x, variable, f"yielded {i}")


def _made(node: Node, carries: Sequence[Carry]) -> list[Any]:
    return [
        x
        if not isinstance(x, Symbol)
        else node.scalar(x, i)
        if variable is None
        else node.make(variable, x, i)
        for i, (x, variable) in enumerate(carries)
    ]


@contextlib.contextmanager
def _looping(node: Node, trips: int) -> Iterator[None]:
    before = node.network.weight
    node.network.weight = inside(before, trips)
    yield
    node.network.weight = before


@relates("cond")
def _relate_branch(node: Node, index: Any, *args: Any) -> list[Any]:
    results = node.op.results
    chosen = [
        node.variable(_like(x), f"result {i}") if x.shape else None
        for i, x in enumerate(results)
    ]
    for branch in range(len(node.op.regions)):
        for i, (x, variable) in enumerate(
            zip(node.run(branch, args), chosen, strict=True)
        ):
            if variable is not None:
                node.take(x, variable, f"branch {branch} {i}")
    return [
        node.scalar(x, i) if variable is None else node.make(variable, x, i)
        for i, (x, variable) in enumerate(zip(results, chosen, strict=True))
    ]


def _like(x: Any) -> Symbol:
    return Symbol(tuple(x.shape), np.dtype(x.dtype), lambda: 0)


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
