# SPDX-License-Identifier: Apache-2.0
"""The answer of `explain`: what takes the time of each kernel, as objects and text."""

from __future__ import annotations

import collections
import dataclasses
import html
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pallas_gpu.explanation.findings import SlowFinding
from pallas_gpu.findings import Json, Place, as_html
from pallas_gpu.runtime.resources_report import Resources

# The version of docs/explain.schema.json. It grows when a field changes its meaning or
# goes; new fields and kinds do not change it.
SCHEMA_VERSION = 1
# Notes of a kind that the text has; JSON has all.
_MOST_NOTES = 8


@dataclasses.dataclass(frozen=True)
class KernelExplanation:
    """What takes the time of a kernel.

    Attributes:
      name: the kernel's name.
      target: the target's name.
      defined_at: the line of its body.
      seconds: the estimated time on the target's card, from the start of the first
        CTA, with what the findings lose.
      bound: what takes most of the time without that, as in `testing.rank`.
      ctas_per_sm: the CTAs that are resident on an SM.
      limits: how many each resource admits; "grid": how many there are.
      resources: registers, spills and memory; None where no compiler is installed.
      findings: what is slow first, and by the estimated time.
    """

    name: str
    target: str
    defined_at: Place
    seconds: float
    bound: str
    ctas_per_sm: int
    limits: Mapping[str, int]
    resources: Resources | None
    findings: tuple[SlowFinding, ...]

    @property
    def slow(self) -> tuple[SlowFinding, ...]:
        """The findings that take a considerable part of the time."""
        return tuple(f for f in self.findings if f.is_slow)

    def to_dict(self) -> Json:
        """Returns the explanation as JSON has it."""
        used = self.resources
        return {
            "name": self.name,
            "target": self.target,
            "defined_at": self.defined_at.source,
            "microseconds": 1e6 * self.seconds,
            "bound": self.bound,
            "ctas_per_sm": self.ctas_per_sm,
            "limits": dict(self.limits),
            "resources": None if used is None else dataclasses.asdict(used),
            "findings": [f.to_dict() for f in self.findings],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.summary
        for number, found in enumerate(self.slow, 1):
            yield f"{number}. {found.kind.id}: {found.what}"
            for label, text in rows(found):
                yield f"   {label + ':':<6} {text}"
        for kind, notes in self.notes.items():
            yield f"{kind}:"
            for line in notes[:_MOST_NOTES]:
                yield f"   {line}"
            if len(notes) > _MOST_NOTES:
                yield f"   and {len(notes) - _MOST_NOTES} more"

    @property
    def summary(self) -> str:
        """What limits the kernel as a whole, in a line."""
        parts = [
            f"kernel {self.name} for {self.target}: about {_time(self.seconds)}, bound "
            f"by {self.bound}",
            f"{self.ctas_per_sm} CTA{'s' * (self.ctas_per_sm > 1)} on an SM "
            f"({', '.join(f'{name} {n}' for name, n in self.limits.items())})",
        ]
        if self.resources is not None:
            used = self.resources
            parts.append(
                f"{used.registers_per_thread} of {used.register_limit} registers, "
                f"{used.spill_store_bytes} bytes spilled"
            )
        return "; ".join(parts)

    @property
    def notes(self) -> dict[str, list[str]]:
        """The findings that are not slow, as lines, by their kinds."""
        found: dict[str, collections.Counter[str]] = {}
        for note in self.findings:
            if not note.is_slow:
                lines = found.setdefault(note.kind.id, collections.Counter())
                lines[one_line(note)] += 1
        return {
            kind: [f"{n} times: {line}" if n > 1 else line for line, n in lines.items()]
            for kind, lines in found.items()
        }


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The answer of `plgpu.explain`. `str()` and notebooks show a report.

    Attributes:
      kernels: those that the function calls, in order.

    Example:
      >>> for finding in plgpu.explain(f)(x).slow:
      ...     print(finding.at, finding.hint)
    """

    kernels: tuple[KernelExplanation, ...]

    @property
    def slow(self) -> tuple[SlowFinding, ...]:
        """What takes a considerable part of the time of its kernel."""
        return tuple(found for kernel in self.kernels for found in kernel.slow)

    @property
    def is_complete(self) -> bool:
        """Whether all kernels were compiled: registers and spills are known."""
        return all(kernel.resources is not None for kernel in self.kernels)

    def to_dict(self) -> Json:
        """Returns the explanation as JSON has it: docs/explain.schema.json."""
        return {
            "schema": SCHEMA_VERSION,
            "complete": self.is_complete,
            "kernels": [kernel.to_dict() for kernel in self.kernels],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Returns the explanation as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.kernels))

    def _repr_html_(self) -> str:
        """Returns the report as HTML, for notebooks."""
        return "".join(map(_of_kernel, self.kernels))


def _of_kernel(kernel: KernelExplanation) -> str:
    parts = [f"<p><b>{html.escape(kernel.summary)}</b></p>"]
    for found in kernel.slow:
        parts.append(as_html(found.kind.id, found.what, rows(found)))
    for kind, notes in kernel.notes.items():
        items = "".join(f"<li>{html.escape(line)}</li>" for line in notes)
        parts.append(f"<details><summary>{kind}</summary><ul>{items}</ul></details>")
    return "".join(parts)


def rows(found: SlowFinding) -> Iterator[tuple[str, str]]:
    """Yields what a report says of a finding beside its sentence."""
    at = str(found.at) or "code of this package"
    yield "at", ", ".join([at, *_loops(found)])
    yield (
        "time",
        f"{_time(found.lost_seconds)}, {100 * found.share:.0f} % of the kernel's",
    )
    if found.got:
        yield "got", found.got
    if found.hint:
        yield "hint", found.hint


def one_line(found: SlowFinding) -> str:
    """Returns a finding in a line."""
    got = f" ({found.got})" if found.got else ""
    time = f", {_time(found.seconds)}" if found.seconds else ""
    place = f"{found.at.file}:{found.at.line}: " if found.at.file else ""
    return f"{place}{found.what}{got}{time}"


def _loops(found: SlowFinding) -> Iterator[str]:
    for at, iterations in found.loops:
        times = "an unknown number of" if iterations is None else f"{iterations:g}"
        yield f"in {times} iterations of {f'the loop at {at}' if at else 'a loop'}"


def _time(seconds: Any) -> str:
    if seconds >= 1e-3:
        return f"{1e3 * seconds:.3g} ms"
    return f"{1e6 * seconds:.3g} µs"
