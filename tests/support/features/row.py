# SPDX-License-Identifier: Apache-2.0
"""What a row says: which tests hold a feature, and who finds what was left out.

A test is named by its file below `tests/`, without `test_`, and its name, without
`test_`: "lowering/families/copies/bulk::parts_travel_through_smem"; in the table
FEATURES of a test file, one of that file by its name alone. A mutant is named by its
kernel and its mistake: "tma_pipeline: no commit".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

# What a kernel may leave out around an asynchronous operation.
OMISSIONS = ("wait", "commit", "fence", "count")


def omissions(form: str, *kinds: str) -> dict[str, str]:
    """Those of a form of `tests/support/mutations/copy_forms.py`."""
    return {kind: f"{form}: {kind}" for kind in kinds or OMISSIONS}


@dataclasses.dataclass(frozen=True)
class Row:
    """A feature.

    Attributes:
      feature: its name.
      upstream: the rules of upstream's launch context, primitives and scratch kinds
        that it covers.
      operations: its primitives.
      runs: the test that runs it in the emulator, in lockstep under both semantics,
        and on a GPU if there is one.
      offline: the test that compiles it without a GPU.
      instruction: what that test looks for in PTX.
      omissions: for each of `OMISSIONS` the mutant, or the test, in which the emulator
        reports that it was left out; a reason in parentheses where nothing can be.
      blackwell: whether Hopper lacks it.
    """

    feature: str
    upstream: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    runs: str = ""
    offline: str = ""
    instruction: str = ""
    omissions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    blackwell: bool = False

    def of(self, module: str) -> Row:
        """The row, with the file of what it names by a test's name alone."""
        file = module.removeprefix("tests.").replace(".", "/").replace("/test_", "/")

        def named(name: str) -> str:
            return f"{file}::{name}" if name.isidentifier() else name

        return dataclasses.replace(
            self,
            runs=named(self.runs),
            offline=named(self.offline),
            omissions={kind: named(name) for kind, name in self.omissions.items()},
        )


@dataclasses.dataclass(frozen=True)
class Refused:
    """What the hardware can do, or upstream takes, and this package refuses.

    Attributes:
      feature: its name.
      upstream: as of `Row`.
      error: the class of the error.
      reason: why.
      test: the test of the error.
    """

    feature: str
    upstream: tuple[str, ...]
    error: str
    reason: str
    test: str
