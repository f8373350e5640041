# SPDX-License-Identifier: Apache-2.0
"""`Profile`: the spans of profiled launches, as a table, a file, a picture, a text."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_gpu import errors, expect
from pallas_gpu.timeline import chrome, picture, record, summary

# Launches that a notebook draws by itself.
_MOST_PICTURES = 4


def _two_times(value: Any, what: str) -> tuple[float, float]:
    found = tuple(value) if expect.is_sequence(value) else ()
    if len(found) != 2:
        raise expect.wrong_type(
            what, "two times", "(begin, end)", value, "the times are those of the spans"
        )
    first, last = (expect.number(x, what) for x in found)
    if not first < last:
        raise errors.ArgumentError(
            f"{what} is empty",
            expected="(begin, end), begin before end",
            got=(first, last),
            hint="the times are those of the spans",
        )
    return first, last


class Profile:
    """Where the time of kernels goes: what their warpgroups, or warps, did when.

    `str` says it in words, `svg` draws it, which a notebook does by itself, and `save`
    writes a file for Perfetto.

    Attributes:
      spans: a NumPy array with a row for each span: `launch`, `name`, `is_wait`, `cta`,
        `sm`, `lane` (of a CTA the warpgroup, or the warp), `depth`, `begin`, `end`,
        `is_complete`. Times are nanoseconds since the first trace began. A span is not
        complete if there was no room for its end.
      traces: likewise for each warpgroup, or warp, of each CTA: `launch`, `cta`, `sm`,
        `lane`, `begin`, `end`, and `dropped`, the number of events without room.
      launches: the kernels, in the order of their launches.
      has_times: False if the kernels ran on a CPU: times are then numbers of events, in
        the order in which these took place there.
      results: what the function returned.
    """

    spans: np.ndarray
    traces: np.ndarray

    def __init__(self, records: Sequence[record.Record], results: Any = None):
        records = record.in_order(records)
        self.launches = tuple(r.described for r in records)
        self.spans, self.traces, self.has_times = record.decode(records)
        self.results = results

    def __str__(self) -> str:
        """For each warpgroup the share of its time in each scope and wait."""
        return summary.summary(self)

    def __repr__(self) -> str:
        kernels = ", ".join(x.kernel for x in self.launches)
        return f"<Profile of {kernels or 'no kernel'}: {len(self.spans)} spans>"

    @expect.arguments(
        launch=expect.integer(0),
        sm=expect.optional(expect.integer(0)),
        between=expect.optional(_two_times),
        width=expect.integer(300, 10_000, unit="pixels"),
    )
    def svg(
        self,
        *,
        launch: int = 0,
        sm: int | None = None,
        between: tuple[float, float] | None = None,
        width: int = 1000,
    ) -> str:
        """Returns a picture of an SM: its warpgroups as lanes over time.

        Waits are hatched, and have the names of their barriers; what is grey is outside
        of all spans. Lanes are repeated for CTAs that run at the same time.

        Args:
          sm: which SM; None: the one with the most spans.
          between: begin and end of the time to show; None: all of the launch.
          width: of the picture in pixels.

        Raises:
          ArgumentError: there is no such launch, `between` is empty, or the picture is
              too narrow.
          ArgumentTypeError: `between` is not a pair.
        """
        if launch >= len(self.launches):
            raise errors.ArgumentError(
                "Profile.svg: there is no such launch",
                expected=f"launch less than {len(self.launches)}, their number",
                got=launch,
                hint="launches count from 0; a function without kernels has none",
            )
        part = picture.part_of(self, launch, sm, between, width)
        return picture.render(self, part)

    def _repr_html_(self) -> str:
        shown = range(min(len(self.launches), _MOST_PICTURES))
        pictures = [self.svg(launch=i) for i in shown]
        return picture.page(pictures, str(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file for Perfetto (ui.perfetto.dev) or chrome://tracing.

        An SM is a process in it, a warpgroup or warp of a CTA a thread.
        """
        with open(path, "w", encoding="utf-8") as file:
            json.dump(chrome.events(self), file)


def write_file(folder: str, written: record.Record) -> None:
    """Writes the trace of one launch as `<folder>/<time in ns>-trace.json`."""
    os.makedirs(folder, exist_ok=True)
    profile = Profile([written])
    for now in itertools.count(time.time_ns()):
        path = os.path.join(folder, f"{now}-trace.json")
        try:
            # Another launch may have the same time.
            with open(path, "x", encoding="utf-8"):
                return profile.save(path)
        except FileExistsError:
            continue
