# SPDX-License-Identifier: Apache-2.0
"""The report of a tuning: what became of each configuration, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pallas_gpu.testing.tuning import search
from pallas_gpu.testing.tuning.candidates import Candidate


@dataclasses.dataclass(frozen=True)
class TunedConfig:
    """What became of one configuration.

    Attributes:
      config: its repr.
      outcome: "measured", "slower", "failed", "spills" or "left out".
      milliseconds: median of its calls; None if it was not measured.
      estimate: milliseconds by the cost model; None if it knows nothing.
      reason: why it failed or ended, in one line.
    """

    config: str
    outcome: str
    milliseconds: float | None = None
    estimate: float | None = None
    reason: str = ""

    @classmethod
    def of(cls, candidate: Candidate) -> TunedConfig:
        """Returns the row of a candidate."""
        seconds = candidate.estimate
        return cls(
            candidate.text,
            "" if candidate.outcome is None else candidate.outcome.value,
            search.median(candidate) if candidate.times else None,
            None if seconds is None or not math.isfinite(seconds) else seconds * 1e3,
            candidate.reason,
        )


@dataclasses.dataclass(frozen=True)
class TuningReport:
    """The result of tuning a function for one key. `str()` returns a Markdown table.

    Attributes:
      function: name of the function.
      key: what the result is for: shapes, dtypes, other arguments.
      card: the device; the target of the cost model if nothing was measured.
      index: position of the chosen configuration.
      config: its repr.
      milliseconds: median of its calls; None if nothing was measured.
      rows: one for each configuration, in their order.
      seconds: how long the tuning took.
      steps: seconds of each step: "trace", "compile offline", "compile", "check",
        "measure".
      stored: whether the result was read from disk.
    """

    function: str
    key: str
    card: str
    index: int
    config: str
    milliseconds: float | None
    rows: tuple[TunedConfig, ...]
    seconds: float
    steps: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stored: bool = False

    def as_json(self) -> dict[str, Any]:
        """Returns the report as what JSON can represent."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> TuningReport:
        """Returns the report that `as_json` has described."""
        rows = tuple(TunedConfig(**row) for row in record["rows"])
        return cls(**{**record, "rows": rows, "stored": True})

    def __str__(self) -> str:
        where = "read from disk" if self.stored else f"{self.seconds:.1f} s"
        ordered = sorted(self.rows, key=_order)
        table = [(_ms(r.milliseconds), _ms(r.estimate), r.outcome, r.config, r.reason)
                 for r in ordered]  # fmt: skip
        head = ("ms", "estimated ms", "outcome", "configuration", "reason")
        lines = [f"{self.function}({self.key}) on {self.card}, {where}", ""]
        return "\n".join([*lines, *markdown(head, table)])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(x.replace('|', '/') for x in row)} |" for row in lines]


def _order(row: TunedConfig) -> tuple[bool, float, float]:
    estimate = math.inf if row.estimate is None else row.estimate
    is_measured = row.milliseconds is not None
    return not is_measured, row.milliseconds or 0.0, estimate


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
