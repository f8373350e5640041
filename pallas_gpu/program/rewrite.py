# SPDX-License-Identifier: Apache-2.0
"""The two ways to change a body: equations are replaced, or all are traced again.

A `Rewrite` replaces equations and leaves all variables as they are: what it does not
change stays the same object, so that what is known of it stays known. A `Retrace`
evaluates a body in a new trace, where other values may stand for its variables:
references of another type, pairs of arrays, nothing at all. Both follow calls, loops,
branches and scopes; a pass says only what becomes of an equation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax import lax

from pallas_gpu import _jax, errors
from pallas_gpu.layouts.registers.linear import WARPS
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.bodies import bodies, equations
from pallas_gpu.program.build import CALLS

# --- equations are replaced -----------------------------------------------------------


class Rewrite:
    """Replaces equations of a jaxpr and of all that it runs.

    A jaxpr that is run twice stays one, as its scopes are allocated once.
    """

    def __init__(self) -> None:
        self._done: dict[Any, _jax.Jaxpr] = {}

    def replacement(
        self, eqn: _jax.JaxprEqn, caller: _jax.JaxprEqn | None
    ) -> Sequence[_jax.JaxprEqn] | None:
        """Returns what replaces an equation; None rewrites the bodies that it runs.

        Args:
          eqn: the equation.
          caller: the innermost equation around it that has a line of the author's.
        """
        return None

    def prepared(self, jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
        """Returns what a body is before its equations are replaced."""
        return jaxpr

    def appended(self, jaxpr: _jax.Jaxpr) -> Sequence[_jax.JaxprEqn]:
        """Returns what the end of a body gets."""
        return ()

    def is_dropped_unread(self, eqn: _jax.JaxprEqn) -> bool:
        """Whether an equation is left out if nothing reads its results."""
        return False

    def within(self, eqn: _jax.JaxprEqn) -> Rewrite:
        """Returns what rewrites the bodies of an equation."""
        return self

    def key(self, jaxpr: _jax.Jaxpr, caller: _jax.JaxprEqn | None) -> Any:
        """Returns what determines the result for a body."""
        return jaxpr

    def body(
        self, jaxpr: _jax.Jaxpr, caller: _jax.JaxprEqn | None = None
    ) -> _jax.Jaxpr:
        """Returns the jaxpr rewritten; itself if nothing changes."""
        key = self.key(jaxpr, caller)
        if key not in self._done:
            self._done[key] = self._rewritten(jaxpr, caller)
        return self._done[key]

    def with_bodies(
        self, eqn: _jax.JaxprEqn, caller: _jax.JaxprEqn | None = None
    ) -> _jax.JaxprEqn:
        """Returns an equation whose bodies are rewritten; itself if nothing changes."""
        inner, rewrite = [b.jaxpr for b in bodies(eqn)], self.within(eqn)
        new = {old: rewrite.body(old, caller) for old in inner}
        if all(old is other for old, other in new.items()):
            return eqn
        params = {name: _replaced(value, new) for name, value in eqn.params.items()}
        effects = frozenset(eqn.effects) | _kernel_effects(new.values())
        return eqn.replace(params=params, effects=effects)

    def _rewritten(self, jaxpr: _jax.Jaxpr, caller: _jax.JaxprEqn | None) -> _jax.Jaxpr:
        eqns: list[_jax.JaxprEqn] = []
        for eqn in self.prepared(jaxpr).eqns:
            located = caller if _jax.where(eqn) is None else eqn
            new = self.replacement(eqn, located)
            eqns += [self.with_bodies(eqn, located)] if new is None else new
        eqns = self._read([*eqns, *self.appended(jaxpr)], jaxpr.outvars)
        if [*map(id, eqns)] == [*map(id, jaxpr.eqns)]:
            return jaxpr
        effects = frozenset(jaxpr.effects) | _kernel_effects(eqns)
        return jaxpr.replace(eqns=eqns, effects=effects, consts=jaxpr.consts)

    def _read(
        self, eqns: list[_jax.JaxprEqn], results: Sequence[Any]
    ) -> list[_jax.JaxprEqn]:
        read, kept = set(variables(results)), []
        for eqn in reversed(eqns):
            if read.isdisjoint(eqn.outvars) and self.is_dropped_unread(eqn):
                continue
            kept.append(eqn)
            read.update(variables(eqn.invars))
        return kept[::-1]


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns operands without the literals."""
    return [x for x in atoms if not isinstance(x, _jax.Literal)]


