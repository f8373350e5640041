# SPDX-License-Identifier: Apache-2.0
"""Values without elements: JAX's code makes them, and kernels are traced without them.

No register layout holds such a value, and it holds no information: a body that has
some is traced again, by an evaluation of its jaxpr that knows their types only. What an
operation makes of them is one without them: a concatenation loses parts, the padding
of nothing is a constant. This precedes all checks, so emulator and compiler see the
same body.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import _jax
from pallas_gpu.entry.check.references import without_elements
from pallas_gpu.entry.check.scatter import applied
from pallas_gpu.walk import bodies, walk


@dataclasses.dataclass(frozen=True)
class Empty:
    """A value without elements.

    Attributes:
      aval: its type.
    """

    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.aval.shape)


def is_empty(aval: Any) -> bool:
    """Whether a type is that of a value without elements; references are none."""
    is_ref = isinstance(aval, _jax.AbstractRef)
    return not is_ref and 0 in tuple(getattr(aval, "shape", ()))


def without_empty(
    closed: _jax.ClosedJaxpr, avals: Sequence[Any], axes: Sequence[tuple[str, int]]
) -> _jax.ClosedJaxpr:
    """Returns a body without values that have no elements.

    Args:
      closed: the body; references to arrays without elements stay.
      avals: types of its arguments, for the new trace.
      axes: axes of the launch.

    Raises:
      ShapeError: an operation has no meaning, or no form, without elements.
    """
    if not _has_empty(closed.jaxpr):
        return closed
    consts = [_known(x) for x in closed.consts]

    def body(*args: Any) -> None:
        _Evaluation(tuple(axes)).run(closed.jaxpr, consts, args, None)

    return _jax.trace(body, avals, axes)[0]


def _known(value: Any) -> Any:
    return Empty(jax.typeof(value)) if is_empty(jax.typeof(value)) else value


def _has_empty(jaxpr: _jax.Jaxpr) -> bool:
    inner = [jaxpr, *(b.jaxpr for site in walk(jaxpr) for b in site.bodies)]
    made = (var for body in inner for var in (*body.constvars, *body.invars))
    results = (var for site in walk(jaxpr) for var in site.eqn.outvars)
    return any(is_empty(var.aval) for var in (*made, *results))


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """The evaluation of a jaxpr, for a trace.

    Attributes:
      axes: axes of the launch.
    """

    axes: tuple[tuple[str, int], ...]

    def run(
        self,
        jaxpr: _jax.Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
        caller: _jax.JaxprEqn | None,
    ) -> list[Any]:
        """Returns the results; those without elements as `Empty`.

        Args:
          jaxpr: the jaxpr.
          consts, args: its inputs.
          caller: the innermost equation around it that has a line of the author's.
        """
        known: dict[Any, Any] = {}
        known.update(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))

        def value(atom: Any) -> Any:
            return atom.val if isinstance(atom, _jax.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            located = caller if _jax.where(eqn) is None else eqn
            with _jax.at_line_of(eqn):
                results = self._equation(eqn, [value(v) for v in eqn.invars], located)
            for var, result in zip(eqn.outvars, results, strict=True):
                known[var] = Empty(var.aval) if is_empty(var.aval) else result
        return [value(v) for v in jaxpr.outvars]

    def _equation(
        self, eqn: _jax.JaxprEqn, operands: list[Any], located: _jax.JaxprEqn | None
    ) -> Sequence[Any]:
        empty = [x for x in operands if isinstance(x, Empty)]
        results = [v.aval for v in eqn.outvars]
        if results and all(map(is_empty, results)) and not eqn.effects:
            return [Empty(aval) for aval in results]
        if any(_has_empty(body.jaxpr) for body in bodies(eqn)):
            return self._with_bodies(eqn, operands, located)
        if not empty and not any(map(is_empty, results)):
            return _jax.bind_again(eqn, operands)
        rule = _RULES.get(eqn.primitive.name)
        if rule is not None:
            return rule(eqn.params, results, operands)
        if not empty:
            return _jax.bind_again(eqn, operands)  # the checks know what it is
        where = None if located is None else _jax.where(located)
        raise without_elements(eqn.primitive.name, empty[0].shape).with_location(where)

    # --- operations that run jaxprs ---------------------------------------------------

    def _with_bodies(
        self, eqn: _jax.JaxprEqn, operands: list[Any], located: _jax.JaxprEqn | None
    ) -> Sequence[Any]:
        match eqn.primitive.name:
            case "scan":
                return self._scan(eqn, operands, located)
            case "while":
                return self._while(eqn, operands, located)
            case "cond":
                return self._branches(eqn, operands, located)
            case "jit" | "pjit" | "closed_call" | "custom_jvp_call" | "custom_vjp_call":
                return self._call(eqn, operands, located)
            case _:
                return self._scope(eqn, operands, located)

    def _inner(
        self,
        jaxpr: _jax.Jaxpr,
        consts: Sequence[Any],
        like: Sequence[Any],
        located: _jax.JaxprEqn | None,
    ) -> Callable[..., list[Any]]:
        """Returns a jaxpr as a function of its inputs that have elements.

        It returns its results that have elements. `like` are values for all inputs.
        """
        consts = [_known(x) for x in consts]

        def function(*args: Any) -> list[Any]:
            filled = _filled(like, args)
            return _present(self.run(jaxpr, consts, filled, located))

        return function

    def _call(self, eqn: Any, operands: list[Any], located: Any) -> Sequence[Any]:
        (body,) = bodies(eqn)
        consts = _consts(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))
        function = self._inner(body.jaxpr, consts, operands, located)
        function.__name__ = str(eqn.params.get("name", eqn.primitive.name))
        return _completed(eqn, jax.jit(function)(*_present(operands)))

    def _scope(self, eqn: Any, operands: list[Any], located: Any) -> Sequence[Any]:
        """An operation with a body of operands and of what it makes: references."""
        inner = eqn.params["jaxpr"]
        (body,) = bodies(eqn)
        made = [v.aval for v in body.jaxpr.invars[len(operands) :]]
        given = _present(operands)
        like = [*operands, *made]
        function = self._inner(body.jaxpr, _consts(inner), like, located)
        avals = [v.aval for v, x in zip(eqn.invars, operands, strict=True)
                 if not isinstance(x, Empty)]  # fmt: skip
        closed, _ = _jax.trace(function, [*avals, *made], self.axes)
        jaxpr = closed if isinstance(inner, _jax.ClosedJaxpr) else closed.jaxpr
        again = eqn.replace(params={**eqn.params, "jaxpr": jaxpr})
        return _completed(eqn, _jax.bind_again(again, given))

    def _branches(self, eqn: Any, operands: list[Any], located: Any) -> Sequence[Any]:
        index, *rest = operands
        avals = [v.aval for v in eqn.invars[1:] if not is_empty(v.aval)]
        branches = tuple(
            _jax.trace(
                self._inner(branch.jaxpr, branch.consts, rest, located),
                avals,
                self.axes,
            )[0]
            for branch in eqn.params["branches"]
        )
        again = eqn.replace(params={**eqn.params, "branches": branches})
        return _completed(eqn, _jax.bind_again(again, [index, *_present(rest)]))

    def _scan(self, eqn: Any, operands: list[Any], located: Any) -> Sequence[Any]:
        closed, (n_consts, n_carry) = eqn.params["jaxpr"], _jax.scan_arity(eqn.params)
        consts, rest = operands[:n_consts], operands[n_consts:]
        carry, xs = rest[:n_carry], rest[n_carry:]

        def step(carried: Any, parts: Any) -> tuple[Any, Any]:
            sliced = [v.aval for v in closed.jaxpr.invars[n_consts + n_carry :]]
            slices = [Empty(aval) if is_empty(aval) else aval for aval in sliced]
            inputs = [*consts, *_filled(carry, carried), *_filled(slices, parts)]
            fixed = [_known(x) for x in closed.consts]
            results = self.run(closed.jaxpr, fixed, inputs, located)
            return _present(results[:n_carry]), _present(results[n_carry:])

        last, ys = lax.scan(
            step,
            _present(carry),
            _present(xs),
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return _completed(eqn, [*last, *ys])

    def _while(self, eqn: Any, operands: list[Any], located: Any) -> Sequence[Any]:
        params = eqn.params
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        initial = operands[n_cond + n_body :]

        def over(closed: Any, consts: Sequence[Any]) -> Callable[..., list[Any]]:
            fixed = [_known(x) for x in closed.consts]

            def function(carried: Any) -> list[Any]:
                inputs = [*consts, *_filled(initial, carried)]
                return _present(self.run(closed.jaxpr, fixed, inputs, located))

            return function

        goes_on = over(params["cond_jaxpr"], operands[:n_cond])
        body = over(params["body_jaxpr"], operands[n_cond : n_cond + n_body])
        last = lax.while_loop(lambda c: goes_on(c)[0], body, _present(initial))
        return _completed(eqn, last)


def _present(values: Sequence[Any]) -> list[Any]:
    return [x for x in values if not isinstance(x, Empty)]


def _filled(like: Sequence[Any], present: Sequence[Any]) -> list[Any]:
    """Returns the present values, and those of `like` that are empty, in its order."""
    rest = iter(present)
    return [x if isinstance(x, Empty) else next(rest) for x in like]


def _completed(eqn: _jax.JaxprEqn, present: Sequence[Any]) -> list[Any]:
    rest = iter(present)
    return [Empty(v.aval) if is_empty(v.aval) else next(rest) for v in eqn.outvars]


def _consts(jaxpr: Any) -> Sequence[Any]:
    return jaxpr.consts if isinstance(jaxpr, _jax.ClosedJaxpr) else ()


# --- operations of which some operands or results have no elements -----------------

Rule = Callable[[Mapping[str, Any], Sequence[Any], list[Any]], Sequence[Any]]


def _concatenate(params: Any, results: Any, operands: list[Any]) -> Sequence[Any]:
    parts = _present(operands)
    return [
        parts[0] if len(parts) == 1 else lax.concatenate(parts, params["dimension"])
    ]


def _pad(params: Any, results: Any, operands: list[Any]) -> Sequence[Any]:
    return [lax.broadcast(operands[1], results[0].shape)]


def _split(params: Any, results: Any, operands: list[Any]) -> Sequence[Any]:
    sizes = [int(n) for n in params["sizes"]]
    parts = iter(lax.split(operands[0], [n for n in sizes if n], params["axis"]))
    return [next(parts) if n else Empty(r) for n, r in zip(sizes, results, strict=True)]


def _first_operand(params: Any, results: Any, operands: list[Any]) -> Sequence[Any]:
    return [operands[0]]


def _filled_with(neutral: Callable[[Any], Any]) -> Rule:
    """The rule of an operation whose result is the same for all empty operands."""

    def rule(params: Any, results: Any, operands: list[Any]) -> Sequence[Any]:
        (aval,) = results
        return [lax.full(aval.shape, neutral(aval.dtype), aval.dtype)]

    return rule


def _least(dtype: Any) -> Any:
    if dtype == np.bool_:
        return False
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _greatest(dtype: Any) -> Any:
    if dtype == np.bool_:
        return True
    return np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _ones(dtype: Any) -> Any:
    return True if dtype == np.bool_ else jnp.iinfo(dtype).max if jnp.issubdtype(
        dtype, jnp.unsignedinteger) else -1  # fmt: skip


def _zero(dtype: Any) -> Any:
    return False if dtype == np.bool_ else 0


def _gather(params: Any, results: Any, operands: list[Any]) -> Sequence[Any]:
    """A gather at one position without coordinates: the first part of the operand."""
    operand, indices = operands
    if isinstance(operand, Empty) or indices.shape != (0,):
        raise without_elements("gather", operand.shape)
    part = lax.slice(operand, [0] * operand.ndim, params["slice_sizes"])
    return [part.reshape(results[0].shape)]


def _scatter(combine: Callable[[Any, Any], Any]) -> Rule:
    """The rule of a scatter: of no updates, or at one position without coordinates."""

    def rule(params: Any, results: Any, operands: list[Any]) -> Sequence[Any]:
        operand, indices, updates = operands
        if isinstance(updates, Empty):
            return [operand]
        inserted = params["dimension_numbers"].inserted_window_dims
        sizes = iter(updates.shape)
        if indices.shape != (0,):
            raise without_elements("scatter", indices.shape)
        shape = [1 if d in inserted else next(sizes) for d in range(operand.ndim)]
        starts = [0] * operand.ndim
        old = lax.slice(operand, starts, shape)
        if combine is _second and params["update_jaxpr"] is not None:
            part = applied(params, old)
        else:
            part = combine(old, updates.reshape(shape))
        if tuple(shape) == tuple(operand.shape):
            return [part]
        return [lax.dynamic_update_slice(operand, part, starts)]

    return rule


def _second(old: Any, new: Any) -> Any:
    return new


_RULES: dict[str, Rule] = {
    "concatenate": _concatenate,
    "pad": _pad,
    "split": _split,
    "dynamic_update_slice": _first_operand,
    "reduce_sum": _filled_with(_zero),
    "reduce_prod": _filled_with(lambda dtype: 1),
    "reduce_max": _filled_with(_least),
    "reduce_min": _filled_with(_greatest),
    "reduce_or": _filled_with(_zero),
    "reduce_xor": _filled_with(_zero),
    "reduce_and": _filled_with(_ones),
    "dot_general": _filled_with(_zero),
    "gather": _gather,
    "scatter": _scatter(_second),
    "scatter-add": _scatter(lax.add),
    "scatter-sub": _scatter(lax.sub),
    "scatter-mul": _scatter(lax.mul),
    "scatter-min": _scatter(lax.min),
    "scatter-max": _scatter(lax.max),
}
for _name in ("add", "sub", "mul", "min", "max"):
    _RULES[f"scatter_{_name}"] = _RULES[f"scatter-{_name}"]
