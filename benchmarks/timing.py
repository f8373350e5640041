# SPDX-License-Identifier: Apache-2.0
"""How the benchmarks measure and print: medians, ratios, card, versions."""

from __future__ import annotations

import functools
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
    inputs: Sequence[Sequence[Any]],
    *,
    rounds: int = 9,
    programs: int = 4,
    pause_seconds: float = 0.1,
) -> dict[str, float]:
    """Returns the median seconds of one call of each candidate on the device.

    One XLA program calls a candidate on each of several inputs (on equal ones XLA would
    compute once), and several programs are queued before the host waits, so that the
    host has no share in the time. Candidates take turns; each turn is a pause, a run to
    bring the clock up, and the run that counts: without pauses the times of fast and
    slow kernels came out alike on an H200, as if its clock were lowered under load.
    """

    def run(program: Callable[..., Any]) -> None:
        for _ in range(programs):
            results = program(inputs)
        jax.block_until_ready(results)

    runs = {}
    for name, f in candidates.items():
        program = jax.jit(lambda sets, f=f: [f(*args) for args in sets])
        runs[name] = functools.partial(run, program)
    times = interleaved(
        runs, rounds=rounds, pause_seconds=pause_seconds, untimed_first=True
    )
    return {name: t / (programs * len(inputs)) for name, t in times.items()}


def interleaved(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    pause_seconds: float = 0.0,
    untimed_first: bool = False,
) -> dict[str, float]:
    """Returns the median seconds of each candidate; they take turns.

    Two rounds of warm-up come first.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds + 2):
        for name, run in candidates.items():
            time.sleep(pause_seconds)
            if untimed_first:
                run()
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
