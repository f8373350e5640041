# SPDX-License-Identifier: Apache-2.0
"""Index arrays that are ranges, and where masks change along them.

`plgpu.load(ref, start + jnp.arange(n), mask=start + jnp.arange(n) < size)` names
adjacent elements, as a slice does. The body says so only in its arithmetic, which is
followed here from the positions of the grid to the accesses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from pallas_gpu import _jax
from pallas_gpu.layouts.edges import Edges
from pallas_gpu.layouts.window import row_major_strides
from pallas_gpu.lowering.progressions import (
    Fact,
    Progression,
    join,
    literal,
    union,
    unknown,
)
from pallas_gpu.lowering.progressions import result as result_of
from pallas_gpu.primitives import _indices
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives.indexed import load_indexed_p, store_indexed_p
from pallas_gpu.walk import Body, bodies, walk, with_equations

_ACCESSES = (load_indexed_p, store_indexed_p)
_CALLS = ("jit", "pjit", "closed_call", "run_scoped", "custom_jvp_call")
# Facts of a loop's carries become weaker in each round; after these all are dropped,
# which another round cannot weaken.
_MOST_ROUNDS = 6


@dataclasses.dataclass(frozen=True)
class Found:
    """What is known of an access.

    Attributes:
      adjacent: as of `types.Selection`.
      mask_edges: where the mask changes along that axis; None if it may change with
        each element.
    """

    adjacent: tuple[int, int] | None
    mask_edges: Edges | None

    def met_with(self, other: Found) -> Found:
        """What holds in both executions of an access."""
        a, b = self.adjacent, other.adjacent
        if a is None or b is None or a[0] != b[0]:
            return Found(None, None)
        both = a[0], math.gcd(a[1], b[1])
        return Found(both, union(self.mask_edges, other.mask_edges))


def with_ranges(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Returns a body whose accesses by elements state which are adjacent."""
    accesses = [s.eqn for s in walk(jaxpr) if s.eqn.primitive in _ACCESSES]
    if not accesses:
        return jaxpr
    search = _Search()
    search.visit(jaxpr)
    return with_equations(jaxpr, {id(e): search.stated(e) for e in accesses})


