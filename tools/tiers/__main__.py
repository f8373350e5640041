# SPDX-License-Identifier: Apache-2.0
"""Measures the tests, and writes the lists of the tiers; `make tiers` runs all of it.

    python -m pytest -p tools.tiers.record -n 2   what each test takes and runs
    python -m tools.tiers mutants                 which tests try each mutant
    python -m pytest -p tools.tiers.kills         which of them kill it
    python -m tools.tiers clean                   these tests, without a mutant
    python -m pytest -p tools.tiers.kills
    python -m tools.tiers choose                  the lists, in tests/tiers/

`new` writes jobs of mutants that the choice has not seen, and `found` compares what the
default tier finds of them with what all tests find.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tests.support import tiers
from tools.source_tree import ROOT
from tools.tiers import planted, record, source_mutants
from tools.tiers.choice import Choice, Measured

KILLS = tiers.FOLDER / "kills.txt"
# Each n-th line of the package is mutated; a job stops after three kills.
STEP = 60
KILLERS = 3
JOB_SECONDS = 15.0
JOB_TESTS = 60
# CPU seconds of the tests; collection and the imbalance of two workers come on top.
DEFAULT_SECONDS = 430.0
CHECK_SECONDS = 60.0
_CLEAN = "clean: "


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.tiers", description=__doc__)
    parser.add_argument(
        "command", choices=("mutants", "clean", "choose", "new", "found")
    )
    parser.add_argument("--step", type=int, default=STEP, help="each n-th line")
    parser.add_argument("--first", type=int, default=0, help="the first line")
    parser.add_argument("--default", type=float, default=DEFAULT_SECONDS)
    parser.add_argument("--check", type=float, default=CHECK_SECONDS)
    given = parser.parse_args()
    match given.command:
        case "mutants":
            _write_jobs(_mutant_jobs(given.step, given.first, everything=False))
        case "new":
            _write_jobs(_mutant_jobs(given.step, given.first, everything=True))
        case "clean":
            _write_jobs(_clean_jobs())
        case "found":
            _compare(given.step, given.first)
        case "choose":
            _choose(given.default, given.check)


def _mutant_jobs(step: int, first: int, *, everything: bool) -> list[dict[str, Any]]:
    """A job for each mutant that tests run; those known to kill it are tried first.

    Args:
      everything: try all tests that run the line, those of the default tier first, and
        stop at the first kill.
    """
    tests, bits, names = record.read()
    passed = [i for i, test in enumerate(tests) if test["outcome"] == "passed"]
    seconds = {i: _seconds(tests[i]) for i in passed}
    runs = _by_line(bits, names)
    chosen = tiers.read("default").chosen
    killers, jobs, unseen = tiers.mutants("kills"), [], 0
    for site in source_mutants.every(step, first):
        numbers = [i for i in runs(site.path, site.line) if i in seconds]
        if not numbers:
            unseen += 1
            continue
        ordered = [tests[i]["test"] for i in _spread(numbers, tests, seconds)]
        early = chosen if everything else frozenset(killers.get(site.name, ()))
        ordered = sorted(ordered, key=lambda test: test not in early)
        jobs.append(
            {
                "mutant": site.name,
                "site": dataclasses.asdict(site),
                "tests": ordered if everything else ordered[:JOB_TESTS],
                "kills": 1 if everything else KILLERS,
                "seconds": 600.0 if everything else JOB_SECONDS,
            }
        )
    print(f"{len(jobs)} mutants; {unseen} more are of lines that no test runs")
    return jobs


def _by_line(bits: np.ndarray, names: Sequence[tuple[str, int]]):
    """A function of a file and a line: the numbers of the tests that run it."""
    columns = {name: i for i, name in enumerate(names)}

    def runs(path: str, line: int) -> list[int]:
        column = columns.get((path, line))
        if column is None:
            return []
        byte, bit = divmod(column, 8)
        return np.flatnonzero(bits[:, byte] & (128 >> bit)).tolist()

    return runs


def _spread(
    numbers: Iterable[int], tests: Sequence[dict[str, Any]], seconds: dict[int, float]
) -> list[int]:
    """Tests in order of their time, one of each function before a second of any."""
    by_function: dict[str, list[int]] = collections.defaultdict(list)
    for i in sorted(numbers, key=lambda i: seconds[i]):
        by_function[tests[i]["test"].partition("[")[0]].append(i)
    rounds = itertools.zip_longest(*by_function.values())
    return [i for one in rounds for i in one if i is not None]


def _clean_jobs() -> list[dict[str, Any]]:
    """Jobs that run the tests that kill, without a mutant."""
    killers = sorted({x for names in _kills(clean=False).values() for x in names})
    return [
        {
            "mutant": f"{_CLEAN}{names[0]}",
            "site": None,
            "tests": names,
            "kills": len(names) + 1,
            "seconds": 600.0,
        }
        for names in itertools.batched(killers, 40)
    ]


def _results() -> list[dict[str, Any]]:
    path = record.FOLDER / "kills.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def _kills(*, clean: bool = True) -> dict[str, list[str]]:
    """The tests that kill each mutant.

    Args:
      clean: without tests that fail in a process of their own, without a mutant too.
    """
    results = _results()
    failing = {
        run["test"]
        for result in results
        if result["mutant"].startswith(_CLEAN)
        for run in result["runs"]
        if run["killed"]
    }
    return {
        result["mutant"]: [
            run["test"]
            for run in result["runs"]
            if run["killed"] and not (clean and run["test"] in failing)
        ]
        for result in results
        if not result["mutant"].startswith(_CLEAN)
    }


def _seconds(test: dict[str, Any]) -> float:
    """What a test takes of a core; of one that compiles, with its child's time."""
    return max(test["cpu"], test["wall"]) if test["offline"] else test["cpu"]


