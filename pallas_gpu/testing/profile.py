# SPDX-License-Identifier: Apache-2.0
"""`profile`: where the time of a function's kernels goes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_gpu import timeline, types
from pallas_gpu.entry import profiling


def profile(
    f: Callable[..., Any],
    *,
    space: int | None = None,
    trace_scope: types.TraceScope | None = None,
    waits: bool = True,
) -> Callable[..., timeline.Profile]:
    records: list[timeline.Record] = []
    request = profiling.Request(records.append, space, trace_scope, waits)

    @functools.wraps(f)
    def profiled(*args: Any, **kwargs: Any) -> timeline.Profile:
        records.clear()
        with profiling.REQUESTED(request):
            results = f(*args, **kwargs)
            jax.block_until_ready(results)
            jax.effects_barrier()
        return timeline.Profile(list(records), results)

    return profiled
