# SPDX-License-Identifier: Apache-2.0
"""`profile`: where the time of a function's kernels goes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_gpu import _jax, errors, expect, timeline, types
from pallas_gpu.entry import profiling
from pallas_gpu.testing import calling

_MOST_SPANS = 1 << 20


@expect.arguments(
    space=expect.optional(expect.integer(1, _MOST_SPANS, unit="spans")),
    trace_scope=expect.optional(expect.member(types.TraceScope)),
)
def profile(
    f: Callable[..., Any],
    *,
    space: int | None = None,
    trace_scope: types.TraceScope | None = None,
    waits: bool = True,
) -> Callable[..., timeline.Profile]:
    """Returns a function that calls `f` and returns a profile of its kernels.

    Issued by: the host. Since: sm_90; in the emulator and as emitted code on any
    machine.

    Each `jax.named_scope` that a kernel enters becomes a span of each warpgroup of each
    CTA, and each wait one with the name of its barrier. The kernels are compiled for
    that once for each profiled function, with a few instructions for each begin and
    end. Call it twice and use the second profile: the first has cold caches.

    Args:
      f: a function that calls kernels, jitted or not.
      space: number of spans for which a warpgroup has room, 16 bytes each. None: 512,
        or fewer in a kernel of more than some thousand CTAs. What finds no room is
        dropped, and counted.
      trace_scope: who records: `TraceScope.WARPGROUP`, or each warp on its own. None:
        warps in kernels that use `warp_map`.
      waits: whether waits are recorded.

    Returns:
      A function of the arguments of `f`, which returns a `Profile`.

    Raises:
      UnsupportedError: the call is traced, as in a function that is jitted.

    Example:
      >>> print(plgpu.testing.profile(product)(a, b))
    """
    records: list[timeline.Record] = []
    request = profiling.Request(records.append, space, trace_scope, waits)

    @functools.wraps(f)
    def profiled(*args: Any, **kwargs: Any) -> timeline.Profile:
        records.clear()
        with profiling.REQUESTED(request):
            results = calling.call("profile", f, *args, **kwargs)
            jax.block_until_ready(results)
            # The records of launches come by callbacks.
            jax.effects_barrier()
        traced = filter(_jax.is_tracer, jax.tree.leaves((args, kwargs, results)))
        if not records and (value := next(traced, None)) is not None:
            raise errors.UnsupportedError(
                "profile: the call is traced, as by jax.jit: kernels run after it",
                expected="arrays",
                got=expect.shown(value),
                hint="profile the jitted function: profile(jax.jit(f))(*args)",
                where=_jax.where_now(),
            )
        return timeline.Profile(list(records), results)

    return profiled
