# SPDX-License-Identifier: Apache-2.0
"""What a profiled launch recorded: from the words of its traces to spans."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pallas_gpu import types
from pallas_gpu.types.profiling import trace
from pallas_gpu.types.profiling.trace import EVENT_WORDS, HEADER_WORDS

# A row for each span. Times are in ns since the first trace began, or in events of
# all threads; `depth` counts the spans around it. A span is not complete if its end
# found no room: it then ends with the last event.
SPANS = np.dtype(
    [
        ("launch", np.int32), ("name", np.object_), ("is_wait", np.bool_),
        ("cta", np.int32), ("sm", np.int32), ("lane", np.int32),
        ("depth", np.int32), ("begin", np.float64), ("end", np.float64),
        ("is_complete", np.bool_),
    ]
)  # fmt: skip
# A row for each trace: when it began and ended, how many events it dropped.
TRACES = np.dtype(
    [
        ("launch", np.int32), ("cta", np.int32), ("sm", np.int32),
        ("lane", np.int32), ("begin", np.float64), ("end", np.float64),
        ("dropped", np.int64),
    ]
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Described:
    """What is known of the launches of a profiled kernel before they run.

    Attributes:
      kernel: its name.
      names: of its spans, each with whether it is a wait; a tag is a position here.
      recording: how they are recorded.
      grid: sizes of the axes of CTAs.
      thread_name: of the axis of warpgroups.
      is_modelled: whether it runs in the emulator, or as emitted code on the CPU.
    """

    kernel: str
    names: tuple[tuple[str, bool], ...]
    recording: types.Recording
    grid: tuple[int, ...]
    thread_name: str | None
    is_modelled: bool

    def lane(self, number: int) -> str:
        """Returns the name of a warpgroup, or of a warp."""
        warpgroup, warp = number, None
        if self.recording.scope is types.TraceScope.WARP:
            warpgroup, warp = divmod(number, 4)
        name = f"{self.thread_name or 'warpgroup'} {warpgroup}"
        return name if warp is None else f"{name} warp {warp}"


@dataclasses.dataclass(frozen=True)
class Record:
    """The traces of one launch.

    Attributes:
      described: the kernel.
      words: uint32 [CTAs, traces of a CTA, words].
    """

    described: Described
    words: Any


def in_order(records: Sequence[Record]) -> list[Record]:
    """Returns launches in their order on the device; those on the CPU are."""

    def started(record: Record) -> int:
        if record.described.is_modelled:
            return 0
        rows = np.asarray(record.words, np.uint32).reshape(-1, record.words.shape[-1])
        ran = rows[rows[:, trace.UNIT] != 0]
        return int(_wide(ran, trace.FIRST_TIME).min()) if len(ran) else 0

    return sorted(records, key=started)


def _wide(rows: np.ndarray, word: int) -> np.ndarray:
    """64-bit numbers of headers."""
    low, high = (rows[:, word + i].astype(np.int64) for i in (0, 1))
    return high << 32 | low


def decode(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray, bool]:
    """Returns the spans and the traces of launches, and whether times are in ns."""
    spans: list[tuple[Any, ...]] = []
    traces: list[tuple[Any, ...]] = []
    in_events, start = False, 0
    for number, record in enumerate(records):
        each = record.described.recording
        words = np.asarray(record.words, np.uint32)
        per_cta = words.shape[1]
        rows = words.reshape(-1, each.words)
        ran = np.flatnonzero(rows[:, trace.UNIT])
        rows = rows[ran]
        counted = record.described.is_modelled or bool(
            (rows[:, trace.UNIT] == trace.EVENTS).any()
        )
        in_events |= counted
        if not counted and not traces and len(rows):
            # As an integer: a float has no room for the nanoseconds since 1970.
            start = int(_wide(rows, trace.FIRST_TIME).min())
        clocks = _Clocks(rows, counted, start)
        for i, at in enumerate(ran):
            where = (int(at // per_cta), int(rows[i, trace.SM]), int(at % per_cta))
            count = int(rows[i, trace.COUNT])
            begin, end_of_trace = clocks.ends(i)
            traces.append(
                (number, *where, begin, end_of_trace, max(0, count - each.events))
            )
            events = rows[i, HEADER_WORDS:].reshape(-1, EVENT_WORDS)
            events = events[: min(count, each.events)]
            times = clocks.times(i, events[:, 1])
            for name, depth, *rest in _paired(events[:, 0], times):
                known = record.described.names[name]
                spans.append((number, *known, *where, depth, *rest))
        if counted and traces:
            # A run of the emulator begins at 0: the launches follow each other.
            start = int(max(x[5] for x in traces))
    found, rows = np.array(spans, SPANS), np.array(traces, TRACES)
    if len(rows):
        first = rows["begin"].min()
        for table in (found, rows):
            table["begin"] -= first
            table["end"] -= first
    return found, rows, not in_events


# Cycles: readings of both clocks that are closer are one, their mean.
_NEAR = 2000


class _Clocks:
    """The time of each event: the clock of its SM, related to the device's time.

    A trace has both at its begin and at its end. Between such readings the clock of an
    SM, whose rate changes with the card's power, is interpolated. The device's time
    advances in steps of 32 ns (H200): readings that are close are averaged.

    Args:
      rows: of a launch, with their headers.
      in_events: whether clock and time count events.
      start: when the launch starts in events, or which device's time is 0.
    """

    def __init__(self, rows: np.ndarray, in_events: bool, start: int):
        self._first = _wide(rows, trace.FIRST_CLOCK)
        self._last = _wide(rows, trace.LAST_CLOCK)
        self._sm = rows[:, trace.SM]
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        times = (_wide(rows, trace.FIRST_TIME), _wide(rows, trace.LAST_TIME))
        for sm in np.unique(self._sm):
            at = self._sm == sm
            clock = np.concatenate([self._first[at], self._last[at]])
            time = np.concatenate([x[at] for x in times]) - start
            if in_events:
                clock = np.array([0, 1])
                time = clock + start
            self._known[int(sm)] = _line(clock, time)

    def _at(self, i: int, clock: Any) -> Any:
        return np.interp(clock, *self._known[int(self._sm[i])])

    def ends(self, i: int) -> tuple[float, float]:
        """Returns when a trace began and ended."""
        return float(self._at(i, self._first[i])), float(self._at(i, self._last[i]))

    def times(self, i: int, low: np.ndarray) -> np.ndarray:
        """Returns the times of events from the lower halves of their clocks."""
        first = self._first[i]
        before = np.concatenate([[first % 2**32], low.astype(np.int64)])
        # They are in order, so that the 32 bits may wrap between two of them.
        return self._at(i, first + np.cumsum(np.diff(before) % 2**32))


def _line(clock: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the points of a piecewise linear function through readings."""
    first, last = clock.min(), clock.max()
    near = max(1, min(_NEAR, int(last - first) // 4))
    _, group, count = np.unique(
        (clock - first) // near, return_inverse=True, return_counts=True
    )
    x, y = (np.bincount(group, v - v.min()) / count + v.min() for v in (clock, time))
    # It goes on as it begins and ends; a single reading is one of 1 GHz.
    rates = np.diff(y) / np.diff(x) if len(x) > 1 else np.ones(1)
    far = 2.0**40
    x = np.concatenate([x[:1] - far, x, x[-1:] + far])
    y = np.concatenate([y[:1] - far * rates[0], y, y[-1:] + far * rates[-1]])
    return x, y


def _paired(tags: np.ndarray, times: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """Yields name, depth, begin, end and completeness of spans, as they begin."""
    opened: list[list[Any]] = []
    found: list[list[Any]] = []
    for tag, time in zip(tags.tolist(), times.tolist(), strict=True):
        if tag & trace.END:
            # Branches are whole in one body, and so are loops: ends match.
            span = opened.pop()
            span[3:] = time, True
            continue
        span = [tag, len(opened), time, time, True]
        opened.append(span)
        found.append(span)
    for span in opened:
        span[3:] = float(times[-1]), False
    yield from map(tuple, found)
