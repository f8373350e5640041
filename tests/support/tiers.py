# SPDX-License-Identifier: Apache-2.0
"""Which tests a tier runs: `--tier=check`, `default`, `rest`, or all of them.

A tier is a list, which `make tiers` chooses from what was measured of each test. A
function that no list knows is new: the default tier runs it whole. `rest` is what the
default tier, run before it, has left: other tests, and other variants of its own.
`measured` is all tests in the variants of the default tier.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

import pytest

Tier = Literal["check", "default", "rest", "all", "measured"]
TIERS: tuple[Tier, ...] = get_args(Tier)
FOLDER = Path(__file__).resolve().parents[1] / "tiers"
_LEFT = "- "
# All tests, where all were collected.
COLLECTED = pytest.StashKey[frozenset[str]]()

_tier: Tier = "all"
_folder: Path | None = None
# Whether the test that runs has asked for the tier: another one would run it otherwise.
_asked = False


@dataclasses.dataclass(frozen=True)
class Listed:
    """The list of a tier.

    Attributes:
      chosen: the tests that it runs.
      left: the functions of which it runs no case, as `file::function`.
    """

    chosen: frozenset[str]
    left: frozenset[str]

    def runs(self, test: str, *, new: bool) -> bool:
        """Whether the tier runs a test; `new` is what it does with unknown ones."""
        function = test.partition("[")[0]
        if test in self.chosen:
            return True
        return new and function not in self.left and function not in self._functions

    @functools.cached_property
    def _functions(self) -> frozenset[str]:
        return frozenset(functions(self.chosen))

    def text(self) -> str:
        """The list as its file has it: sorted, by test file."""
        by_file: dict[str, list[str]] = {}
        for prefix, tests in (("", self.chosen), (_LEFT, self.left)):
            for test in sorted(tests):
                file, _, name = test.partition("::")
                by_file.setdefault(file, []).append(f"    {prefix}{name}\n")
        return "".join(f"{file}\n{''.join(by_file[file])}" for file in sorted(by_file))


def read(tier: Tier) -> Listed:
    """Reads the list of a tier."""
    path = FOLDER / f"{tier}.txt"
    if not path.exists():
        raise pytest.UsageError(f"{path} is missing: `make tiers` writes it")
    return parsed(path.read_text(encoding="utf-8"))


def parsed(text: str) -> Listed:
    """The list of a tier, from its text."""
    chosen: set[str] = set()
    left: set[str] = set()
    for file, names in by_heading(text).items():
        for name in names:
            to = left if name.startswith(_LEFT) else chosen
            to.add(f"{file}::{name.removeprefix(_LEFT)}")
    return Listed(frozenset(chosen), frozenset(left))


def mutants(name: str) -> dict[str, list[str]]:
    """What a file of this folder lists below each mutant.

    Args:
      name: "kills", for the tests that were seen to kill it; "equivalent", for why none
        can.
    """
    return by_heading((FOLDER / f"{name}.txt").read_text(encoding="utf-8"))


def by_heading(text: str) -> dict[str, list[str]]:
    """The indented lines below each line that is not."""
    found: dict[str, list[str]] = {}
    below: list[str] = []
    for line in text.splitlines():
        if line.startswith(" "):
            below.append(line.strip())
        else:
            below = found.setdefault(line, [])
    return found


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=TIERS,
        default="all",
        help="which of the collected tests run; see CONTRIBUTING.md (default: all)",
    )


def configure(config: pytest.Config, folder: Path | None) -> None:
    """Sets the tier of this process, and the folder for what has passed."""
    global _tier, _folder
    _tier, _folder = config.getoption("--tier"), folder
    if folder and _tier == "default" and not hasattr(config, "workerinput"):
        for path in folder.glob("*.txt"):
            path.unlink()


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what the tier does not run."""
    files = {x.path for x in items}
    if all(path in files for path in FOLDER.parent.rglob("test_*.py")):
        config.stash[COLLECTED] = frozenset(x.nodeid for x in items)
    if _tier in ("all", "measured"):
        return
    if _tier == "rest":
        done = _done()
        kept = [x for x in items if x.nodeid not in done]
    else:
        listed, new = read(_tier), _tier == "default"
        kept = [x for x in items if listed.runs(x.nodeid, new=new)]
    names = {x.nodeid for x in kept}
    left = [x for x in items if x.nodeid not in names]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def begin() -> None:
    """A test begins."""
    global _asked
    _asked = False


def passed(name: str) -> None:
    """Notes a test that has passed, if no tier runs it otherwise."""
    if _folder and _tier == "default" and not _asked:
        with (_folder / f"{os.getpid()}.txt").open("a") as file:
            file.write(f"{name}\n")


def _done() -> set[str]:
    texts = [path.read_text() for path in _folder.glob("*.txt")] if _folder else []
    return {name for text in texts for name in text.splitlines()}


def runs_everything() -> bool:
    """Whether the test that runs has to run all of its variants."""
    global _asked
    _asked = True
    return _tier in ("all", "rest")


def one_of[T](name: str, variants: Sequence[T]) -> T:
    """One of the variants, chosen by a test's name: the same in every run."""
    return variants[zlib.crc32(name.encode()) % len(variants)]


def functions(tests: Iterable[str]) -> set[str]:
    """The functions of tests, as `file::function`."""
    return {test.partition("[")[0] for test in tests}
