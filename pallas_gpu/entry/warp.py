# SPDX-License-Identifier: Apache-2.0
"""`warp_map`, and `kernel` over a `WarpMesh`: what each warp executes on its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.entry import scope
from pallas_gpu.entry.scoped import of_warpgroup
from pallas_gpu.primitives.warp import WARPS, warp_map_p
from pallas_gpu.program.rewrite import Deferred, Retrace, bound_body, settled

# Such a kernel in messages.
OVER_WARPS = "a kernel over a WarpMesh"
_STORE = "store it to a reference: ref[warp_id] = value"


@expect.arguments()
def warp_map(f: Callable[[jax.Array], None], /) -> None:
    """Runs `f(warp_id)` once in each of the four warps of the calling warpgroup.

    PTX: barrier.sync of the warpgroup before and after, bar.warp.sync inside. Since:
    sm_90.

    Issued by a warpgroup. Its warps synchronize, run `f` independently of each other,
    and the warpgroup continues when all four are done. Inside, the issuer is a warp:
    one elected lane starts a copy, stores an element, or arrives, which counts as one
    arrival; `commit_smem` and `commit_gmem` fence this warp's writes. Arrays are those
    of a warp, distributed over its 32 lanes, and `run_scoped` allocates memory and
    barriers for each warp. Arrays from outside travel through SMEM of their size: a
    warp loads the parts that `f` takes of them, such as `rows[warp_id]`, or all. In a
    block of several warpgroups each has such SMEM, whichever of them call `warp_map`.

    Each warp keeps the parity of the barriers that it waits for from one `warp_map` to
    the next, as a warpgroup does for its own waits. What all four warps wait for alike
    the warpgroup may wait for, too. A barrier that only some warps wait for, that they
    test, or of which each selects its own, must not be waited for outside `warp_map`,
    anywhere in the kernel.

    Copies to GMEM have separate groups in each warp; copies of the warpgroup itself are
    issued by warp 0. `wait_smem_to_gmem(n)` of the warpgroup leaves at most n groups of
    each warp pending.

    Args:
      f: function of the warp's index, a scalar int32 from 0 to 3, uniform in the warp,
        that returns None.

    Raises:
      ArgumentTypeError: `f` does not have exactly one parameter.
      KernelError: `f` returns a value, or the call is outside a kernel.
      UnsupportedError: `f` uses an accumulator of the warpgroup, issues an operation of
        a whole warpgroup (a matrix product, `set_max_registers`), or calls `warp_map`.
      LayoutError: a layout distributes an array over several warps.
      BarrierError: a barrier is waited for both by some warps and outside.

    Example:
      >>> @plgpu.warp_map
      ... def _(warp_id):
      ...     @plgpu.when(warp_id == 0)
      ...     def _():
      ...         plgpu.copy_gmem_to_smem(x_gmem, x_smem, barrier)
    """
    scope.current_mesh("warp_map")

    def body(warp_id: jax.Array) -> None:
        result = scope.call("warp_map", f, warp_id)
        scope.require_none("warp_map", f, result, _STORE)

    bind(body, None)


def over_warps(f: Callable[..., None], mesh: types.WarpMesh) -> Callable[..., None]:
    """`kernel` over the warps of a warpgroup: `warp_map` with a named axis.

    The result gets the arguments of `f`, which reports what its signature refuses.
    """

    def run(*args: Any) -> None:
        outer = scope.current_mesh(OVER_WARPS)
        if mesh.axis_name in (name for name, _ in outer.axes):
            raise errors.ArgumentError(
                "two axes have the same name",
                expected="another name than those of the kernel's axes",
                got=mesh.axis_name,
                hint="rename the axis of the WarpMesh",
            )

        def body(_: jax.Array) -> None:
            scope.require_none(OVER_WARPS, f, f(*args), _STORE)

        bind(body, mesh.axis_name)

    return functools.wraps(f)(run)


def bind(body: Callable[[jax.Array], Any], axis_name: str | None) -> None:
    """Binds a function of the warp's index as what each warp executes."""
    axes = [] if axis_name is None else [(axis_name, WARPS)]
    with scope.one_warp():
        closed, tree = _jax.trace(body, [jax.ShapeDtypeStruct((), jnp.int32)], axes)
    arrays = [i for i, const in enumerate(closed.consts) if _is_array(const)]
    if arrays and not scope.in_warp():
        _through_smem(closed, arrays, functools.partial(bind, axis_name=axis_name))
    else:
        bound_body(warp_map_p, closed, tree, axis_name=axis_name)


# --- arrays of the warpgroup in its warps ---------------------------------------------
# The warpgroup stores them to memory of a scope around the region, before the barrier
# with which the region begins; each warpgroup of a block has such memory of its own. A
# warp loads what it uses: a slice that its function takes from such an array, or the
# whole array where the function needs it whole.


def _is_array(const: Any) -> bool:
    aval = jax.typeof(const)
    if isinstance(aval, _jax.AbstractRef) or not getattr(aval, "shape", ()):
        return False
    return aval.size > 0 and aval.dtype in types.elements.KINDS


def _through_smem(
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
