# SPDX-License-Identifier: Apache-2.0
"""What one warp can do by itself, and which barriers it may wait for."""

from __future__ import annotations

from typing import Any

from pallas_gpu import _jax, errors, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.mbarrier import barrier_wait_p
from pallas_gpu.primitives.scoped import run_scoped_p
from pallas_gpu.primitives.warp import IN_WARP, warp_map_p

# A barrier declaration: the scope that it belongs to, and its position there.
_Declaration = tuple[int, int]


def check_equation(eqn: _jax.JaxprEqn) -> None:
    """Raises UnsupportedError for an operation that takes more than one warp."""
    if eqn.primitive is warp_map_p:
        raise _refusal(
            "warp_map inside of warp_map",
            expected="one level: a warp has no parts that run by themselves",
            got="a second warp_map in the function of the first",
            hint="call them one after the other, or branch on warp_id",
        )
    if eqn.primitive is run_scoped_p:
        raise no_scope()
    name = eqn.primitive.name
    if name in registry.PRIMITIVES and eqn.primitive not in IN_WARP:
        raise _refusal(
            f"{name} inside of warp_map",
            expected="an operation that one warp can issue: copies, barriers, their "
            "waits and fences, elements of references",
            got=f"{name}, which takes the whole warpgroup",
            hint="call it outside of the warp_map",
        )
    for var in (*eqn.invars, *eqn.outvars):
        _require_scalar_or_memory(var.aval, name)


def no_scope() -> errors.UnsupportedError:
    """Returns the error for an allocation by one warp."""
    return _refusal(
        "run_scoped inside of warp_map",
        expected="scratch memory that the warpgroup has allocated",
        got="an allocation by one warp",
        hint="allocate around the warp_map, a part for each warp: ref.at[warp_id]",
    )


def _require_scalar_or_memory(aval: Any, name: str) -> None:
    if isinstance(aval, types.AccumulatorRef):
        raise _refusal(
            "an accumulator inside of warp_map",
            expected="references to memory and barriers",
            got=f"{name} on an accumulator, which lies in the registers of all four "
            "warps",
            hint="use it outside of the warp_map",
        )
    if isinstance(aval, _jax.AbstractRef) or not getattr(aval, "shape", ()):
        return
    raise _refusal(
        "an array inside of warp_map",
        expected="scalars: ref[i, j], lax.axis_index, arithmetic on them",
        got=f"{name} with an array {aval.dtype}{list(aval.shape)}",
        hint="arrays belong to a whole warpgroup: handle them outside of the "
        "warp_map, or index single elements",
    )


def _refusal(what: str, **rows: str) -> errors.UnsupportedError:
    return errors.UnsupportedError(f"{what} is not supported", **rows)


# --- waits ----------------------------------------------------------------------------


def check_waits(jaxpr: _jax.Jaxpr) -> None:
    """Raises BarrierError for a barrier that warps and whole warpgroups wait for.

    A wait flips the parity in the registers of who waits. After a wait of some warps
    only, the warps of a warpgroup would wait together for different phases: some would
    go on before the data has come, or hang.
    """
    _Waits().visit(jaxpr, {}, in_warp=False)


class _Waits:
    """Where each barrier declaration is waited for: by warps, by warpgroups."""

    def __init__(self) -> None:
        self._seen: dict[tuple[_Declaration, bool], str | None] = {}

    def visit(
        self, jaxpr: Any, declared: dict[Any, _Declaration], in_warp: bool
    ) -> None:
        """Walks a jaxpr whose barriers among the inputs are known."""
        known = dict(declared)
        for eqn in jaxpr.eqns:
            if eqn.primitive is barrier_wait_p:
                operand = ops.unflatten(eqn.params["tree"], list(eqn.invars))
                declaration = known[operand["barrier"].ref]
                self._note(declaration, in_warp, _jax.where(eqn))
            for inner, operands in _calls(eqn):
                given = {
                    var: known[operand]
                    for var, operand in zip(inner.invars, operands, strict=False)
                    if isinstance(var.aval, types.BarrierRef)
                }
                if eqn.primitive is run_scoped_p:
                    for i, var in enumerate(inner.invars[len(operands) :]):
                        if isinstance(var.aval, types.BarrierRef):
                            given[var] = id(eqn), i
                self.visit(inner, given, in_warp or eqn.primitive is warp_map_p)
            known |= _carried(eqn, known)

    def _note(
        self, declaration: _Declaration, in_warp: bool, where: str | None
    ) -> None:
        self._seen.setdefault((declaration, in_warp), where)
        other = (declaration, not in_warp)
        if other not in self._seen:
            return
        inside, outside = (self._seen[declaration, flag] for flag in (True, False))
        raise errors.BarrierError(
            "a barrier is waited for both inside and outside of warp_map",
            expected="a barrier for the waits of warps, another for those of the "
            "warpgroup: each warp keeps the parity of its own waits",
            got=f"waits inside at {inside} and outside at {outside}",
            hint="declare two barriers, or move the wait out of the warp_map or into "
            "it",
            where=where,
        )


def _calls(eqn: _jax.JaxprEqn) -> list[tuple[Any, list[Any]]]:
    """Returns the jaxprs that an equation runs, each with the operands it gets."""
    inners, operands = list(_jax.jaxprs_in_params(eqn.params)), list(eqn.invars)
    if eqn.primitive.name == "cond":
        return [(inner, operands[1:]) for inner in inners]
    if eqn.primitive.name == "while":
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry = operands[n_cond + n_body :]
        consts = operands[n_cond : n_cond + n_body]
        return [
            (eqn.params["cond_jaxpr"].jaxpr, [*operands[:n_cond], *carry]),
            (eqn.params["body_jaxpr"].jaxpr, [*consts, *carry]),
        ]
    return [(inner, operands) for inner in inners]


def _carried(eqn: _jax.JaxprEqn, known: dict[Any, _Declaration]) -> dict[Any, Any]:
    """Barriers that a loop carries stay the same: its results are its operands."""
    last = eqn.invars[len(eqn.invars) - len(eqn.outvars) :]
    if eqn.primitive.name not in ("scan", "while"):
        return {}
    return {
        result: known[operand]
        for result, operand in zip(eqn.outvars, last, strict=True)
        if isinstance(result.aval, types.BarrierRef)
    }
