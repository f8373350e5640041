# SPDX-License-Identifier: Apache-2.0
"""From a Python body to a checked jaxpr over references in HBM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_gpu import _jax, errors
from pallas_gpu.entry import scope
from pallas_gpu.entry.scoped import scoped
from pallas_gpu.entry.trace import Arrays, refuse_reference
from pallas_gpu.primitives.scoped import get_global_p
from pallas_gpu.program.bodies import bodies, equations, line_of_use
from pallas_gpu.program.rewrite import Retrace, at_line_of, is_followed
from pallas_gpu.sparsecore.types import (
    HBM,
    Scratch,
    Semaphore,
    SemaphoreRef,
    Space,
    SparseCoreRef,
    require_stored,
)


def trace_body(
    body: Callable[..., Any], arrays: Arrays, mesh: Any, name: str
) -> _jax.Jaxpr:
    """Traces a body over references to arrays of these types, without consts."""
    with scope.tracing(mesh), scope.locating(body):
        for aval in arrays.avals:
            require_stored(aval.dtype, f"kernel {name}: an argument or result")
        who = f"kernel {name}"
        closed, _ = arrays.traced(
            body, mesh, who, lambda aval: SparseCoreRef(aval, HBM), _RETURNED, 1
        )
        pairs = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        consts = [_constant(*pair, closed.jaxpr, name) for pair in pairs]
        return _allocated(closed.jaxpr, consts, mesh.axes)


_RETURNED = "copy results to the output references: plsc.sync_copy(x, out_ref)"


def _declared(eqn: _jax.JaxprEqn) -> Scratch | Semaphore:
    """Returns the declaration of what `get_global` or `jax.empty_ref` allocates."""
    ref = eqn.outvars[0].aval
    if isinstance(ref, SemaphoreRef):
        return Semaphore(ref.type, tuple(ref.shape))
    space = ref.memory_space
    if not isinstance(space, Space) or space is HBM:
        raise errors.MemorySpaceError(
            f"{eqn.primitive.name} in memory that a body does not allocate",
            expected="memory_space=plsc.VMEM, plsc.SMEM or plsc.VMEM_SHARED",
            got=f"memory_space={getattr(space, 'name', space)}",
            hint="pass memory_space, or declare the array in scratch_types",
        )
    return Scratch(space, tuple(ref.shape), ref.dtype, getattr(ref, "tiling", None))


def _constant(var: Any, value: Any, jaxpr: _jax.Jaxpr, name: str) -> Any:
    """Returns a number that a body closes over; raises for anything else."""
    refuse_reference(var, jaxpr, name, "scratch_types")
    if (
        isinstance(var.aval, _jax.AbstractRef)
        or var.aval.shape
        or _jax.is_tracer(value)
    ):
        traced = _jax.is_tracer(value) and not var.aval.shape
        raise errors.ClosureError(
            f"kernel {name}: the body uses "
            f"{'a traced value' if traced else 'an array'} from the enclosing function",
            expected="arrays as arguments; only numbers may be closed over",
            got=f"{var.aval.str_short()}",
            hint="pass it as an argument, and copy what is needed to VMEM or SMEM",
            where=line_of_use(jaxpr, var),
        )
    return np.asarray(value)[()]


# --- memory that a body asks for by a call: `get_global`, `jax.empty_ref` -------------
# Either becomes a scope, around the body or around the rest of it.

_EMPTY_REF = "empty_ref"  # JAX's


class _Scopes(Retrace):
    """A body whose requests have references.

    Args:
      refs: those of `get_global`, by the variables of its calls.
    """

    def __init__(self, refs: dict[Any, Any]):
        super().__init__()
        self._refs = refs

    def is_replaced(self, eqn: _jax.JaxprEqn) -> bool:
        return eqn.primitive is get_global_p or eqn.primitive.name == _EMPTY_REF

    def results(self, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any] | None:
        if self.is_replaced(eqn):
            return [self._refs[eqn.outvars[0]]]
        inner = (each for body in bodies(eqn) for each in equations(body.jaxpr))
        asked = next(filter(self.is_replaced, inner), None)
        if asked is not None and not is_followed(eqn):
            raise errors.UnsupportedError(
                f"{asked.primitive.name} in a {eqn.primitive.name}",
                expected="a call outside of it",
                got="a call in its body",
                hint="allocate the memory before: its iterations overlap",
            )
        return None

    def evaluated(self, listed: Any, known: dict[Any, Any], outs: Any) -> list[Any]:
        names = [eqn.primitive.name for eqn in listed]
        if _EMPTY_REF not in names:
            return super().evaluated(listed, known, outs)
        at = names.index(_EMPTY_REF)
        self.evaluate(listed[:at], known)
        (var,) = listed[at].outvars

        def within(ref: Any) -> list[Any]:
            return self.evaluated(listed[at + 1 :], {**known, var: ref}, outs)

        with at_line_of(listed[at]):
            return scoped(within, [_declared(listed[at])], names=[_EMPTY_REF])


def _allocated(jaxpr: _jax.Jaxpr, consts: Sequence[Any], axes: Any) -> _jax.Jaxpr:
    """Returns a body in which scopes allocate what is asked for.

    Args:
      jaxpr: the body.
      consts: what stands for its constants.
      axes: with which it is traced.
    """
    if not consts and not _Scopes({}).replaces_in(jaxpr):
        return jaxpr
    asked = [e for e in equations(jaxpr) if e.primitive is get_global_p]
    found = {eqn.outvars[0]: eqn for eqn in asked}

    def again(*given: Any) -> None:
        def within(*refs: Any) -> None:
            scopes = _Scopes(dict(zip(found, refs, strict=True)))
            scopes.run(jaxpr, given, consts)

        if not found:
            within()
            return
        with at_line_of(asked[0]):
            whats = list(map(_declared, found.values()))
            scoped(within, whats, names=["get_global"] * len(whats))

    avals = [v.aval.update() for v in jaxpr.invars]
    return _jax.trace(again, avals, axes)[0].jaxpr
