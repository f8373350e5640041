# SPDX-License-Identifier: Apache-2.0
"""Arrays of a warpgroup in the warps of its `warp_map`: they travel through SMEM.

The warpgroup stores them to memory of a scope around the region, before the barrier
with which the region begins; each warpgroup of a block has such memory of its own. A
warp loads what it uses: a slice that its function takes from such an array, or the
whole array where the function needs it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, types
from pallas_gpu.entry import scope
from pallas_gpu.entry.scoped import of_warpgroup


def travel(consts: Sequence[Any]) -> list[int]:
    """Returns the positions of captured arrays that travel through SMEM."""
    if scope.in_warp():
        return []
    return [i for i, const in enumerate(consts) if _is_array(const)]


def _is_array(const: Any) -> bool:
    aval = jax.typeof(const)
    if isinstance(aval, _jax.AbstractRef) or not getattr(aval, "shape", ()):
        return False
    return aval.size > 0 and aval.dtype in types.elements.KINDS


def through_smem(
    closed: _jax.ClosedJaxpr,
    arrays: Sequence[int],
    bind: Callable[[Callable[[jax.Array], None]], None],
) -> None:
    """Binds a region in a scope with the arrays that it captures.

    Args:
      closed: the region, a function of the warp's index.
      arrays: positions of the captured arrays among its constants.
      bind: traces a function as a region, and binds it.
    """
    values = [closed.consts[i] for i in arrays]

    def within(*tiles: Any) -> None:
        for tile, value in zip(tiles, values, strict=True):
            tile[...] = value
        in_smem = {
            closed.jaxpr.constvars[i]: tile
            for i, tile in zip(arrays, tiles, strict=True)
        }
        bind(lambda warp_id: _evaluate(closed, in_smem, warp_id))

    avals = [jax.typeof(value) for value in values]
    of_warpgroup(within, *(types.SMEM(aval.shape, aval.dtype) for aval in avals))


def _evaluate(
    closed: _jax.ClosedJaxpr, in_smem: Mapping[Any, Any], warp_id: jax.Array
) -> None:
    """Evaluates a region; what reads a captured array loads it from SMEM."""
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = {
        var: const
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True)
        if var not in in_smem
    }
    env[jaxpr.invars[0]] = warp_id

    def read(atom: Any) -> Any:
        if isinstance(atom, _jax.Literal):
            return atom.val
        if atom not in env:
            env[atom] = in_smem[atom][...]
        return env[atom]

    for eqn in jaxpr.eqns:
        with _jax.at_line_of(eqn):
            tile = in_smem.get(eqn.invars[0]) if _is_slice(eqn) else None
            if tile is None:
                results = _jax.bind_again(eqn, [read(x) for x in eqn.invars])
            else:
                results = [tile[_part(eqn, tile, read)]]
        env.update(zip(eqn.outvars, results, strict=True))


def _is_slice(eqn: _jax.JaxprEqn) -> bool:
    if isinstance(eqn.invars[0] if eqn.invars else None, _jax.Literal | None):
        return False
    if eqn.primitive.name == "slice":
        return not any(n != 1 for n in eqn.params["strides"] or ())
    return eqn.primitive.name == "dynamic_slice"


def _part(eqn: _jax.JaxprEqn, tile: Any, read: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Returns the indices of the part of an array that a slice of it is."""
    if eqn.primitive.name == "slice":
        pairs = zip(
            eqn.params["start_indices"], eqn.params["limit_indices"], strict=True
        )
        return tuple(_jax.Slice(low, high - low, 1) for low, high in pairs)
    sizes = eqn.params["slice_sizes"]
    starts = [read(x) for x in eqn.invars[1:]]
    return tuple(
        _jax.Slice(_clamped(start, n - size), size, 1)
        for start, size, n in zip(starts, sizes, tile.shape, strict=True)
    )


def _clamped(start: Any, last: int) -> Any:
    """Returns where lax.dynamic_slice starts; a known start is a Python int."""
    if _jax.is_tracer(start):
        return jnp.clip(start, 0, last) if last else 0
    return min(max(int(start), 0), last)
