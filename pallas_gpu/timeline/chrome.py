# SPDX-License-Identifier: Apache-2.0
"""Profiles in the trace event format, which Perfetto and Chrome show."""

from __future__ import annotations

from typing import Any


def events(profile: Any) -> dict[str, Any]:
    """Returns a profile as JSON: an SM is a process, a warpgroup of a CTA a thread."""
    found: list[dict[str, Any]] = []
    places: dict[tuple[int, int], int] = {}
    for trace in profile.traces:
        described = profile.launches[trace["launch"]]
        key = (int(trace["cta"]), int(trace["lane"]))
        if key not in places:
            places[key] = len(places) + 1
        name = f"CTA {trace['cta']} {described.lane(int(trace['lane']))}"
        place = {"pid": 1 + int(trace["sm"]), "tid": places[key]}
        found.append(
            {"name": "thread_name", "ph": "M", **place, "args": {"name": name}}
        )
        found.append(
            {"name": "process_name", "ph": "M", **place,
             "args": {"name": f"SM {trace['sm']}"}}
        )  # fmt: skip
    for span in profile.spans:
        found.append(
            {
                "name": span["name"],
                "cat": "wait" if span["is_wait"] else "scope",
                "ph": "X",
                # The unit of the format is microseconds.
                "ts": float(span["begin"]) / 1e3,
                "dur": float(span["end"] - span["begin"]) / 1e3,
                "pid": 1 + int(span["sm"]),
                "tid": places[int(span["cta"]), int(span["lane"])],
            }
        )
    return {"displayTimeUnit": "ns", "traceEvents": found}
