# SPDX-License-Identifier: Apache-2.0
"""Loops that count: `plgpu.loop`, and `fori_loop` and `scan` of JAX, in one form.

What a loop adds the same number to in each iteration is computed from the index, so
that it is known iterations before.
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
from pallas_gpu.entry import control
from pallas_gpu.program.bodies import bodies
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import growth
from pallas_gpu.program.nodes import Value
from pallas_gpu.program.rewrite import Retrace, settled


@dataclasses.dataclass(frozen=True)
class Counted:
    """A loop that counts.

    Attributes:
      jaxpr: its body, as it was written.
      consts: operands that it does not change.
      carry: the first values of what it does change, counters excepted.
      trips: the number of iterations, none if it is negative.
      unroll: see `loop`.
      step: `step(trace, consts, carry, index)` returns the next carry.
      results: returns the results of the equation from the last carry.
      given: the number of consts that are the equation's own.
    """

    jaxpr: Any
    consts: Sequence[Any]
    carry: Sequence[Any]
    trips: Any
    unroll: Any
    step: Callable[[Retrace, Sequence[Any], Sequence[Any], Any], list[Any]]
    results: Callable[[Sequence[Any]], list[Any]]
    given: int

    @classmethod
    def of(cls, eqn: _jax.JaxprEqn, operands: Sequence[Any]) -> Counted | None:
        """Returns the loop of an equation; None for one that does not count.

        Args:
          eqn: a `staged_loop`, a `scan` or a `while`.
          operands: the values of its operands.
        """
        params, jaxpr = eqn.params, bodies(eqn)[-1].jaxpr
        if eqn.primitive.name != "staged_loop":
            found = _of_jax(eqn, operands)
            return None if found is None else cls(jaxpr, *found)
        n_consts, n_carry = _jax.scan_arity(params)

        def step(trace: Retrace, consts: Any, carry: Any, i: Any) -> list[Any]:
            return settled(trace.run(jaxpr, [*consts, *carry, i]))

        trips = operands[-1] if params["length"] is None else params["length"]
        consts, carry = operands[:n_consts], operands[n_consts : n_consts + n_carry]
        return cls(jaxpr, consts, carry, trips, params["unroll"], step, list, n_consts)


def _of_jax(eqn: _jax.JaxprEqn, operands: Sequence[Any]) -> tuple[Any, ...] | None:
    """Returns the loop of a `scan` or a `while`, as the other attributes."""
    params, avals = eqn.params, [v.aval for v in eqn.outvars]
    is_while = eqn.primitive.name == "while"
    if is_while:
        n_consts, n_carry = params["body_nconsts"], len(avals)
        operands, of_cond = operands[params["cond_nconsts"] :], operands
        body = params["body_jaxpr"]
    else:
        n_consts, n_carry = _jax.scan_arity(params)
        body = params["jaxpr"]
    consts, carry = operands[:n_consts], operands[n_consts:][:n_carry]
    arrays = operands[n_consts + n_carry :]
    sliced = [x for x in map(_progression, arrays) if x is not None]
    if len(sliced) < len(arrays) or len(avals) != n_carry:
        return None
    steps = _counters(bodies(eqn)[-1].jaxpr, n_consts)
    first = {k: _number(carry[k]) for k in steps}
    trips, unroll = params.get("length"), params.get("unroll")
    if is_while:
        found = _bound(eqn, steps, of_cond)
        if found is None:
            return None
        counter, bound = found
        trips = control.trips(first[counter], _number(bound), steps[counter])
    others = [k for k in range(n_carry) if k not in steps]
    # Those that are numbers are no operands.
    given = [k for k in steps if not isinstance(first[k], int)]

    def merged(starts: Mapping[int, Any], rest: Sequence[Any], i: Any) -> list[Any]:
        known = dict(zip(others, rest, strict=True))
        for k, step in steps.items():
            known[k] = _counted(starts[k], step, avals[k].dtype, i)
        return [known[k] for k in range(n_carry)]

    def step(trace: Retrace, operands: Any, carry: Any, i: Any) -> list[Any]:
        starts = {**first, **dict(zip(given, operands[n_consts:], strict=True))}
        ins = merged(starts, carry, i)
        position = trips - 1 - i if params.get("reverse") else i
        parts = [_counted(*part, position) for part in sliced]
        after = settled(trace.run(body, [*operands[:n_consts], *ins, *parts]))
        return [after[k] for k in others]

    def results(last: Sequence[Any]) -> list[Any]:
        end = np.int32(trips) if isinstance(trips, int) else lax.max(trips, np.int32(0))
        return merged(first, last, end)

    consts = [*consts, *(first[k] for k in given)]
    carry = [carry[k] for k in others]
    return consts, carry, trips, unroll, step, results, n_consts


def _counters(jaxpr: Any, n_consts: int) -> dict[int, int]:
    """Returns what is added to each carry that a constant is added to, perhaps 0."""
    body = region_of(jaxpr)
    carries = [v.aval for v in body.inputs[n_consts:]][: len(body.results)]
    found = dict[int, int]()
    for i, aval in enumerate(carries):
        # Keys have a type that is none of NumPy's.
        if isinstance(aval.dtype, np.dtype) and not aval.shape:
            step = growth(body, n_consts + i, i)
            if step is not None and step >= np.iinfo(aval.dtype).min:
                found[i] = step
    return found


def _bound(
    eqn: _jax.JaxprEqn, steps: Mapping[int, int], operands: Sequence[Any]
) -> tuple[int, Any] | None:
    """Returns the counter that a `while` compares, and what bounds it."""
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond = region_of(bodies(eqn)[0].jaxpr)
    if [op.name for op in cond.ops] != ["lt"] or cond.results != cond.ops[0].results:
        return None
    low, high = cond.ops[0].inputs
    if not isinstance(low, Value) or low.dtype != jnp.int32:
        return None
    counter = low.index - n_cond
    if steps.get(counter, 0) < 1:
        return None
    if not isinstance(high, Value):
        return counter, high.value
    if high.index < n_cond:
        return counter, operands[high.index]
    is_fixed = steps.get(high.index - n_cond) == 0
    return (counter, operands[high.index + n_body]) if is_fixed else None


def _number(x: Any) -> Any:
    """Returns a scalar that is known as a number."""
    return x if _jax.is_tracer(x) or np.ndim(x) else int(x)


def _progression(x: Any) -> tuple[int, int, Any] | None:
    """Returns first, difference and type of an array of integers; None for others."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic | int):
        return None  # a pair of arrays that is a key, an array without elements
    aval, made, x = jax.typeof(x), _jax.producer(x), _jax.literal(x)
    if aval.dtype not in (np.int32, np.int64) or len(aval.shape) > 1:
        return None
    if made is None and not _jax.is_tracer(x):
        flat = np.ravel(x).astype(np.int64)
        a, b = int(flat[0]), int(flat[-1] - flat[0]) // max(flat.size - 1, 1)
        is_one = np.array_equal(flat, a + b * np.arange(flat.size))
        return (a, b, aval.dtype) if is_one else None
    combine = None if made is None else _OF_PROGRESSIONS.get(made.primitive.name)
    given = [] if made is None else [*map(_progression, made.operands)]
    if combine is None or None in given:
        return None
    a, b, square = combine(*[x[:2] for x in given if x is not None])
    if aval.size == 1:
        b = 0  # also where its element is broadcast
    # Nothing wraps around.
    if square or max(abs(a), abs(a + b * aval.size)) >= 1 << 31:
        return None
    return a, b, aval.dtype


# First, difference, and what is multiplied by the square of the position.
_OF_PROGRESSIONS: dict[str, Callable[..., tuple[int, int, int]]] = {
    "iota": lambda: (0, 1, 0),
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1], 0),
    "sub": lambda x, y: (x[0] - y[0], x[1] - y[1], 0),
    "mul": lambda x, y: (x[0] * y[0], x[0] * y[1] + x[1] * y[0], x[1] * y[1]),
    "convert_element_type": lambda x: (*x, 0),
    "broadcast_in_dim": lambda x: (*x, 0),
}


def _counted(start: Any, step: int, dtype: Any, i: Any) -> Any:
    """Returns a counter in an iteration, without operations that change nothing."""
    i = i if i.dtype == dtype else lax.convert_element_type(i, dtype)
    if not step:
        return np.asarray(start, dtype) if isinstance(start, int) else start
    scaled = i if step == 1 else i * dtype.type(step)
    if isinstance(start, int):
        return scaled + dtype.type(start) if start else scaled
    return start + scaled
