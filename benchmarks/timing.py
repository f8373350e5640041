# SPDX-License-Identifier: Apache-2.0
"""How the benchmarks measure and print: medians, ratios, card, versions."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib


def on_device_seconds(
    f: Callable[..., Any], args: Sequence[Any], *, rounds: int = 7, calls: int = 10
) -> float:
    """Returns the median time of one call on the device.

    A round queues `calls` calls and waits for the last one, so that the host's share is
    hidden behind the device's; the median is over rounds, after two warm-up rounds.
    """
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        for _ in range(calls):
            result = f(*args)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times[2:])


def host_seconds(f: Callable[[], Any], *, rounds: int = 9) -> float:
    """Returns the median time of a call on the host, after one warm-up call."""
    f()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def environment() -> dict[str, str]:
    """Returns card and versions."""
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