def _replaced(value: Any, new: Mapping[_jax.Jaxpr, _jax.Jaxpr]) -> Any:
    if isinstance(value, tuple):
        return tuple(_replaced(x, new) for x in value)
    return new.get(value, value) if isinstance(value, _jax.Jaxpr) else value


def _kernel_effects(parts: Any) -> frozenset[Any]:
    """The effects of our operations among those of equations or jaxprs."""
    found = {effect for part in parts for effect in part.effects}
    return frozenset(e for e in found if isinstance(e, registry.KernelEffect))


def with_equations(
    jaxpr: _jax.Jaxpr,
    changed: Mapping[int, _jax.JaxprEqn | None],
    before: Mapping[int, _jax.JaxprEqn] = MappingProxyType({}),
    at_end: Mapping[_jax.Jaxpr, _jax.JaxprEqn] = MappingProxyType({}),
    unread: frozenset[int] = frozenset(),
) -> _jax.Jaxpr:
    """Returns a jaxpr with equations replaced and inserted, in all that it runs.

    Args:
      jaxpr: the jaxpr; itself is the result if nothing changes.
      changed: the identity of an equation -> what replaces it; None leaves it out.
      before: the identity of an equation -> what is inserted before it.
      at_end: a body -> what is appended to it.
      unread: identities of equations that are left out if nothing reads their results.
    """
    if not (changed or before or at_end):
        return jaxpr
    return _Listed(changed, before, at_end, unread).body(jaxpr)


class _Listed(Rewrite):
    """See `with_equations`."""

    def __init__(self, changed: Any, before: Any, at_end: Any, unread: frozenset[int]):
        super().__init__()
        self._changed, self._before, self._at_end = changed, before, at_end
        self._unread = unread

    def replacement(
        self, eqn: _jax.JaxprEqn, caller: _jax.JaxprEqn | None
    ) -> Sequence[_jax.JaxprEqn] | None:
        if id(eqn) not in self._changed and id(eqn) not in self._before:
            return None
        first = self._before.get(id(eqn))
        if id(eqn) in self._changed:
            then = self._changed[id(eqn)]
        else:
            then = self.with_bodies(eqn)
        return [x for x in (first, then) if x is not None]

    def appended(self, jaxpr: _jax.Jaxpr) -> Sequence[_jax.JaxprEqn]:
        return [self._at_end[jaxpr]] if jaxpr in self._at_end else []

    def is_dropped_unread(self, eqn: _jax.JaxprEqn) -> bool:
        return id(eqn) in self._unread


def call_of(
    function: Callable[..., Any], operands: Sequence[Any], axes: Any, name: str
) -> tuple[_jax.JaxprEqn | None, _jax.ClosedJaxpr]:
    """Returns the equation that calls a function of values, and the jaxpr it is in.

    None in place of the equation if the jaxpr has others.
    """
    closed, _ = _jax.trace(jax.jit(function), operands, axes)
    if len(closed.eqns) != 1:
        return None, closed
    (eqn,) = closed.eqns
    return eqn.replace(params={**eqn.params, "name": name}), closed


# --- all equations are traced again ---------------------------------------------------


class Deferred:
    """A value that becomes an array where an operation needs one."""

    def array(self) -> Any:
        """Returns the array."""
        raise NotImplementedError


def settled(values: Sequence[Any]) -> list[Any]:
    """Returns values, those that are deferred as arrays."""
    return [x.array() if isinstance(x, Deferred) else x for x in values]


