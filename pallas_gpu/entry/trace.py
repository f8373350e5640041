# SPDX-License-Identifier: Apache-2.0
"""From a Python body to a checked jaxpr over references."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, types
from pallas_gpu.entry import check, jax_errors, scope
from pallas_gpu.walk import bodies, walk


@dataclasses.dataclass(frozen=True)
class TracedBody:
    """A body as a jaxpr over GMEM references: inputs, lifted scalars, outputs.

    Attributes:
      jaxpr: without consts and results.
      scalars: values that the body closes over; each became an input of shape (1,).
    """

    jaxpr: _jax.Jaxpr
    scalars: tuple[Any, ...]


def gmem_ref(shape: Sequence[int], dtype: Any) -> types.KernelRef:
    """Returns a fresh reference to an array in GMEM."""
    return types.KernelRef(jax.core.ShapedArray(tuple(shape), dtype), types.GMEM)


def trace_body(
    body: Callable[..., Any],
    in_avals: Sequence[Any],
    out_avals: Sequence[Any],
    mesh: types.Mesh,
    name: str,
) -> TracedBody:
    """Traces `body(*input_refs, *output_refs)` and checks the result.

    Raises:
      KernelError: the body returns a value.
      ClosureError: the body uses an array from the enclosing function.
      Errors of the check pass.
    """
    with scope.tracing(mesh), scope.locating(body):
        check.require_element_types((*in_avals, *out_avals))
        check.require_indexable((*in_avals, *out_avals))
        with jax_errors.typed(mesh):
            closed, out_tree = _jax.trace(body, _refs(in_avals, out_avals), mesh.axes)
        _require_no_result(body, out_tree, name)
        scalars = _closed_over_scalars(closed, name)
        _refuse_arrays_of_calls(closed.jaxpr, name)
        jaxpr = closed.jaxpr
        if scalars:
            closed = _lift(closed, in_avals, out_avals, mesh)
            jaxpr = closed.jaxpr
        check.check_jaxpr(jaxpr, mesh)
        check.check_inputs(jaxpr, len(in_avals) + len(scalars))
        check.check_waits(jaxpr)
    return TracedBody(jaxpr, tuple(scalars))


def _refs(in_avals, out_avals) -> list[types.KernelRef]:
    return [gmem_ref(a.shape, a.dtype) for a in (*in_avals, *out_avals)]


def _require_no_result(body: Callable[..., Any], out_tree: Any, name: str) -> None:
    if out_tree == jax.tree.structure(None):
        return
    raise errors.KernelError(
        f"kernel {name}: the body returns a value",
        expected="None",
        got=f"a result of structure {out_tree}",
        hint="store results to the output references: out_ref[...] = value",
        where=scope.location(body),
    )


def _closed_over_scalars(closed: _jax.ClosedJaxpr, name: str) -> list[Any]:
    for var in closed.jaxpr.constvars:
        aval = var.aval
        if isinstance(aval, _jax.AbstractRef):
            raise errors.UnsupportedError(
                f"kernel {name}: the body uses a jax.Ref from the enclosing function",
                expected="references that the kernel passes to its body",
                got=str(aval),
                hint="pass its value as an argument and return the new value",
                where=_first_use(closed.jaxpr, var),
            )
        if aval.shape:
            raise _array_error(closed.jaxpr, var, name)
    return list(closed.consts)


def _refuse_arrays_of_calls(jaxpr: _jax.Jaxpr, name: str) -> None:
    """Raises for arrays that a jitted function in the body closes over.

    JAX stores them, and scalars, in the function: they are not consts of the body.
    """
    for site in walk(jaxpr):
        for body in bodies(site.eqn):
            for var in body.jaxpr.constvars:
                if var.aval.shape:
                    raise _array_error(body.jaxpr, var, name)


def _array_error(jaxpr: _jax.Jaxpr, var: Any, name: str) -> errors.ClosureError:
    return errors.ClosureError(
        f"kernel {name}: the body uses an array from the enclosing function",
        expected="arrays as arguments; only scalars may be closed over",
        got=f"{var.aval.dtype}{list(var.aval.shape)}",
        hint="pass the array as an argument and read its reference",
        where=_first_use(jaxpr, var),
    )


def _first_use(jaxpr: _jax.Jaxpr, var: Any) -> str | None:
    """Returns the first line that uses a variable, also in called functions."""
    uses = [
        site
        for site in walk(jaxpr)
        if any(site.origin(operand) is var for operand in site.eqn.invars)
    ]
    # A call that passes it precedes the use inside the called function.
    direct = (site for site in uses if not bodies(site.eqn))
    first = next(direct, next(iter(uses), None))
    return None if first is None else first.where


def _lift(closed, in_avals, out_avals, mesh) -> _jax.ClosedJaxpr:
    """Replaces closed-over scalars by reads of (1,)-shaped inputs."""
    scalar_avals = [
        jax.core.ShapedArray((1,), v.aval.dtype) for v in closed.jaxpr.constvars
    ]
    n_in, n_scalars = len(in_avals), len(scalar_avals)

    def lifted(*refs):
        inputs, scalars, outputs = (
            refs[:n_in],
            refs[n_in : n_in + n_scalars],
            refs[n_in + n_scalars :],
        )
        values = [ref[0] for ref in scalars]
        _jax.eval_jaxpr(closed.jaxpr, values, *inputs, *outputs)

    refs = _refs([*in_avals, *scalar_avals], out_avals)
    return _jax.trace(lifted, refs, mesh.axes)[0]


def lifted_operands(scalars: Sequence[Any]) -> list[Any]:
    """Returns closed-over scalars as operands of shape (1,)."""
    return [jnp.reshape(s, (1,)) for s in scalars]
