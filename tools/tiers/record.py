# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that measures each test: its time, its memory, the lines it runs.

    python -m pytest -p tools.tiers.record -n 2

Each process writes to `.tiers/`, a line of JSON for each test; its lines of the package
are a row of bits, numbered by `lines.json`. What JAX or a cache remembers of an earlier
test of the same process does not run again, so the lines of one test are a lower bound.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import resource
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest

from tools.source_tree import ROOT

FOLDER = ROOT / ".tiers"
_TOOL = sys.monitoring.COVERAGE_ID
_PACKAGE = str(ROOT / "pallas_gpu") + os.sep


class Lines:
    """The lines of the package's functions, and those that have run."""

    def __init__(self) -> None:
        codes = sorted(
            {code for live in _functions() for code in _within(live.__code__)},
            key=lambda code: (code.co_filename, code.co_firstlineno),
        )
        self.names: list[tuple[str, int]] = sorted(
            {
                (os.path.relpath(code.co_filename, ROOT), line)
                for code in codes
                for line in _lines(code)
            }
        )
        numbers = {name: i for i, name in enumerate(self.names)}
        self._numbers = {
            code: {
                line: numbers[os.path.relpath(code.co_filename, ROOT), line]
                for line in _lines(code)
            }
            for code in codes
        }
        self.run = np.zeros(len(self.names), np.bool_)
        sys.monitoring.use_tool_id(_TOOL, "tiers")
        event = sys.monitoring.events.LINE
        sys.monitoring.register_callback(_TOOL, event, self._line)
        for code in codes:
            sys.monitoring.set_local_events(_TOOL, code, event)

    def _line(self, code: types.CodeType, line: int) -> Any:
        number = self._numbers[code].get(line)
        if number is not None:
            self.run[number] = True
        return sys.monitoring.DISABLE

    def restart(self) -> None:
        """Forgets what has run."""
        self.run[:] = False
        sys.monitoring.restart_events()


class Record:
    """The measurements of one process."""

    def __init__(self) -> None:
        FOLDER.mkdir(exist_ok=True)
        for info in pkgutil.walk_packages([_PACKAGE], "pallas_gpu."):
            if not info.name.endswith("__main__"):
                importlib.import_module(info.name)
        self.lines = Lines()
        (FOLDER / "lines.json").write_text(json.dumps(self.lines.names))
        stem = FOLDER / f"{os.getpid()}"
        self.tests: TextIO = stem.with_suffix(".jsonl").open("a")
        self.bits = stem.with_suffix(".bits").open("ab")

    def write(self, test: dict[str, Any]) -> None:
        self.bits.write(np.packbits(self.lines.run).tobytes())
        self.bits.flush()
        self.tests.write(json.dumps(test) + "\n")
        self.tests.flush()


_record: Record | None = None
_outcome = "passed"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _record, _outcome
    if _record is None:
        _record = Record()
    _outcome = "passed"
    _record.lines.restart()
    before = _spent()
    result = yield
    wall, cpu, children = (x - y for x, y in zip(_spent(), before, strict=True))
    _record.write(
        {
            "test": item.nodeid,
            "outcome": _outcome,
            "wall": round(wall, 4),
            "cpu": round(cpu + children, 4),
            "rss_mb": _resident() >> 20,
            "offline": item.get_closest_marker("offline") is not None,
        }
    )
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _outcome
    if report.outcome != "passed":
        _outcome = report.outcome


def read() -> tuple[list[dict[str, Any]], np.ndarray, list[tuple[str, int]]]:
    """The measured tests, the packed lines of each (a row), and what the lines are."""
    names = [(path, line) for path, line in _json("lines.json")]
    width = (len(names) + 7) // 8
    tests, rows = [], []
    for path in sorted(FOLDER.glob("[0-9]*.jsonl")):
        found = [json.loads(line) for line in path.read_text().splitlines()]
        bits = np.fromfile(path.with_suffix(".bits"), np.uint8)
        tests += found
        rows.append(bits.reshape(-1, width)[: len(found)])
    return tests, np.concatenate(rows), names


def _json(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


def _spent() -> tuple[float, float, float]:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    children = usage.ru_utime + usage.ru_stime
    return time.perf_counter(), time.process_time(), children


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _functions() -> list[types.FunctionType]:
    gc.unfreeze()
    found = [
        x
        for x in gc.get_objects()
        if type(x) is types.FunctionType and x.__code__.co_filename.startswith(_PACKAGE)
    ]
    gc.freeze()
    return found


def _within(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _within(const)


def _lines(code: types.CodeType) -> set[int]:
    first = code.co_firstlineno
    return {line for _, _, line in code.co_lines() if line and line != first}