class _Search:
    """The facts of a kernel's variables, and of its accesses by their identity."""

    def __init__(self) -> None:
        self._facts: dict[Any, Fact | None] = {}
        self.found: dict[int, Found] = {}

    def stated(self, access: _jax.JaxprEqn) -> _jax.JaxprEqn:
        """Returns an access that has been visited, with what was found."""
        found = self.found[id(access)]
        return access.replace(params={**access.params, **vars(found)})

    def _of(self, atom: Any) -> Fact | None:
        if isinstance(atom, _jax.Literal):
            return literal(atom.val)
        return self._facts.get(atom, unknown(atom.aval))

    def visit(self, jaxpr: _jax.Jaxpr) -> None:
        """Visits the equations of a jaxpr, and of what it runs."""
        for eqn in jaxpr.eqns:
            if eqn.primitive in _ACCESSES:
                self._access(eqn)
            inner = bodies(eqn)
            if inner:
                found = self._bodies(eqn, inner)
            else:
                found = [result_of(eqn, [self._of(x) for x in eqn.invars])]
            if len(found) == len(eqn.outvars):
                self._facts.update(zip(eqn.outvars, found, strict=True))

    def _bodies(self, eqn: _jax.JaxprEqn, inner: Sequence[Body]) -> list[Fact | None]:
        """Visits what an equation runs; returns facts of its results, or nothing."""
        match eqn.primitive.name:
            case "scan" | "while":
                return self._loop(eqn, inner)
            case "cond":
                results = [self._run(body, self._inputs(body)) for body in inner]
                return [_joined(facts) for facts in zip(*results, strict=True)]
        results = [self._run(body, self._inputs(body)) for body in inner]
        return results[0] if eqn.primitive.name in _CALLS else []

    def _inputs(self, body: Body) -> list[Fact | None]:
        pairs = zip(body.jaxpr.invars, body.inputs, strict=True)
        return [unknown(v.aval) if x is None else self._of(x) for v, x in pairs]

    def _run(self, body: Body, inputs: Sequence[Fact | None]) -> list[Fact | None]:
        self._facts.update(zip(body.jaxpr.invars, inputs, strict=True))
        self.visit(body.jaxpr)
        return [self._of(x) for x in body.jaxpr.outvars]

    def _loop(self, eqn: _jax.JaxprEqn, inner: Sequence[Body]) -> list[Fact | None]:
        body = inner[-1]
        pairs, inputs = _indices.carried(eqn, body.jaxpr), self._inputs(body)
        for round_ in range(_MOST_ROUNDS + 1):
            results = self._run(body, inputs)
            before = list(inputs)
            for i, j in pairs:
                inputs[i] = join(inputs[i], results[j])
            if inputs == before:
                break
            if round_ == _MOST_ROUNDS - 1:
                for i, _ in pairs:
                    inputs[i] = unknown(body.jaxpr.invars[i].aval)
        carries = {j: inputs[i] for i, j in pairs}
        for condition in inner[:-1]:
            consts = len(condition.inputs) - len(carries)
            known = [*self._inputs(condition)[:consts], *carries.values()]
            self._run(condition, known)
        return [carries.get(j, unknown(v.aval)) for j, v in enumerate(eqn.outvars)]

    def _access(self, eqn: _jax.JaxprEqn) -> None:
        found = self._found(eqn)
        before = self.found.get(id(eqn))
        self.found[id(eqn)] = found if before is None else before.met_with(found)

    def _found(self, eqn: _jax.JaxprEqn) -> Found:
        named = ops.unflatten(eqn.params["tree"], list(eqn.invars))
        operand = named.get("src") or named["dst"]
        rank, view = len(eqn.params["shape"]), eqn.params["view_shape"]
        strides = operand.window(operand.ref.aval.shape).strides
        if view is not None:
            strides = row_major_strides(view)
        facts = [_of_rank(self._of(x), rank) for x in named["indices"]]
        adjacent = _adjacent(strides, facts, eqn.params["shape"])
        given = eqn.params["adjacent"]
        if given is not None and (adjacent is None or adjacent[0] != given[0]):
            adjacent = given
        elif given is not None and adjacent is not None:
            adjacent = given[0], math.lcm(given[1], adjacent[1])
        if adjacent is None or named["mask"] is None:
            return Found(adjacent, Edges())
        mask = self._of(named["mask"])
        return Found(adjacent, mask[adjacent[0]] if isinstance(mask, tuple) else None)


def _joined(facts: Sequence[Fact | None]) -> Fact | None:
    first, *rest = facts
    for fact in rest:
        first = join(first, fact)
    return first


def _of_rank(fact: Fact | None, rank: int) -> Progression:
    """The fact of an index, which is a scalar or has the access's shape."""
    if not isinstance(fact, Progression):
        return Progression((None,) * rank)
    return fact if fact.strides else dataclasses.replace(fact, strides=(0,) * rank)


def _adjacent(
    strides: Sequence[int], indices: Sequence[Progression], shape: Sequence[int]
) -> tuple[int, int] | None:
    """The axis along which the last index counts and the others are the same."""
    places = [i for i, stride in enumerate(strides) if stride == 1]
    if not places:
        return None
    counting = indices[places[-1]]
    others = [*indices[: places[-1]], *indices[places[-1] + 1 :]]
    for axis, n in enumerate(shape):
        same = all(index.strides[axis] == 0 for index in others)
        if n > 1 and same and counting.strides[axis] == 1:
            return axis, math.gcd(
                *(
                    stride * math.gcd(index.divisor, *_strides_of_others(index, axis))
                    for stride, index in zip(strides, indices, strict=True)
                )
            )
    return None


def _strides_of_others(index: Progression, axis: int) -> list[int]:
    return [s for i, s in enumerate(index.strides) if i != axis and s is not None]
