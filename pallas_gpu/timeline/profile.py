# SPDX-License-Identifier: Apache-2.0
"""`Profile`: the spans of profiled launches, as a table, a file, a picture, a text."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Sequence
from typing import Any

from pallas_gpu.timeline import chrome, record


class Profile:
    def __init__(self, records: Sequence[record.Record], results: Any = None):
        self.launches = tuple(r.described for r in records)
        self.spans, self.traces, self.has_times = record.decode(records)
        self.results = results

    def save(self, path: str | os.PathLike[str]) -> None:
        with open(path, "x", encoding="utf-8") as file:
            json.dump(chrome.events(self), file)


def write_file(folder: str, written: record.Record) -> None:
    os.makedirs(folder, exist_ok=True)
    profile = Profile([written])
    for now in itertools.count(time.time_ns()):
        try:
            return profile.save(os.path.join(folder, f"{now}-trace.json"))
        except FileExistsError:
            continue
