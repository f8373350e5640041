# SPDX-License-Identifier: Apache-2.0
"""How the benchmarks measure and print: medians, ratios, card, versions."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jaxlib


def on_device(
    candidates: Mapping[str, Callable[..., Any]],
    args: Sequence[Any],
    *,
    rounds: int = 9,
    calls: int = 10,
) -> dict[str, float]:
    """Returns the median seconds of one call of each candidate on the device.

    A round queues `calls` calls and waits for the last one, so that the host's share is
    hidden behind the device's. Candidates take turns, so that a card whose clock drifts
    with its temperature treats them alike.
    """

    def queued(f: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                result = f(*args)
            jax.block_until_ready(result)

        return run

    runs = {name: queued(f) for name, f in candidates.items()}
    times = interleaved(runs, rounds=rounds)
    return {name: seconds / calls for name, seconds in times.items()}


def interleaved(
    candidates: Mapping[str, Callable[[], Any]], *, rounds: int
) -> dict[str, float]:
    """Returns the median seconds of each candidate; they take turns.

    Two rounds of warm-up come first.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds + 2):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


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
