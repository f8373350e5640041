# SPDX-License-Identifier: Apache-2.0
"""Arrays of a warpgroup in the warps of its `warp_map`: they travel through SMEM.

The warpgroup stores them to memory of a scope around the region, before the barrier
with which the region begins; each warpgroup of a block has such memory of its own. A
warp loads what it uses: a slice that its function takes from such an array, or the
whole array where the function needs it whole.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, types
from pallas_gpu.entry import scope
from pallas_gpu.entry.scoped import of_warpgroup
from pallas_gpu.program.rewrite import Deferred, Retrace, settled


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
    """Binds a region in a scope with the arrays at some positions of its constants."""
    values = [closed.consts[i] for i in arrays]

    def within(*tiles: Any) -> None:
        for tile, value in zip(tiles, values, strict=True):
            tile[...] = value
        consts = list(closed.consts)
        for i, tile in zip(arrays, tiles, strict=True):
            consts[i] = _InSmem(tile)

        def region(warp_id: jax.Array) -> None:
            _Region().run(closed.jaxpr, [warp_id], consts)

        bind(region)

    avals = [jax.typeof(value) for value in values]
    of_warpgroup(within, *(types.SMEM(aval.shape, aval.dtype) for aval in avals))


@dataclasses.dataclass(frozen=True, eq=False)
class _InSmem(Deferred):
    """A captured array, which a warp loads once if something needs it whole."""

    tile: Any

    @functools.cached_property
    def _loaded(self) -> jax.Array:
        return self.tile[...]

    def array(self) -> jax.Array:
        return self._loaded


class _Region(Retrace):
    """A region in which a slice of a captured array is loaded from SMEM."""

    def results(self, eqn: _jax.JaxprEqn, operands: list[Any]) -> list[Any] | None:
        if not operands or not isinstance(operands[0], _InSmem) or not _is_slice(eqn):
            return None
        tile, starts = operands[0].tile, operands[1:]
        return [tile[_part(eqn, tile.shape, settled(starts))]]


def _is_slice(eqn: _jax.JaxprEqn) -> bool:
    if eqn.primitive.name == "slice":
        return not any(n != 1 for n in eqn.params["strides"] or ())
    return eqn.primitive.name == "dynamic_slice"


def _part(
    eqn: _jax.JaxprEqn, shape: Sequence[int], starts: Sequence[Any]
) -> tuple[Any, ...]:
    """Returns the indices of the part of an array that a slice of it is."""
    if eqn.primitive.name == "slice":
        pairs = zip(
            eqn.params["start_indices"], eqn.params["limit_indices"], strict=True
        )
        return tuple(_jax.Slice(low, high - low, 1) for low, high in pairs)
    return tuple(
        _jax.Slice(_clamped(start, n - size), size, 1)
        for start, size, n in zip(starts, eqn.params["slice_sizes"], shape, strict=True)
    )


def _clamped(start: Any, last: int) -> Any:
    """Returns where lax.dynamic_slice starts; a known start is a Python int."""
    if _jax.is_tracer(start):
        return jnp.clip(start, 0, last) if last else 0
    return min(max(int(start), 0), last)