class Retrace:
    """Evaluates jaxprs in the current trace.

    A value stands for each variable: a JAX value, a reference, a view, or a pytree of
    them, which loops and branches carry as they carry arrays. An equation is bound
    again as it is, unless a rule has results for it. What runs jaxprs is traced again
    if something in them is replaced, or if they get values of other types.
    """

    def results(self, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any] | None:
        """Returns the results of an equation that a rule replaces, else None."""
        return None

    def is_replaced(self, eqn: _jax.JaxprEqn) -> bool:
        """Whether a rule may replace an equation."""
        return False

    def bound(self, aval: Any, value: Any) -> Any:
        """Returns what stands for a variable of a type that gets a value."""
        return value

    def replaces_in(self, jaxpr: _jax.Jaxpr) -> bool:
        """Whether something in a jaxpr, or in what it runs, may be replaced."""
        return any(map(self.is_replaced, equations(jaxpr)))

    def run(
        self,
        jaxpr: _jax.Jaxpr,
        operands: Sequence[Any],
        consts: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Returns the results of a jaxpr.

        Args:
          jaxpr: the jaxpr.
          operands: what stands for its inputs.
          consts: what stands for what it closes over; by default its own consts.

        Raises:
          Errors of the rules, with the line of the equation.
        """
        consts = _jax.consts_of(jaxpr) if consts is None else consts
        known: dict[Any, Any] = {}
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        self.bind(known, inputs, [*consts, *operands])
        return self.evaluated(jaxpr.eqns, known, jaxpr.outvars)

    def evaluated(
        self, eqns: Sequence[_jax.JaxprEqn], known: dict[Any, Any], outs: Sequence[Any]
    ) -> list[Any]:
        """Returns the values of variables that equations make, or that are known."""
        self.evaluate(eqns, known)
        return values_of(outs, known)

    def evaluate(self, eqns: Sequence[_jax.JaxprEqn], known: dict[Any, Any]) -> None:
        """Adds to the values of variables those that equations make of them."""
        for eqn in eqns:
            with at_line_of(eqn):
                results = self.equation(eqn, values_of(eqn.invars, known))
                self.bind(known, eqn.outvars, results)

    def bind(
        self, known: dict[Any, Any], variables: Sequence[Any], values: Sequence[Any]
    ) -> None:
        """Adds the values of variables to those that are known."""
        for var, value in zip(variables, values, strict=True):
            known[var] = self.bound(var.aval, value)

    def equation(self, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
        """Returns the results of an equation."""
        results = self.results(eqn, operands)
        if results is not None:
            return results
        operands = settled(operands)
        if not is_followed(eqn) or not self._is_changed(eqn, operands):
            return _jax.bind_again(eqn, operands)
        return self.followed(eqn, operands)

    def followed(self, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
        """Traces control flow again; returns its results."""
        return _CONTROL.get(eqn.primitive.name, _call)(self, eqn, operands)

    def _is_changed(self, eqn: _jax.JaxprEqn, operands: Sequence[Any]) -> bool:
        inner = (body.jaxpr for body in bodies(eqn))
        if self.is_replaced(eqn) or any(map(self.replaces_in, inner)):
            return True
        pairs = zip(operands, eqn.invars, strict=True)
        return any(_is_of_another_type(x, var.aval) for x, var in pairs)

    def loop(
        self, eqn: _jax.JaxprEqn, operands: Sequence[Any]
    ) -> tuple[Callable[[Any], Any], Callable[[Any], list[Any]], list[Any]]:
        """Returns condition and step of a `while`, and its initial carry."""
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        of_cond, of_body = operands[:n_cond], operands[n_cond : n_cond + n_body]
        cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        return (
            lambda carry: self.run(cond, [*of_cond, *carry])[0],
            lambda carry: settled(self.run(body, [*of_body, *carry])),
            list(operands[n_cond + n_body :]),
        )


def values_of(atoms: Sequence[Any], known: Mapping[Any, Any]) -> list[Any]:
    """Returns the values of variables and literals."""
    return [x.val if isinstance(x, _jax.Literal) else known[x] for x in atoms]


@contextlib.contextmanager
def at_line_of(eqn: _jax.JaxprEqn) -> Iterator[None]:
    """Gives what is traced, and errors, the source line of an equation."""
    with errors.at(lambda: _jax.where(eqn)), _jax.at_line_of(eqn):
        yield


def is_followed(eqn: _jax.JaxprEqn) -> bool:
    """Whether an equation is control flow, of which `Retrace` traces the bodies."""
    name = eqn.primitive.name
    if _CONTROL.get(name) is _scope:
        # JAX's Pallas has a `run_scoped` of its own, whose body has other operands.
        return registry.operation(eqn.primitive) is not None
    return name in _CONTROL.keys() | CALLS.keys()


def _is_of_another_type(value: Any, aval: Any) -> bool:
    leaves = jax.tree.leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return True
    is_ref = isinstance(aval, _jax.AbstractRef)
    return is_ref and type(jax.typeof(value)) is not type(aval)


def _call(trace: Retrace, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    """A function is inlined: what it closes over becomes what the body does."""
    return trace.run(eqn.params[CALLS[eqn.primitive.name]], operands)


def _scan(trace: Retrace, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    params, (n_consts, n_carry) = eqn.params, _jax.scan_arity(eqn.params)
    consts, rest = operands[:n_consts], operands[n_consts:]

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = settled(trace.run(params["jaxpr"], [*consts, *carry, *xs]))
        return results[:n_carry], results[n_carry:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, rest[:n_carry], rest[n_carry:], **options)
    return [*carry, *ys]


def _while(trace: Retrace, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    return lax.while_loop(*trace.loop(eqn, operands))


def _cond(trace: Retrace, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    index, *rest = operands
    leaves, tree = jax.tree.flatten(rest)
    avals = [*map(jax.typeof, leaves)]

    def traced(branch: _jax.ClosedJaxpr) -> tuple[_jax.ClosedJaxpr, Any]:
        def body(*leaves: Any) -> list[Any]:
            return settled(trace.run(branch, tree.unflatten(leaves)))

        return _jax.trace(body, avals)

    branches, trees = zip(*map(traced, eqn.params["branches"]), strict=True)
    consts = [const for branch in branches for const in branch.consts]
    if consts:
        branches = _with_operands(branches, consts, avals)
    again = eqn.replace(params={**eqn.params, "branches": branches})
    results = _jax.bind_again(again, [index, *consts, *leaves])
    return jax.tree.unflatten(trees[0], results)


def _with_operands(
    branches: Sequence[_jax.ClosedJaxpr], consts: Sequence[Any], avals: Sequence[Any]
) -> tuple[_jax.ClosedJaxpr, ...]:
    """Returns branches that get the consts of all of them as their first operands."""
    rest, types = iter(range(len(consts))), [*map(jax.typeof, consts), *avals]

    def traced(branch: _jax.ClosedJaxpr) -> _jax.ClosedJaxpr:
        own = [next(rest) for _ in branch.consts]

        def body(*args: Any) -> list[Any]:
            return Retrace().run(branch, args[len(consts) :], [args[i] for i in own])

        return _jax.trace(body, types)[0]

    return tuple(map(traced, branches))


def _scope(trace: Retrace, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any]:
    """An operation with a body of its operands and of what it makes."""
    inner, params = eqn.params["jaxpr"], dict(eqn.params)
    made = [v.aval for v in params.pop("jaxpr").invars[len(operands) :]]
    name = params.get("axis_name")

    def body(*fresh: Any) -> list[Any]:
        return settled(trace.run(inner, [*operands, *fresh]))

    axes = [] if name is None else [(name, WARPS)]
    return bound_body(eqn.primitive, *_jax.trace(body, made, axes), **params)


def bound_body(primitive: Any, body: _jax.ClosedJaxpr, tree: Any, **params: Any) -> Any:
    """Binds an operation that runs a body; what that closes over are its operands.

    Args:
      primitive: the operation.
      body: a function of what the operation makes.
      tree: the structure of the results.
      **params: its other parameters.
    """
    jaxpr = _jax.convert_constvars_jaxpr(body.jaxpr)
    with _jax.trace_without_ref_rules():
        results = primitive.bind(*body.consts, jaxpr=jaxpr, **params)
    return jax.tree.unflatten(tree, results)


_CONTROL: dict[str, Callable[[Retrace, _jax.JaxprEqn, list[Any]], list[Any]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "run_scoped": _scope,
    "warp_map": _scope,
}
