# SPDX-License-Identifier: Apache-2.0
"""Times of memory-bound kernels, interleaved with a copy from device to device."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from benchmarks import timing

ROUNDS, PAUSE_SECONDS = 25, 0.03
COPY = "device copy"


def wait(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Calls a function and waits for its results."""
    return jax.block_until_ready(function(*args))


def interleaved(
    candidates: Mapping[str, Callable[[], Any]], source: Any
) -> dict[str, float]:
    """Returns median device seconds: of kernels by CUPTI, of the copy by events.

    Args:
      candidates: each launches the same kernels in every call.
      source: torch array that `COPY` copies on the device.
    """
    counts = {}
    for name, run in candidates.items():
        run()
        counts[name] = len(timing.kernel_times(run))
    times: dict[str, list[float]] = {name: [] for name in (*candidates, COPY)}
    order, shuffle = list(candidates), random.Random(0).shuffle
    for _ in range(ROUNDS):
        shuffle(order)
        time.sleep(PAUSE_SECONDS)
        for name in order:
            spent = timing.kernel_times(candidates[name])
            times[name].append(sum(spent[-counts[name] :]))
        times[COPY].append(_copy_seconds(source))
    return {name: statistics.median(values) for name, values in times.items()}


def _copy_seconds(source: Any, copies: int = 4) -> float:
    import torch

    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    start.record()
    for _ in range(copies):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / copies
