# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that runs mutants of the package against tests, in forked processes.

    python -m pytest -p tools.tiers.kills

Instead of the tests it runs what `.tiers/jobs.json` lists: for each mutant the tests to
try, in order, and after how many kills or seconds to stop. All tests are collected
once, in a process that has not started JAX; each mutant has a fork of it. Results are
appended to `.tiers/kills.jsonl`, and what is in it already is not done again.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tools.tiers import source_mutants
from tools.tiers.record import FOLDER

WORKERS = len(os.sched_getaffinity(0))
# A test that takes so much longer than a job allows hangs.
_HANGS_SECONDS = 60.0


class _Child:
    """A forked process that runs one job."""

    def __init__(self, job: dict[str, Any], items: dict[str, pytest.Item]):
        self.job = job
        self.started = time.monotonic()
        reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(reading)
            _run(job, items, writing)
        os.close(writing)
        self.pipe = reading
        self.text = ""

    @property
    def is_late(self) -> bool:
        limit = self.job["seconds"] + _HANGS_SECONDS
        return time.monotonic() - self.started > limit

    def read(self) -> bool:
        """Reads what the process has written; False when it has ended."""
        data = os.read(self.pipe, 1 << 16).decode()
        self.text += data
        return bool(data)

    def result(self) -> dict[str, Any]:
        os.close(self.pipe)
        os.waitpid(self.pid, 0)
        lines = [json.loads(line) for line in self.text.splitlines()]
        runs = [line for line in lines if "test" in line and "killed" in line]
        begun = [line["begin"] for line in lines if "begin" in line]
        if len(begun) > len(runs):  # it hung or crashed in the last one
            runs.append({"test": begun[-1], "killed": True, "seconds": None})
        return {
            "mutant": self.job["mutant"],
            "changed": next((x["changed"] for x in lines if "changed" in x), None),
            "runs": runs,
        }


def _run(job: dict[str, Any], items: dict[str, pytest.Item], pipe: int) -> None:
    """Runs a job and ends the process."""
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)

    def tell(**what: Any) -> None:
        os.write(pipe, (json.dumps(what) + "\n").encode())

    with contextlib.suppress(BaseException):
        gc.enable()
        if job["site"] is not None:
            site = source_mutants.Site(**job["site"])
            tell(changed=source_mutants.apply(site))
        kills, started = 0, time.monotonic()
        for name in job["tests"]:
            if name not in items:
                continue
            begin = time.monotonic()
            tell(begin=name)
            reports = runtestprotocol(items[name], log=False, nextitem=None)
            killed = any(report.failed for report in reports)
            seconds = round(time.monotonic() - begin, 3)
            tell(test=name, killed=killed, seconds=seconds)
            kills += killed
            if kills >= job["kills"] or time.monotonic() - started > job["seconds"]:
                break
    # Nothing of the parent's may be flushed or cleaned up; children end with us.
    with contextlib.suppress(OSError):
        os.write(pipe, b"")
    os.close(pipe)
    _end_children()
    os._exit(0)


def _end_children() -> None:
    from pallas_gpu.runtime import worker

    with contextlib.suppress(BaseException):
        worker.close_all()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    items = {item.nodeid: item for item in session.items}
    jobs = json.loads((FOLDER / "jobs.json").read_text())
    path = FOLDER / "kills.jsonl"
    done = set()
    if path.exists():
        done = {json.loads(x)["mutant"] for x in path.read_text().splitlines()}
    waiting = [job for job in jobs if job["mutant"] not in done]
    started = time.monotonic()
    with path.open("a") as out:
        for count, result in enumerate(_results(waiting, items), 1):
            out.write(json.dumps(result) + "\n")
            out.flush()
            if not count % 20:
                spent = time.monotonic() - started
                print(f"{count} of {len(waiting)} in {spent:.0f} s", file=sys.stderr)
    return True


def _results(
    waiting: list[dict[str, Any]], items: dict[str, pytest.Item]
) -> Iterator[dict[str, Any]]:
    source_mutants._live_functions()
    gc.freeze()
    queue = iter(waiting)
    running: list[_Child] = []
    while True:
        while len(running) < WORKERS and (job := next(queue, None)) is not None:
            running.append(_Child(job, items))
        if not running:
            return
        ready, _, _ = select.select([c.pipe for c in running], [], [], 1.0)
        for child in list(running):
            ended = child.pipe in ready and not child.read()
            if child.is_late:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            if ended:
                running.remove(child)
                yield child.result()
