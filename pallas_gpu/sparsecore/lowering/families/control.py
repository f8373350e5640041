# SPDX-License-Identifier: Apache-2.0
"""Loops, branches and calls: JAX's control flow as scf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_gpu import _jax, errors
from pallas_gpu.sparsecore.emitters import conversions
from pallas_gpu.sparsecore.emitters.values import (
    BOOL,
    I32,
    Array,
    Handle,
    constant,
    i32,
    scalar_type,
)
from pallas_gpu.sparsecore.lowering.state import emits
from pallas_gpu.sparsecore.primitives import loops


def _inlined(ctx: Any, *args: Any) -> Any:
    raise errors.InternalError(f"{ctx.op.name} is not inlined")


for _call in ("jit", "checkpoint", "custom_jvp_call", "custom_vjp_call"):
    emits(_call)(_inlined)


@emits("axis_index")
def _axis_index(ctx: Any) -> Array:
    return ctx.kernel.position(ctx.eqn.params["axis_name"])


class Border:
    """Values that enter and leave a region, as MLIR's.

    References do not cross: they are the same inside. Bools cross in registers of
    words, so that branches agree on how many lanes a mask has.
    """

    def __init__(self, ctx: Any, examples: Sequence[Any]):
        self._lanes = ctx.kernel.target.lanes
        self.examples = list(examples)

    @classmethod
    def of_results(cls, ctx: Any) -> Border:
        """Returns the border of an operation's results, by their types."""
        examples = [
            Array(tuple(v.aval.shape), np.dtype(v.aval.dtype), ())
            for v in ctx.op.results
        ]
        return cls(ctx, examples)

    @property
    def types(self) -> list[ir.Type]:
        """The types of the values."""
        found = []
        for x in self.examples:
            if isinstance(x, Handle):
                continue
            dtype = I32 if x.dtype == BOOL and not x.is_scalar else x.dtype
            count = conversions.registers_of(x.shape, dtype, self._lanes)
            if not count:
                found.append(scalar_type(dtype))
                continue
            elements = conversions.register_elements(dtype, self._lanes)
            found += [conversions.vector_type(elements, dtype)] * count
        return found

    def pack(self, values: Sequence[Any]) -> list[ir.Value]:
        """Returns the values as MLIR's."""
        found: list[ir.Value] = []
        for x in values:
            if isinstance(x, Array):
                if x.dtype == BOOL and not x.is_scalar:
                    x = conversions.astype(x, I32, self._lanes)
                found += x.parts
        return found

    def unpack(self, parts: Sequence[ir.Value]) -> list[Any]:
        """Returns MLIR's values as those of the program."""
        rest = list(parts)
        found: list[Any] = []
        for x in self.examples:
            if isinstance(x, Handle):
                found.append(x)
                continue
            dtype = I32 if x.dtype == BOOL and not x.is_scalar else x.dtype
            count = max(1, conversions.registers_of(x.shape, dtype, self._lanes))
            own, rest = rest[:count], rest[count:]
            made = Array(x.shape, dtype, tuple(own))
            found.append(conversions.astype(made, x.dtype, self._lanes))
        return found


# --- loops ----------------------------------------------------------------------------


@emits("scan")
def _scan(ctx: Any, *args: Any) -> list[Any]:
    params = ctx.eqn.params
    n_consts, n_carry = _jax.scan_arity(params)
    if len(args) != n_consts + n_carry or len(ctx.op.results) != n_carry:
        # Arrays that a scan goes through, or stacks.
        raise ctx.kernel.no_rule(ctx.op)
    consts, carry = list(args[:n_consts]), list(args[n_consts:])
    length, unroll = params["length"], int(params["unroll"])

    def steps(values: list[Any], copies: range) -> list[Any]:
        for copy in copies:
            values = ctx.run(0, [*consts, *values], copy)
        return values

    trips, rest = divmod(length, unroll)
    if trips == 1:
        carry = steps(carry, range(unroll))
    elif trips > 1:
        bounds = [i32(n) for n in (0, trips, 1)]
        every = range(unroll)
        carry, _ = _for(ctx, bounds, carry, lambda _, values: steps(values, every))
    return steps(carry, range(unroll, unroll + rest))


def _for(
    ctx: Any,
    bounds: Sequence[ir.Value],
    carry: Sequence[Any],
    body: Callable[[ir.Value, list[Any]], list[Any]],
) -> tuple[list[Any], Any]:
    border = Border(ctx, carry)
    loop = scf.ForOp(*bounds, border.pack(carry))
    with ir.InsertionPoint(loop.body):
        results = body(loop.induction_variable, border.unpack(loop.inner_iter_args))
        scf.yield_(border.pack(results))
    return border.unpack(loop.results), loop


@emits(loops.parallel_loop_p)
def _parallel_loop(ctx: Any, *args: Any) -> list[Any]:
    params = ctx.op.params
    n, count = params["num_consts"], params["num_carry"]
    consts, carry = args[:n], list(args[n : n + count])
    bounds = [x.value for x in args[n + count :]]

    def body(index: ir.Value, values: list[Any]) -> list[Any]:
        return ctx.run(0, [*consts, *values, Array((), I32, (index,))])

    made, loop = _for(ctx, bounds, carry, body)
    attributes, i64 = loop.operation.attributes, ir.IntegerType.get_signless(64)
    attributes["sc.parallel_access"] = ir.UnitAttr.get()
    attributes["sc.loop_unroll_factor"] = ir.IntegerAttr.get(i64, params["unroll"])
    return made


@emits("while")
def _while(ctx: Any, *args: Any) -> list[Any]:
    params = ctx.eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = args[:n_cond], args[n_cond : n_cond + n_body]
    carry = list(args[n_cond + n_body :])
    border = Border(ctx, carry)
    kinds = border.types
    loop = scf.WhileOp(kinds, border.pack(carry))
    before = loop.before.blocks.append(*kinds)
    after = loop.after.blocks.append(*kinds)
    with ir.InsertionPoint(before):
        values = border.unpack(before.arguments)
        (proceed,) = ctx.run(0, [*cond_consts, *values])
        scf.condition(proceed.value, list(before.arguments))
    with ir.InsertionPoint(after):
        values = border.unpack(after.arguments)
        scf.yield_(border.pack(ctx.run(1, [*body_consts, *values])))
    return border.unpack(loop.results)


# --- branches -------------------------------------------------------------------------


@emits("cond")
def _cond(ctx: Any, index: Array, *args: Any) -> list[Any]:
    border = Border.of_results(ctx)
    branches = list(range(len(ctx.op.regions)))
    return border.unpack(_choice(ctx, index, branches, args, border))


def _choice(
    ctx: Any, index: Array, branches: list[int], args: Any, border: Border
) -> list[ir.Value]:
    """Emits an scf.if for two branches; more branches nest in its else."""

    def emit(branch: int) -> list[ir.Value]:
        return border.pack(ctx.run(branch, args))

    first, *rest = branches
    if not rest:
        return emit(first)
    value = index.value
    if index.dtype == BOOL:
        true = constant(1, value.type)
        is_first = arith.xori(value, true)
    else:
        # An index outside is the nearest branch.
        is_first = arith.cmpi(
            arith.CmpIPredicate.sle, value, constant(first, value.type)
        )
    op = scf.IfOp(is_first, border.types, has_else=True)
    with ir.InsertionPoint(op.then_block):
        scf.yield_(emit(first))
    with ir.InsertionPoint(op.else_block):
        scf.yield_(_choice(ctx, index, rest, args, border))
    return list(op.results)
