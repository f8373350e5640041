# SPDX-License-Identifier: Apache-2.0
"""The candidates of a tuned function: what becomes of each, and a report of all."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from pallas_gpu import errors


class Outcome(enum.Enum):
    """What became of a candidate.

    Attributes:
      MEASURED: it was measured to the end.
      SLOWER: it was clearly slower than others and measured in the first rounds only.
      FAILED: it does not trace, compile or run, or its result is wrong.
      SPILLS: it compiles with registers spilled to memory, and others do not.
      LEFT_OUT: the time was over, or others had a better estimate.
    """

    MEASURED = "measured"
    SLOWER = "slower"
    FAILED = "failed"
    SPILLS = "spills"
    LEFT_OUT = "left out"


@dataclasses.dataclass
class Candidate:
    """A configuration on its way through the tuner.

    Attributes:
      index: its position among the configurations.
      config: the configuration.
      text: its repr.
      traced: the call with the configuration, as a closed jaxpr.
      results: the pytree of its results.
      kernels: the parameters of its kernels.
      builds: its kernels, with their memory planned.
      estimate: seconds by the cost model; None if it knows nothing.
      run: the compiled call.
      times: the milliseconds of its calls.
      outcome: what became of it; None as long as it takes part.
      reason: why, in one line.
    """

    index: int
    config: Any
    text: str
    traced: Any = None
    results: Any = None
    kernels: Sequence[Any] = ()
    builds: Sequence[Any] = ()
    estimate: float | None = None
    run: Any = None
    times: list[float] = dataclasses.field(default_factory=list)
    outcome: Outcome | None = None
    reason: str = ""

    @property
    def is_left(self) -> bool:
        """Whether it still takes part."""
        return self.outcome is None

    def end(self, outcome: Outcome, reason: str = "") -> None:
        """Takes it out of the search."""
        self.outcome, self.reason = outcome, reason

    def fail(self, error: BaseException) -> None:
        """Takes it out of the search because of an error."""
        self.end(Outcome.FAILED, first_line(error))


def first_line(error: BaseException) -> str:
    """Returns the type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def all_failed(name: str, candidates: Sequence[Candidate]) -> errors.TuningError:
    """Returns the error for a function without a usable candidate."""
    reasons = tuple((c.text, c.reason) for c in candidates)
    return errors.TuningError(
        f"autotune: none of the {len(reasons)} configurations of {name} can be used",
        expected="one that compiles, runs, and computes what the reference does",
        got="\n".join(f"{text}: {reason}" for text, reason in reasons),
        hint="call the function with config= to see the whole error of one",
        reasons=reasons,
    )
