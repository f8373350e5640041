# SPDX-License-Identifier: Apache-2.0
"""The marks of a profiled kernel; the time is the number of marks so far."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu import types
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.gpu.machine.cta import Cta, Warp, Warpgroup
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import profiler
from pallas_gpu.types.profiling import trace

_EMULATE = registry.RuleKind.EMULATE
_WARPS = 4
# The events of each trace of a CTA: time and tag.
_EVENTS: Key[Cta, dict[int, list[tuple[int, int]]]] = Key("events", lambda _: {})


@registry.register(profiler.profile_start_p, _EMULATE)
def _start(wg: Warpgroup, _: Any, recording: types.Recording, **__: Any) -> None:
    _record(wg, recording, None)


@registry.register(profiler.profile_mark_p, _EMULATE)
def _mark(
    wg: Warpgroup, _: Any, tag: int, recording: types.Recording, **__: Any
) -> None:
    _record(wg, recording, tag)


def _record(wg: Warpgroup, recording: types.Recording, tag: int | None) -> None:
    events, now = _EVENTS.of(wg.cta), wg.cta.device.execution.now()
    for i in _traces(wg, recording):
        events.setdefault(i, []).append((now, 0 if tag is None else tag))


def _traces(wg: Warpgroup, recording: types.Recording) -> list[int]:
    """Returns the traces that a warpgroup or a warp records."""
    number = wg.number if isinstance(wg, Warp) else None
    if recording.scope is types.TraceScope.WARPGROUP:
        return [] if number else [wg.index]
    warps = range(_WARPS) if number is None else [number]
    return [_WARPS * wg.index + i for i in warps]


@registry.register(profiler.profile_stop_p, _EMULATE)
def _stop(
    wg: Warpgroup, operands: dict[str, Any], recording: types.Recording, **_: Any
) -> None:
    mesh, cta = wg.cta.mesh, wg.cta
    place = np.ravel_multi_index(
        (0, *cta.cluster.block, *cta.rank), (1, *mesh.grid, *mesh.cluster)
    )
    for i in _traces(wg, recording):
        (started, no_tag), *events = _EVENTS.of(cta)[i]
        del no_tag
        row = np.zeros(recording.words, np.uint32)
        now = wg.cta.device.execution.now()
        for word, value in (
            (trace.FIRST_TIME, started),
            (trace.FIRST_CLOCK, started),
            (trace.LAST_TIME, now),
            (trace.LAST_CLOCK, now),
            (trace.SM, 0),
            (trace.COUNT, len(events)),
            (trace.UNIT, trace.EVENTS),
        ):
            row[word] = value
        stored = [(tag, time) for time, tag in events[: recording.events]]
        words = np.array(stored, np.uint32).reshape(-1)
        row[trace.HEADER_WORDS :][: len(words)] = words
        # Each trace has its own row: there is nothing to compare.
        operands["traces"].memory.data[place, i] = row
