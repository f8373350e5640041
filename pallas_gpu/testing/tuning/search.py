# SPDX-License-Identifier: Apache-2.0
"""Measures candidates in rounds, and ends the measurement of those that are slow."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

from pallas_gpu.testing.rounds import Rounds, Timer
from pallas_gpu.testing.tuning.candidates import Candidate, Outcome
from pallas_gpu.testing.tuning.progress import Progress

# After so many rounds, candidates whose median exceeds the best one by this factor end.
# Medians of few calls on an H200 differ by some percent between runs.
_ENDS = {2: 1.5, 4: 1.2, 8: 1.08, 16: 1.03}
_ROUNDS = 40


def measure(
    candidates: Sequence[Candidate],
    arrays: Sequence[Any],
    *,
    timer: Timer | None,
    flush_l2: bool,
    deadline: float,
    progress: Progress,
) -> Candidate:
    """Measures the candidates that are left; returns the one with the least median.

    All of them are measured at least once. The measurement ends after 40 rounds, or
    after the round in which the deadline passes.
    """
    left = {f"configuration {c.index}": c for c in candidates if c.is_left}
    calls = {name: functools.partial(c.run, *arrays) for name, c in left.items()}
    progress.begin("measure", _ROUNDS)
    rounds = Rounds(calls, timer=timer, flush_l2=flush_l2)
    for number in range(1, _ROUNDS + 1):
        rounds.run(left)
        for name, candidate in left.items():
            candidate.times = rounds.times[name]
        progress.advance()
        if number in _ENDS:
            left = _without_slow(left, _ENDS[number])
        if time.monotonic() >= deadline or (len(left) == 1 and number >= max(_ENDS)):
            break
    for candidate in left.values():
        candidate.end(Outcome.MEASURED)
    return min(left.values(), key=median)


def median(candidate: Candidate) -> float:
    """Returns the median milliseconds of a candidate's calls."""
    return statistics.median(candidate.times)


def _without_slow(left: dict[str, Candidate], factor: float) -> dict[str, Candidate]:
    best = min(map(median, left.values()))
    for candidate in left.values():
        if (times := median(candidate) / best) > factor:
            reason = f"{times:.2f} times the best after {len(candidate.times)} rounds"
            candidate.end(Outcome.SLOWER, reason)
    return {name: c for name, c in left.items() if c.is_left}
