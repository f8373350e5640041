# SPDX-License-Identifier: Apache-2.0
"""Profiles as text: for each warpgroup where its time goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pallas_gpu.timeline.picture import duration

# Names with less of a warpgroup's time are added up.
_LEAST_PERCENT = 0.95


def summary(profile: Any) -> str:
    """Returns the text of a profile."""
    if not len(profile.traces):
        return "no kernel was launched"
    lines: list[str] = []
    for launch in range(len(profile.launches)):
        lines += _launch(profile, launch)
    if not profile.has_times:
        lines.append(
            "Times are numbers of events in the order in which they took place on the "
            "CPU: they say nothing of times on a GPU."
        )
    return "\n".join(lines)


def _launch(profile: Any, launch: int) -> Iterator[str]:
    described = profile.launches[launch]
    traces = profile.traces[profile.traces["launch"] == launch]
    spans = profile.spans[profile.spans["launch"] == launch]
    ctas, sms = (len(np.unique(traces[name])) for name in ("cta", "sm"))
    head = f"kernel {described.kernel}: {_count(ctas, 'CTA')}"
    if profile.has_times and ctas:
        took = traces["end"].max() - traces["begin"].min()
        head += f" on {_count(sms, 'SM')}, {duration(float(took))}"
        if idle := _idle_percent(traces):
            head += f"; an SM has no CTA for {idle:.0f} % of it"
    yield head
    own = _own_times(spans)
    for lane in np.unique(traces["lane"]).tolist():
        at = traces[traces["lane"] == lane]
        total = float((at["end"] - at["begin"]).sum()) or 1.0
        of_lane = spans["lane"] == lane
        waits = _shares(spans[of_lane], own[of_lane], total, True)
        scopes = _shares(spans[of_lane], own[of_lane], total, False)
        rest = max(0.0, 100 - sum(dict([*waits, *scopes]).values()))
        parts = [f"{name} {_percent(x)}" for name, x in _listed(scopes)]
        parts.append(f"outside of spans {_percent(rest)}")
        text = ", ".join(parts)
        if awaited := [f"{_percent(x)} on {name}" for name, x in _listed(waits)]:
            text = f"waits {', '.join(awaited)}; {text}"
        yield f"  {described.lane(lane)}: {text}"
        if dropped := int(at["dropped"].sum()):
            yield (
                f"  {described.lane(lane)} has dropped {_count(dropped, 'event')}, "
                f"behind the first {described.recording.events} of each CTA: profile "
                "with more space"
            )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _percent(share: float) -> str:
    return f"{share:.0f} %"


def _own_times(spans: np.ndarray) -> np.ndarray:
    """Returns the time of each span without that of the spans in it."""
    long = spans["end"] - spans["begin"]
    own = long.copy()
    around: list[int] = []
    key = None
    for i, span in enumerate(spans):
        # Those of a trace are in the order in which they begin.
        if (place := (span["cta"], span["lane"])) != key:
            key, around = place, []
        del around[int(span["depth"]) :]
        if around:
            own[around[-1]] -= long[i]
        around.append(i)
    return own


def _shares(
    spans: np.ndarray, own: np.ndarray, total: float, is_wait: bool
) -> list[tuple[str, float]]:
    """Returns the share of each name in percent, the largest first."""
    chosen = spans["is_wait"] == is_wait
    names, times = spans["name"][chosen], own[chosen]
    shares = {
        name: 100 * float(times[names == name].sum()) / total for name in set(names)
    }
    return sorted(shares.items(), key=lambda item: (-item[1], item[0]))


def _listed(shares: list[tuple[str, float]]) -> list[tuple[str, float]]:
    return [(f"`{name}`", x) for name, x in shares if x >= _LEAST_PERCENT]


def _idle_percent(traces: np.ndarray) -> float:
    """Returns the share of a launch's time in which no CTA runs on an SM, of those."""
    begin, end = traces["begin"].min(), traces["end"].max()
    numbers = np.unique(traces["sm"])
    busy = 0.0
    for sm in numbers:
        at = np.sort(traces[traces["sm"] == sm], order="begin")
        until = begin
        for first, last in zip(at["begin"], at["end"], strict=True):
            busy += max(0.0, last - max(first, until))
            until = max(until, last)
    share = 100 * (1 - busy / (((end - begin) or 1.0) * len(numbers)))
    return share if share >= _LEAST_PERCENT else 0.0
