# SPDX-License-Identifier: Apache-2.0
"""The answer of a check: mistakes, what could not be judged, what was executed."""

from __future__ import annotations

import dataclasses
import html
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from pallas_gpu import errors, findings
from pallas_gpu.emulator.recorder import Kernel, Recorder
from pallas_gpu.findings import Finding, Json, Place, as_html

# The version of docs/verdict.schema.json. It grows when a field changes its meaning or
# goes; new fields and rules do not change it.
SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True)
class MissedLine:
    """A line some of whose equations were not executed.

    Attributes:
      at: the line.
      equations: the names of their operations.
    """

    at: Place
    equations: tuple[str, ...]

    def to_dict(self) -> Json:
        """Returns the line as JSON has it."""
        return {
            "file": self.at.file,
            "line": self.at.line,
            "function": self.at.function,
            "equations": list(self.equations),
        }


@dataclasses.dataclass(frozen=True)
class KernelCoverage:
    """What a check has executed of a kernel.

    Attributes:
      name: the kernel's name.
      defined_at: the line of its body.
      launches: how often it has been launched.
      schedules: how many runs there were, of all launches.
      orders: how many orders of its launches were explored, no two of one equivalent;
        None unless the check was of all.
      complete: whether each possible order is equivalent to one of these.
      ctas: how many CTAs have run, in all of them.
      accesses_compared: how many accesses to memory have been compared with earlier
        ones, in all of them.
      equations: how many there are, without those whose results nobody reads.
      executed: how many of them some thread has executed.
      emitted: whether the code that it is lowered to was run instead of its equations:
        as asked for, or because nothing else says what its inline code does.
      groups: what its CTAs are called, in the text.
    """

    name: str
    defined_at: Place
    launches: int
    schedules: int
    orders: int | None
    complete: bool
    ctas: int
    accesses_compared: int
    equations: int
    executed: int
    missed: tuple[MissedLine, ...]
    emitted: bool = False
    groups: str = "CTAs"

    @classmethod
    def of(cls, kernel: Kernel) -> KernelCoverage:
        """Returns what a recorder knows of a kernel."""
        lines: dict[str | None, list[str]] = {}
        seen = kernel.coverage
        for op, where in seen.missing() if seen is not None else ():
            lines.setdefault(where, []).append(op.name)
        return cls(
            kernel.params.name,
            findings.place(kernel.params.defined_at),
            kernel.launches,
            kernel.schedules,
            kernel.orders,
            kernel.complete,
            kernel.ctas,
            kernel.compared,
            seen.total if seen is not None else 0,
            seen.executed if seen is not None else 0,
            tuple(
                MissedLine(findings.place(where), tuple(names))
                for where, names in lines.items()
            ),
            kernel.emitted,
            kernel.params.mesh.groups,
        )

    def to_dict(self) -> Json:
        """Returns the coverage as JSON has it."""
        whole = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del whole["groups"]
        at = self.defined_at
        return whole | {
            "defined_at": {"file": at.file, "line": at.line, "function": at.function},
            "missed": [line.to_dict() for line in self.missed],
        }

    @property
    def _runs(self) -> str:
        if self.complete:
            return f"all {self.orders} orders of this input"
        if self.orders is not None:
            return f"{self.orders} of the orders of this input"
        return f"{self.schedules} schedules"

    def __str__(self) -> str:
        launches = (
            f"kernel {self.name}: {self.launches} launch{'es' * (self.launches > 1)}, "
            f"{self._runs}"
        )
        if self.emitted:
            return f"{launches}; the code that it is lowered to was executed"
        text = (
            f"{launches}, {self.ctas} {self.groups}; {self.executed} of "
            f"{self.equations} equations executed; {self.accesses_compared} accesses "
            "compared"
        )
        rows = [
            f"  not executed: {str(x.at) or 'in the package'}: {_some(x.equations)}"
            for x in self.missed
        ]
        return "\n".join([text, *rows])


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The answer of `plgpu.check`. `str()` and notebooks show a report.

    Attributes:
      findings: the mistakes; first those that no other one can have caused.
      not_modelled: what could not be judged: operations that the emulator does not
        model, or that the package does not support.
      coverage: what was executed, for each kernel.
      results: what the function returned, of the first schedule; None if it failed.

    Example:
      >>> verdict = plgpu.check(f)(x)
      >>> verdict.raise_if_not_clean()
    """

    findings: tuple[Finding, ...]
    not_modelled: tuple[Finding, ...]
    coverage: tuple[KernelCoverage, ...]
    results: Any = dataclasses.field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, recorder: Recorder, results: Any = None) -> Verdict:
        """Returns what a recorder has found."""
        found = recorder.findings()
        mistakes = [f for f in found if f.severity == "error"]
        rest = [f for f in found if f.severity != "error"]
        kernels = map(KernelCoverage.of, recorder.kernels.values())
        return cls(tuple(mistakes), tuple(rest), tuple(kernels), results)

    @property
    def clean(self) -> bool:
        """True if nothing was found, and everything could be judged."""
        return not self.findings and not self.not_modelled

    def to_dict(self) -> Json:
        """Returns the verdict as JSON has it: docs/verdict.schema.json."""
        return {
            "schema": SCHEMA_VERSION,
            "clean": self.clean,
            "findings": [f.to_dict() for f in self.findings],
            "not_modelled": [f.to_dict() for f in self.not_modelled],
            "coverage": [kernel.to_dict() for kernel in self.coverage],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Returns the verdict as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def raise_if_not_clean(self) -> None:
        """Raises the report, unless the verdict is clean.

        Raises:
          KernelError: something was found.
          NotModelledError: nothing was found, and not everything could be judged.
        """
        if self.findings:
            raise errors.KernelError(str(self))
        if self.not_modelled:
            raise errors.NotModelledError(str(self))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self._summary
        for number, found in enumerate((*self.findings, *self.not_modelled), 1):
            yield f"{number}. {found.rule.id}: {found.what}"
            for label, text in _rows(found):
                shown = textwrap.indent(text, " " * 16)[16:]
                yield f"   {label + ':':<12} {shown}"
        yield from map(str, self.coverage)

    @property
    def _summary(self) -> str:
        if self.clean:
            return "clean"
        counts = [
            (len(self.findings), "finding"),
            (len(self.not_modelled), "operation"),
        ]
        texts = [f"{n} {what}{'s' * (n > 1)}" for n, what in counts if n]
        if self.not_modelled:
            texts[-1] += " not modelled"
        first = sum(f.after == 0 for f in self.findings)
        if first < len(self.findings):
            texts.append(f"{first} of them before any other of its run")
        return ", ".join(texts)

    def _repr_html_(self) -> str:
        """Returns the report as HTML, for notebooks."""
        parts = [
            as_html(found.rule.id, found.what, _rows(found))
            for found in (*self.findings, *self.not_modelled)
        ]
        kernels = "".join(f"<li>{html.escape(str(k))}</li>" for k in self.coverage)
        return f"<b>{self._summary}</b>{''.join(parts)}<ul>{kernels}</ul>"


def _rows(found: Finding) -> Iterator[tuple[str, str]]:
    """Yields what a report says of a finding."""
    rows = {
        "expected": found.expected,
        "got": found.got,
        "hint": found.hint,
        "at": _place(found.at),
        "other": _place(found.other),
        "repeat with": found.reproduce and f"{found.reproduce}{_share(found)}",
    }
    yield from ((label, text) for label, text in rows.items() if text)


def _share(found: Finding) -> str:
    after = f"; after {found.after} other findings of the run" if found.after else ""
    shown = f"{found.schedules} schedules show it" if found.schedules > 1 else ""
    return f" ({(shown or '1 schedule shows it') + after})"


def _place(place: Place | None) -> str | None:
    if place is None or (place.file is None and place.who is None):
        return None
    parts = [str(place), place.who or ""]
    parts += [
        f"iteration {i} of {f'the loop at {at}' if at else 'a loop'}"
        for at, i in place.loops
    ]
    return ", ".join(filter(None, parts))


def _some(names: tuple[str, ...]) -> str:
    different = list(dict.fromkeys(names))
    more = f" and {len(different) - 6} more" if len(different) > 6 else ""
    return ", ".join(different[:6]) + more
