# SPDX-License-Identifier: Apache-2.0
"""Runs of pure equations, compiled once by JAX for the CPU.

Equal runs share one compiled function: unrolled loops and repeated launches then
compile once.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_gpu import _jax
from pallas_gpu.emulator.engine import arithmetic, scalars
from pallas_gpu.emulator.engine.steps import Location, PureStep, Slot

_CACHE: collections.OrderedDict[Any, Callable[..., Any]] = collections.OrderedDict()
_CACHE_SIZE = 4096


def compile_run(
    run: Sequence[tuple[Any, list[Any], list[Any]]], read: set[int], debug_info: Any
) -> Any:
    """Returns a PureStep for a run of equations, or None when no result is read.

    Args:
      run: (equation, operands, result slots); operands are Slots and Consts.
      read: slots that later steps read.
      debug_info: of the jaxpr of the equations.
    """
    run = _live(run, read)
    if not run:
        return None
    made = {s.index for _, _, outs in run for s in outs}
    ins: dict[int, Any] = {}
    for _, operands, _ in run:
        for x in operands:
            if isinstance(x, Slot) and x.index not in made:
                ins.setdefault(x.index, x)
    outs = [s for _, _, results in run for s in results if s.index in read]
    fn = _compiled(run, list(ins.values()), outs, debug_info)
    return PureStep(
        fn,
        tuple(ins),
        tuple(s.index for s in outs),
        tuple(scalars.is_scalar(s.aval) for s in outs),
        Location(run[-1][0]),
    )


def _live(run, read: set[int]):
    needed = set(read)
    kept = []
    for eqn, operands, outs in reversed(run):
        if any(s.index in needed for s in outs):
            kept.append((eqn, operands, outs))
            needed.update(x.index for x in operands if isinstance(x, Slot))
    return kept[::-1]


def _compiled(run, ins, outs, debug_info) -> Callable[..., Any]:
    key = _key(run, ins, outs)
    fn = _CACHE.get(key) if key is not None else None
    if fn is None:
        jaxpr = _jaxpr(run, ins, outs, debug_info)
        fn = jax.jit(lambda *args: tuple(arithmetic.evaluate(jaxpr, args)))
        if key is not None:
            _CACHE[key] = fn
            if len(_CACHE) > _CACHE_SIZE:
                _CACHE.popitem(last=False)
    return fn


def _jaxpr(run, ins, outs, debug_info) -> Any:
    """Builds a jaxpr with fresh variables: inlined calls repeat theirs."""
    variables: dict[int, Any] = {s.index: _jax.Var(s.aval) for s in ins}

    def atom(x: Any, original: Any) -> Any:
        if isinstance(x, Slot):
            return variables[x.index]
        if isinstance(original, _jax.Literal):
            return original
        return _jax.Literal(x.value, original.aval)

    eqns = []
    for eqn, operands, results in run:
        invars = [atom(x, v) for x, v in zip(operands, eqn.invars, strict=True)]
        for s in results:
            variables[s.index] = _jax.Var(s.aval)
        outvars = [variables[s.index] for s in results]
        eqns.append(eqn.replace(invars=invars, outvars=outvars))
    invars = [variables[s.index] for s in ins]
    outvars = [variables[s.index] for s in outs]
    # Names of arguments and results belong to the whole jaxpr, not to this part of it.
    debug_info = debug_info._replace(arg_names=None, result_paths=None)
    return _jax.Jaxpr((), invars, outvars, eqns, debug_info=debug_info)


def _key(run, ins, outs) -> Any:
    """Returns the key by which runs share a function; None for no sharing."""
    number: dict[int, int] = {s.index: i for i, s in enumerate(ins)}
    parts: list[Any] = [tuple(s.aval for s in ins)]
    for eqn, operands, results in run:
        for s in results:
            number[s.index] = len(number)
        names = tuple(
            number[x.index] if isinstance(x, Slot) else _const_key(x.value)
            for x in operands
        )
        params = tuple(sorted(((k, _hashable(v)) for k, v in eqn.params.items()),
                              key=lambda kv: kv[0]))  # fmt: skip
        parts.append((eqn.primitive, params, names, tuple(s.aval for s in results)))
    parts.append(tuple(number[s.index] for s in outs))
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _const_key(value: Any) -> Any:
    array = np.asarray(value)
    return ("const", array.dtype.name, array.shape, array.tobytes())


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
