# SPDX-License-Identifier: Apache-2.0
"""Digests of the modules that tests lower: whether a refactoring changes emitted code.

As a plugin of pytest it records a hash of every module that the compiler completes;
modules with equal hashes have equal PTX, but for the order of constants. As a program
it compares two records:

    python -m pytest -q -p tools.digests --digests=/tmp/before tests/ops tests/examples
    python -m tools.digests /tmp/before /tmp/after
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pallas_gpu import compiler
from pallas_gpu.lowering.machine import Build

# Name, target and digest of a module, and the first test of a process that lowered it.
Record = dict[str, str]

_record: Record = {}
_running = ["outside of tests"]
_CONSTANT = re.compile(r"\s*(%\w+) = (?:arith|llvm\.mlir)\.constant(.*)")
_NAME = re.compile(r"%\w+")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--digests", type=Path, help="folder of the record of digests")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("digests") is None:
        raise pytest.UsageError("-p tools.digests needs --digests=FOLDER")
    stages = []
    for stage in compiler.STAGES:
        if stage.name == compiler.LOWERED:
            stage = dataclasses.replace(stage, run=_recorded(stage.run))
        stages.append(stage)
    compiler.STAGES = tuple(stages)


def pytest_runtest_setup(item: pytest.Item) -> None:
    _running.append(item.nodeid)


def pytest_unconfigure(config: pytest.Config) -> None:
    folder = config.getoption("digests")
    if folder is not None and _record:
        folder.mkdir(parents=True, exist_ok=True)
        name = getattr(config, "workerinput", {}).get("workerid", "main")
        (folder / f"{name}.json").write_text(json.dumps(_record, indent=0))


def _recorded(run: Callable[[Build], Build]) -> Callable[[Build], Build]:
    def stage(build: Build) -> Build:
        build = run(build)
        module = f"{build.name} {build.target.name} {_digest(build)}"
        _record.setdefault(module, _running[-1])
        return build

    return stage


def _digest(build: Build) -> str:
    text = _without_constants(str(build.module))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_constants(text: str) -> str:
    """The text of a module with values numbered in order, and constants in place.

    Where constants are defined says nothing: they are hoisted in the order of their
    first use by whoever emits.
    """
    constants: dict[str, str] = {}
    names: dict[str, str] = {}

    def named(value: re.Match[str]) -> str:
        name = value[0]
        return constants.get(name) or names.setdefault(name, f"%{len(names)}")

    lines = []
    for line in text.splitlines():
        constant = _CONSTANT.match(line)
        if constant:
            constants[constant[1]] = f"<{constant[2].strip()}>"
        else:
            lines.append(_NAME.sub(named, line))
    return "\n".join(lines)


def read(folder: Path) -> Record:
    """Returns the record in a folder: for each module a test that lowered it."""
    record: Record = {}
    for path in sorted(folder.glob("*.json")):
        record.update(json.loads(path.read_text()))
    if not record:
        raise SystemExit(f"no record of digests in {folder}")
    return record


def main() -> None:
    """Prints the modules that only one record has; the exit status says if any is."""
    parser = argparse.ArgumentParser(description="compare two records of digests")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args()
    before, after = read(options.before), read(options.after)
    gone, new = before.keys() - after.keys(), after.keys() - before.keys()
    for sign, record, modules in (("-", before, gone), ("+", after, new)):
        for module in sorted(modules, key=lambda module: (record[module], module)):
            print(sign, record[module], module)
    print(f"{len(before)} and {len(after)} modules: {len(gone)} gone, {len(new)} new")
    sys.exit(bool(gone or new))


if __name__ == "__main__":
    main()
