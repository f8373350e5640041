# SPDX-License-Identifier: Apache-2.0
"""Operations that a single warp can issue."""

from __future__ import annotations

from typing import Any

from pallas_gpu import _jax, errors, types
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.scoped import run_scoped_p
from pallas_gpu.primitives.warp import warp_map_p
from pallas_gpu.walk import Site


def check_equation(eqn: _jax.JaxprEqn, operation: registry.Operation | None) -> None:
    """Raises UnsupportedError for an operation that needs more than one warp."""
    if eqn.primitive is warp_map_p:
        raise _refusal(
            "warp_map inside warp_map",
            expected="one level: a warp cannot be divided",
            got="a second warp_map in the function of the first",
            hint="call them one after the other, or branch on warp_id",
        )
    if eqn.primitive is run_scoped_p:
        raise no_scope()
    name = eqn.primitive.name
    if operation is not None and "warp" not in operation.issuers:
        raise _refusal(
            f"{name} inside warp_map",
            expected="an operation that one warp can issue: copies, barriers, their "
            "waits and fences, elements of references",
            got=f"{name}, which needs the whole warpgroup",
            hint="call it outside the warp_map",
        )
    for var in (*eqn.invars, *eqn.outvars):
        _require_scalar_or_memory(var.aval, name)


def is_position(site: Site) -> bool:
    """True for a position on the axis of warps of a surrounding `warp_map`."""
    names = [
        outer.eqn.params["axis_name"]
        for outer in site.enclosing
        if outer.eqn.primitive is warp_map_p
    ]
    return site.eqn.params.get("axis_name") in names


def no_scope() -> errors.UnsupportedError:
    """Returns the error for an allocation by one warp."""
    return _refusal(
        "run_scoped inside warp_map",
        expected="scratch memory that the warpgroup has allocated",
        got="an allocation by one warp",
        hint="allocate outside the warp_map, with a part per warp: ref.at[warp_id]",
    )


def _require_scalar_or_memory(aval: Any, name: str) -> None:
    if isinstance(aval, types.AccumulatorRef):
        raise _refusal(
            "an accumulator inside warp_map",
            expected="references to memory and barriers",
            got=f"{name} on an accumulator, which is in the registers of all four "
            "warps",
            hint="use it outside the warp_map",
        )
    if isinstance(aval, _jax.AbstractRef) or not getattr(aval, "shape", ()):
        return
    raise _refusal(
        "an array inside warp_map",
        expected="scalars: ref[i, j], lax.axis_index, arithmetic on them",
        got=f"{name} with an array {aval.dtype}{list(aval.shape)}",
        hint="arrays are distributed over a warpgroup: use them outside the "
        "warp_map, or index single elements",
    )


def _refusal(what: str, **rows: str) -> errors.UnsupportedError:
    return errors.UnsupportedError(f"{what} is not supported", **rows)
