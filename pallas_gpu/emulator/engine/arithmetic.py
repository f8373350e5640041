# SPDX-License-Identifier: Apache-2.0
"""Operations for which XLA's CPU backend deviates from lax's definition, corrected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from pallas_gpu import _jax


def evaluate(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr of pure equations as lax defines them."""
    env = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _jax.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(x) for x in eqn.invars]
        own = _OWN.get(eqn.primitive.name)
        if own is not None:
            results = [own(*operands, **eqn.params)]
        else:
            results = _jax.bind_equation(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _carrying_nan(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """A maximum or minimum that is NaN where an operand is.

    lax's definition says so; XLA's CPU backend drops NaN from a reduction (jax 0.11.2
    and 0.12.0.1).
    """

    def reduced(x: Any, *, axes: Sequence[int], **_: Any) -> Any:
        result = reduce(x, axis=tuple(axes))
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return result
        return jnp.where(jnp.isnan(x).any(axis=tuple(axes)), jnp.nan, result)

    return reduced


_OWN: dict[str, Callable[..., Any]] = {
    "reduce_max": _carrying_nan(jnp.max),
    "reduce_min": _carrying_nan(jnp.min),
}
