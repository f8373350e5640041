# SPDX-License-Identifier: Apache-2.0
"""Products whose operands stay where they are: in SMEM, and in the accumulator.

`jnp.dot(a_ref[...], b_ref[...])` loads two values. The tensor core reads them from SMEM
instead if nothing is written between the loads and the product. `acc + jnp.dot(a, b)`
becomes a product that starts with `acc`, and `acc_ref[...] += jnp.dot(a, b)` for a
`plgpu.ACC` becomes one that adds to it: the instructions of a hand-written kernel, with
no sum in registers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pallas_gpu import _jax, types
from pallas_gpu.composites import mma, wgmma
from pallas_gpu.entry import expand
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.tensor_cores.dot_general import Problem
from pallas_gpu.program.bodies import Equations
from pallas_gpu.program.rewrite import with_equations


@expand.prepares
def leave_in_place(jaxpr: _jax.Jaxpr, kernel: expand.Kernel) -> _jax.Jaxpr:
    """Returns a body whose products read references where they can."""
    body = Equations(jaxpr)
    if not any(map(_is_product, body.listed)):
        return jaxpr
    changed, unread = _Body(body, kernel).changes()
    return with_equations(jaxpr, changed, unread=unread)


def _is_product(eqn: _jax.JaxprEqn) -> bool:
    return eqn.primitive.name == "dot_general"


@dataclasses.dataclass
class _Fused:
    """A product and what it is added to.

    Attributes:
      at: the position of the equation that it replaces.
      out: the variables of its results.
      init: a value to which it is added.
      acc: the accumulator to which it is added.
      absorbed: positions of equations whose results nothing else needs.
    """

    at: int
    out: list[Any]
    init: Any = None
    acc: Any = None
    absorbed: tuple[int, ...] = ()


class _Body:
    def __init__(self, body: Equations, kernel: expand.Kernel):
        self._kernel = kernel
        self._eqns, self._position = body.listed, body.position
        self._readers = body.readers
        self._claimed: set[int] = set()
        # Loads and transposes that products need no longer.
        self._passed: set[int] = set()

    def changes(self) -> tuple[dict[int, Any], frozenset[int]]:
        """Returns what replaces equations, and which are left out if unread."""
        replaced: dict[int, _jax.JaxprEqn] = {}
        dropped: set[int] = set()
        for i, eqn in enumerate(self._eqns):
            if not _is_product(eqn):
                continue
            problem = Problem.of(eqn)
            fused = self._fused(i, problem)
            operands = self._operands(eqn, problem, fused)
            unchanged = dict(zip("ab", eqn.invars, strict=True))
            dimensions = self._without_transposes(operands, problem)
            if fused.at == i and operands == unchanged:
                continue
            replaced[fused.at] = _with_operands(eqn, operands, fused, dimensions)
            dropped.update({i, *fused.absorbed} - {fused.at})
        changed = {**replaced, **dict.fromkeys(dropped)}
        return (
            {id(self._eqns[i]): eqn for i, eqn in changed.items()},
            frozenset(id(self._eqns[i]) for i in self._passed),
        )

    # --- sums -------------------------------------------------------------------------

    def _fused(self, i: int, problem: Problem) -> _Fused:
        out = list(self._eqns[i].outvars)
        plain = _Fused(i, out)
        if not problem.adds_in_result_type or problem.is_float8:
            return plain
        j = self._only_reader(out[0])
        if j is None or self._eqns[j].primitive.name != "add" or j in self._claimed:
            return plain
        add = self._eqns[j]
        init = next((x for x in add.invars if x is not out[0]), None)
        if init is None or init.aval.shape != out[0].aval.shape:
            return plain
        self._claimed.add(j)
        fused = _Fused(j, list(add.outvars), init, absorbed=(i,))
        return self._into_accumulator(fused, problem) or fused

    def _into_accumulator(self, fused: _Fused, problem: Problem) -> _Fused | None:
        """Returns the product as one that adds to the accumulator it is stored to."""
        if not wgmma.multiplies(problem, self._kernel):
            return None
        k, g = self._only_reader(fused.out[0]), self._position(fused.init)
        if k is None or g is None:
            return None
        swap, get = self._eqns[k], self._eqns[g]
        if swap.primitive is not _jax.swap_p or get.primitive is not _jax.get_p:
            return None
        ref = swap.invars[0]
        whole = isinstance(ref.aval, types.AccumulatorRef) and all(
            tuple(v.aval.shape) == tuple(ref.aval.shape) for v in get.outvars
        )
        unread = not self._readers(swap.outvars[0])
        if not (whole and unread and get.invars[0] is ref):
            return None
        if self._only_reader(fused.init) is None or not self._is_quiet(g, k, ref):
            return None
        return _Fused(k, [], None, ref, (*fused.absorbed, fused.at, g))

    def _only_reader(self, var: Any) -> int | None:
        """Returns the position of the only equation that reads a value once."""
        readers = self._readers(var)
        if len(readers) != 1 or readers[0] == len(self._eqns):
            return None
        return readers[0]

    # --- loads ------------------------------------------------------------------------

    def _operands(
        self, eqn: _jax.JaxprEqn, problem: Problem, fused: _Fused
    ) -> dict[str, Any]:
        operands = dict(zip("ab", eqn.invars, strict=True))
        if problem.is_of_matrices or problem.is_of_stacks:
            operands.update(self._loads(operands, problem, fused.at))
        if fused.init is not None:
            operands["init"] = fused.init
        if fused.acc is not None:
            operands["acc"] = ops.RefOperand(fused.acc)
        return operands

    def _without_transposes(self, operands: dict[str, Any], problem: Problem) -> Any:
        """Replaces values that are transposes, and returns dimensions to match.

        So that the scratch of a product stores them in the order of the registers, and
        a product of a matrix with its own transpose stores the matrix once.
        """
        contracted = list(problem.contracted)
        if problem.is_of_matrices:
            for side, name in enumerate("ab"):
                while (i := self._transpose(operands[name])) is not None:
                    self._passed.add(i)
                    operands[name] = self._eqns[i].invars[0]
                    contracted[side] = (1 - contracted[side][0],)
        return (tuple(contracted), problem.batch)

    def _transpose(self, operand: Any) -> int | None:
        """Returns the position of the transpose that an operand is, if it is one."""
        if isinstance(operand, ops.RefOperand):
            return None
        i = self._position(operand)
        return i if i is not None and _is_transpose(self._eqns[i]) else None

    def _loads(
        self, operands: dict[str, Any], problem: Problem, position: int
    ) -> dict[str, ops.RefOperand]:
        """Returns the operands that a product at a position reads from SMEM."""
        loads = {name: self._load(x, position) for name, x in operands.items()}
        found = {name: load for name, load in loads.items() if load is not None}
        if wgmma.multiplies(problem, self._kernel):
            return {
                name: load
                for name, load in found.items()
                if self._is_readable(load, name, problem)
            }
        wanted = problem.operand_type
        in_parts = not problem.is_split and mma.are_read_in_parts(
            problem.mnk[2], problem.dtypes[0]
        )
        same = all(d == (wanted or d) for d in problem.dtypes)
        return found if in_parts and same and len(found) == 2 else {}

    def _load(self, atom: Any, position: int) -> ops.RefOperand | None:
        """Returns the part of an array in SMEM that a value is when it is used.

        None if it is no such load, or if what it was loaded from may have changed.
        """
        turned = False
        while (i := self._position(atom)) is not None:
            eqn = self._eqns[i]
            self._passed.add(i)
            if _is_transpose(eqn):
                turned, atom = not turned, eqn.invars[0]
                continue
            if eqn.primitive is not _jax.get_p:
                return None
            ref = eqn.invars[0]
            in_smem = isinstance(ref.aval, types.KernelRef) and (
                ref.aval.memory_space is types.SMEM
            )
            if not in_smem or not self._is_quiet(i, position, ref):
                return None
            steps = jax.tree.unflatten(eqn.params["tree"], eqn.invars[1:])
            if turned:
                steps = (*steps, _jax.TransposeTransform((1, 0)))
            return ops.RefOperand(ref, tuple(steps))
        return None

    def _is_quiet(self, first: int, last: int, ref: Any) -> bool:
        """Whether nothing between two positions may write what a reference names."""
        return not any(_may_write(e, ref) for e in self._eqns[first + 1 : last])

    def _is_readable(self, load: ops.RefOperand, name: str, problem: Problem) -> bool:
        aval = load.ref.aval
        inferred = self._kernel.semantics is types.LoweringSemantics.Warpgroup
        # A member of a union is row-major without transforms; see `RefUnion`.
        inferred = inferred and aval.storage.overlay is None
        if not (inferred or aval.transforms):
            return False
        if problem.dtypes["ab".index(name)] != (problem.operand_type or aval.dtype):
            return False
        steps = jax.tree.map(_static, load.transforms)
        view: Any = types.RefView(aval, tuple(steps))
        if problem.is_of_stacks:
            view = view.at[0]
        return wgmma.is_readable(wgmma.operand(problem, name, view), name)


def _is_transpose(eqn: _jax.JaxprEqn) -> bool:
    return eqn.primitive.name == "transpose" and tuple(eqn.params["permutation"]) == (
        1,
        0,
    )


def _static(x: Any) -> Any:
    return x.val if isinstance(x, _jax.Literal) else x


def _may_write(eqn: _jax.JaxprEqn, ref: Any) -> bool:
    """Whether an equation may change what threads read from a reference."""
    if all(isinstance(effect, _jax.ReadEffect) for effect in eqn.effects):
        return False
    if eqn.primitive in (_jax.swap_p, _jax.addupdate_p):
        other = eqn.invars[0]
        return other is ref or other.aval.memory_space is ref.aval.memory_space
    if eqn.primitive.name == "load":
        operation = registry.operation(eqn.primitive)
        return operation is not None and bool(operation.writes)
    return True


def _with_operands(
    eqn: _jax.JaxprEqn, operands: dict[str, Any], fused: _Fused, dimensions: Any
) -> _jax.JaxprEqn:
    """Returns the product of other operands; without `b` both are the same value."""
    if operands["a"] is operands["b"]:
        operands = {name: x for name, x in operands.items() if name != "b"}
    leaves, tree = jax.tree.flatten(operands)
    params = {**eqn.params, "tree": tree, "dimension_numbers": dimensions}
    return eqn.replace(invars=leaves, outvars=fused.out, params=params)
