# SPDX-License-Identifier: Apache-2.0
"""`warp_map`, and `kernel` over a `WarpMesh`: what each warp executes on its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, errors, expect, types
from pallas_gpu.entry import scope, warp_arrays
from pallas_gpu.primitives.warp import WARPS, warp_map_p
from pallas_gpu.program.rewrite import bound_body

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
    arrays = warp_arrays.travel(closed.consts)
    if arrays:
        again = functools.partial(bind, axis_name=axis_name)
        warp_arrays.through_smem(closed, arrays, again)
    else:
        bound_body(warp_map_p, closed, tree, axis_name=axis_name)