def _choose(default_seconds: float, check_seconds: float) -> None:
    tests, bits, _ = record.read()
    collected = _collected()
    kills = {
        mutant: [x for x in names if x in collected]
        for mutant, names in _kills().items()
    }
    passed = [
        i
        for i, test in enumerate(tests)
        if test["outcome"] == "passed" and test["test"] in collected
    ]
    measured = Measured(
        [tests[i]["test"] for i in passed],
        np.array([_seconds(tests[i]) for i in passed]),
        bits[passed],
        kills,
    )
    functions: dict[str, list[str]] = collections.defaultdict(list)
    for name in measured.names:
        functions[name.partition("[")[0]].append(name)

    default = Choice(measured)
    default.require(planted.tests(measured.names), "planted bugs")
    default.one_of_each(planted.features(functions), "features")
    default.one_of_each(planted.house(functions), "rules of the house")
    default.kill(1)
    default.kill(2, cheap=0.5)
    default.cover(1)
    default.cheapest_cases(functions, default_seconds)
    default.cover(2, default_seconds)
    _report("default", default, measured)
    known = {test["test"] for test in tests}
    chosen = default.names | (collected - known)  # what was never measured is new
    left = tiers.functions(known & collected) - tiers.functions(chosen)
    _write("default", tiers.Listed(chosen, frozenset(left)))

    inside = [i for i, name in enumerate(measured.names) if name in default.names]
    check = Choice(
        Measured(
            [measured.names[i] for i in inside],
            measured.seconds[inside],
            measured.lines[inside],
            kills,
        )
    )
    check.cover(1, check_seconds)
    _report("check", check, measured)
    _write("check", tiers.Listed(check.names, frozenset()))
    _write_kills(kills)


def _collected() -> set[str]:
    """The tests that exist: some may have gone since they were measured."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


def _report(tier: str, choice: Choice, measured: Measured) -> None:
    for why, count, seconds in choice.log:
        print(f"{tier}: {count} tests, {seconds} s, with {why}")
    print(f"{tier}: {len(choice.names)} of {len(measured.names)} tests")


def _write(tier: tiers.Tier, listed: tiers.Listed) -> None:
    tiers.FOLDER.mkdir(exist_ok=True)
    (tiers.FOLDER / f"{tier}.txt").write_text(listed.text(), encoding="utf-8")


def _write_kills(kills: dict[str, list[str]]) -> None:
    """Writes the matrix: each mutant, and the tests that were seen to kill it."""
    parts, equivalent = [], tiers.mutants("equivalent")
    for mutant in sorted(kills):
        parts += [mutant, *(f"    {name}" for name in kills[mutant])]
        if not kills[mutant] and mutant not in equivalent:
            print(f"no test kills {mutant}")
    KILLS.write_text("\n".join(parts) + "\n", encoding="utf-8")
    found = sum(map(bool, kills.values()))
    known = len(equivalent.keys() & kills)
    print(
        f"{found} of {len(kills)} mutants are killed by tests; {known} are equivalent"
    )


def _compare(step: int, first: int) -> None:
    """What the default tier finds of mutants, and what all tests find."""
    chosen = tiers.read("default").chosen
    equivalent = tiers.mutants("equivalent")
    sites = {site.name for site in source_mutants.every(step, first)}
    counts: collections.Counter[str] = collections.Counter()
    for result in _results():
        if result["mutant"] not in sites:
            continue
        killers = [run["test"] for run in result["runs"] if run["killed"]]
        if not killers and result["mutant"] in equivalent:
            verdict = "no test, being equivalent"
        elif not killers:
            verdict = "no test"
        else:
            verdict = "the default tier" if killers[0] in chosen else "others alone"
        counts[verdict] += 1
        if verdict in ("no test", "others alone"):
            print(f"{verdict}: {result['mutant']} {killers}")
    for verdict, count in counts.items():
        print(f"{count} mutants are killed by {verdict}")


def _write_jobs(jobs: list[dict[str, Any]]) -> None:
    (record.FOLDER / "jobs.json").write_text(json.dumps(jobs))
    print(f"{len(jobs)} jobs in {record.FOLDER.name}/jobs.json")


if __name__ == "__main__":
    main()
