# SPDX-License-Identifier: Apache-2.0
"""Measurement and output of the benchmarks: medians, ratios, card, versions."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jaxlib

import pallas_gpu as plgpu


def on_device(
    candidates: Mapping[str, Callable[..., Any]],
    inputs: Sequence[Sequence[Any]],
    *,
    rounds: int = 40,
    pause_seconds: float = 0.05,
) -> dict[str, float]:
    """Returns the median seconds of one call of each candidate on the device.

    CUPTI measures the time of each kernel on the device, which excludes the host and
    the launch. A round is a pause followed by one call of each candidate in a shuffled
    order, so changes of the card's clock affect all of them equally. Inputs alternate
    too, so that they are not cached.
    """
    compiled = {
        name: f if isinstance(f, jax.stages.Compiled) else jax.jit(f)
        for name, f in candidates.items()
    }
    milliseconds = plgpu.testing.do_bench(
        compiled,
        inputs=inputs,
        rounds=rounds,
        warmup=0,
        flush_l2=False,
        pause_seconds=pause_seconds,
    )
    return {name: median / 1e3 for name, median in milliseconds.items()}


def kernel_times(run: Callable[[], Any]) -> list[float]:
    """Returns the seconds of each kernel that `run` launches, in order."""
    times = plgpu.testing.kernel_times(run)
    return [milliseconds / 1e3 for _, milliseconds in times]


def interleaved(
    candidates: Mapping[str, Callable[[], Any]], *, rounds: int
) -> dict[str, float]:
    """Returns the median seconds of each candidate on the host, interleaved.

    Two warm-up rounds precede the measurement.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds + 2):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def environment() -> dict[str, str]:
    """Returns the card and the versions."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": sys.version.split()[0],
    }


def report(
    title: str, rows: Sequence[dict[str, Any]], notes: str, as_json: bool
) -> None:
    """Prints rows as a Markdown table, or everything as JSON."""
    if as_json:
        record = {"title": title, "environment": environment(), "notes": notes}
        print(json.dumps({**record, "rows": list(rows)}, indent=1))
        return
    print(f"## {title}\n")
    print(", ".join(f"{k} {v}" for k, v in environment().items()) + f". {notes}\n")
    columns = list(rows[0])
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(_text(row.get(c)) for c in columns) + " |")


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
