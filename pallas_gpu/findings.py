# SPDX-License-Identifier: Apache-2.0
"""What a check finds: rules with stable ids, places in the kernel, findings.

`RULES` is the list that docs/checking.md and docs/verdict.schema.json are made from. An
id never changes its meaning.
"""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Json = dict[str, Any]


def as_html(rule: str, what: str, rows: Iterable[tuple[str, str]]) -> str:
    """Returns a finding as HTML: its rule and its sentence, which open a table."""
    cells = "".join(
        f"<tr><th style='text-align:left;vertical-align:top'>{label}</th>"
        f"<td style='text-align:left;white-space:pre-wrap'>{html.escape(text)}</td>"
        "</tr>"
        for label, text in rows
    )
    title = f"<b>{html.escape(rule)}</b>: {html.escape(what)}"
    return f"<details open><summary>{title}</summary><table>{cells}</table></details>"


@dataclasses.dataclass(frozen=True)
class Rule:
    """A kind of mistake.

    Attributes:
      id: its stable name.
      error: the class of `pallas_gpu.errors` that an ordinary call raises.
      meaning: what is wrong, in one sentence.
      severity: `"error"`, or `"not modelled"` for what cannot be judged.
      source: where the rule comes from; empty for rules of this package's own.
    """

    id: str
    error: str
    meaning: str
    severity: str = "error"
    source: str = ""


_NOT_MODELLED = "not modelled"
# The first of a class is the one of errors that name no rule.
RULES: tuple[Rule, ...] = (
    Rule("race", "RaceError",
         "Threads access the same elements, one of them writes, and nothing orders "
         "the two accesses.",
         source="PTX ISA, Memory Consistency Model: Conflict and data-races"),
    Rule("missing-wait", "RaceError",
         "Memory is accessed before the copy, the matrix product or the store that "
         "uses it has been waited for.",
         source="PTX ISA, Completion mechanisms for asynchronous copy operations"),
    Rule("missing-fence", "RaceError",
         "A copy accesses what threads have accessed, in order, and without the fence "
         "between the proxies.",
         source="PTX ISA, Async proxy; fence.proxy.async"),
    Rule("race-between-ctas", "RaceError",
         "Two CTAs access the same elements, one of them writes, and nothing orders "
         "the two accesses.",
         source="PTX ISA, Memory Consistency Model: Scope"),
    Rule("early-launch", "RaceError",
         "A result of the kernel before this one is accessed without "
         "griddepcontrol_wait().",
         source="PTX ISA, griddepcontrol"),
    Rule("repeated-index", "RaceError",
         "One access stores different values to the same element.",
         source="PTX ISA, Memory Consistency Model: Conflict and data-races"),
    Rule("schedule-dependent", "RaceError",
         "Integers of a result differ between schedules.",
         source="PTX ISA, Memory Consistency Model: Coherence order"),
    Rule("out-of-bounds", "OutOfBoundsError",
         "An index or a slice is out of bounds of a reference.",
         source="PTX ISA, State spaces: accesses outside of a variable are undefined"),
    Rule("uninitialized-read", "UninitializedReadError",
         "Memory is used that nobody has written.",
         source="PTX ISA, State spaces: shared memory is not initialized"),
    Rule("unwritten-result", "UnwrittenResultError",
         "A result has elements that no CTA has stored.",
         source="JAX: the buffer of a result is not initialized"),
    Rule("barrier", "BarrierError",
         "A barrier is used against its protocol.",
         source="PTX ISA, mbarrier: Phase of the mbarrier object"),
    Rule("too-many-arrivals", "BarrierError",
         "A barrier receives more arrivals in a phase than it was declared with.",
         source="PTX ISA, mbarrier.arrive: the pending count"),
    Rule("missed-phase", "BarrierError",
         "A wait comes, or can come, after another phase has completed, so its parity "
         "is ambiguous.",
         source="PTX ISA, mbarrier.test_wait, mbarrier.try_wait: the phase parity"),
    Rule("unfinished-copy", "BarrierError",
         "A copy has not been waited for when its barrier or its memory is freed.",
         source="PTX ISA, cp.async.bulk: completion by mbarrier"),
    Rule("freed-memory", "KernelError",
         "Memory is accessed by work that outlives its scope.",
         source="PTX ISA, cp.async.bulk.wait_group"),
    Rule("semaphore-not-zero", "SemaphoreError",
         "A semaphore is not zero when the kernel ends.",
         source="JAX: semaphores are zero when a kernel starts"),
    Rule("deadlock", "DeadlockError",
         "All threads wait, and nothing is in flight that could wake one.",
         source="PTX ISA, mbarrier.try_wait: it waits for the phase to complete"),
    Rule("livelock", "LivelockError",
         "The kernel still runs after its budget of steps.",
         source="PTX ISA, Memory Consistency Model: forward progress"),
    Rule("debug-check", "DebugCheckError",
         "The condition of a debug_check is False.",
         source="PTX ISA, trap"),
    Rule("emitted-code", "PtxError",
         "The code that the kernel is lowered to breaks another rule of the PTX ISA; "
         "found with `emitted=True`.",
         source="PTX ISA: the error names the instruction"),
    Rule("resources", "OutOfResources",
         "The kernel requires more memory, barriers or registers than a block has.",
         source="PTX ISA, setmaxnreg; the target's limits"),
    Rule("layout", "LayoutError",
         "A register layout, a tiling, a swizzle or an alignment does not fit."),
    Rule("shape", "ShapeError",
         "Shapes do not match each other or the operation."),
    Rule("dtype", "DTypeError",
         "The operation does not support the element type."),
    Rule("memory-space", "MemorySpaceError",
         "A reference is in a memory space that the operation cannot use."),
    Rule("argument", "ArgumentError",
         "An argument of a function is out of range."),
    Rule("argument-type", "ArgumentTypeError",
         "An argument of a function has the wrong type."),
    Rule("closure", "ClosureError",
         "The body uses an array of the function around it."),
    Rule("traced-value", "TracedValueError",
         "Python needs a value that is known only when the kernel runs."),
    Rule("axis-name", "AxisNameError",
         "No axis of that name surrounds the operation."),
    Rule("tuning", "TuningError",
         "No candidate of a tuned function can be used."),
    Rule("measurement", "MeasurementError",
         "Calls of a measured function do not launch the same kernels."),
    Rule("invalid", "KernelError",
         "The kernel, or the call of it, is wrong in another way.",
         source="PTX ISA, setmaxnreg, and others"),
    Rule("not-modelled", "NotModelledError",
         "The emulator does not model an operation that the kernel executes.",
         _NOT_MODELLED),
    Rule("unsupported", "UnsupportedError",
         "The package does not support the operation there, or on that target.",
         _NOT_MODELLED),
    Rule("internal", "InternalError",
         "The package fails: please report it with the kernel.",
         _NOT_MODELLED),
)  # fmt: skip

BY_ID: dict[str, Rule] = {rule.id: rule for rule in RULES}
# A rule for errors without one, by their class.
_BY_CLASS: dict[str, Rule] = {rule.error: rule for rule in reversed(RULES)} | {
    "KernelError": BY_ID["invalid"]
}
_LINE = re.compile(r"(?P<file>.+):(?P<line>\d+) \((?P<function>.+)\)")


@dataclasses.dataclass(frozen=True)
class Place:
    """A step of a thread, or of asynchronous work.

    Attributes:
      file, line, function: in the kernel's source; None where it is unknown.
      who: the thread or the work, in words.
      position: of the thread: `device`, `cta` (its position by axis), `warpgroup` and
        `warp`, as far as they are known; or `core` and `subcore`.
      loops: for each loop around it, innermost first, its line and the number of the
        iteration, from 0.
    """

    file: str | None = None
    line: int | None = None
    function: str | None = None
    who: str | None = None
    position: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loops: tuple[tuple[str | None, int], ...] = ()

    def __str__(self) -> str:
        return "" if self.file is None else f"{self.file}:{self.line} ({self.function})"

    @property
    def source(self) -> Json:
        """The place in the kernel's source as JSON has it."""
        return {"file": self.file, "line": self.line, "function": self.function}

    def to_dict(self) -> Json:
        """Returns the place as JSON has it."""
        return {
            **self.source,
            "who": self.who,
            "position": dict(self.position),
            "loops": [{"at": at, "iteration": i} for at, i in self.loops],
        }


def place(
    where: str | None,
    who: str | None = None,
    position: Mapping[str, Any] | None = None,
    loops: Sequence[tuple[str | None, int]] = (),
) -> Place:
    """Returns the place of a line, `file:line (function)`.

    Args:
      where: the line, or None.
      who: the thread or the work.
      position: of the thread.
      loops: around it, as in `Place`.
    """
    found = _LINE.match((where or "").split("\n")[0])
    rest = (who, position or {}, tuple(loops))
    if found is None:
        return Place(None, None, None, *rest)
    return Place(found["file"], int(found["line"]), found["function"], *rest)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A mistake that a check has found.

    Attributes:
      rule: its kind.
      what: the mistake in one sentence.
      expected, got, hint: as the error of an ordinary call has them.
      at: where it shows.
      other: the other access, or where a poisoned value is used; None without one.
      buffer: the array, by the name that messages have.
      elements: of the array, [low, high) on each axis.
      barrier: the barrier.
      kernel: the kernel's name.
      reproduce: parameters that repeat a run that shows it.
      schedules: how many of the schedules show it.
      after: how many findings the run had before. With 0 it is not a consequence of
        another one.
    """

    rule: Rule
    what: str
    expected: str | None = None
    got: str | None = None
    hint: str | None = None
    at: Place = Place()
    other: Place | None = None
    buffer: str | None = None
    elements: tuple[tuple[int, int], ...] | None = None
    barrier: str | None = None
    kernel: str | None = None
    reproduce: str | None = None
    schedules: int = 1
    after: int = 0

    @property
    def severity(self) -> str:
        """That of the rule."""
        return self.rule.severity

    @property
    def key(self) -> tuple[Any, ...]:
        """What findings have in common that count as one: the rule and both lines."""
        lines = [(p.file, p.line) for p in (self.at, self.other) if p is not None]
        named = () if self.at.file is not None else (self.what,)
        return (self.kernel, self.rule.id, *sorted(map(str, lines)), *named)

    def to_dict(self) -> Json:
        """Returns the finding as JSON has it."""
        return {
            "rule": self.rule.id,
            "severity": self.severity,
            "what": self.what,
            "expected": self.expected,
            "got": self.got,
            "hint": self.hint,
            "at": self.at.to_dict(),
            "other": None if self.other is None else self.other.to_dict(),
            "buffer": self.buffer,
            "elements": None if self.elements is None else [*map(list, self.elements)],
            "barrier": self.barrier,
            "kernel": self.kernel,
            "reproduce": self.reproduce,
            "schedules": self.schedules,
            "after": self.after,
        }


def rule_of(error: Exception) -> Rule:
    """Returns the rule of an error's class."""
    return next(_BY_CLASS[c.__name__] for c in type(error).__mro__
                if c.__name__ in _BY_CLASS)  # fmt: skip


def finding_of(error: Any) -> Finding:
    """Returns what an error says, with the facts that it was given.

    Args:
      error: a `PallasGpuError`.
    """
    facts = error.facts
    rule = BY_ID[facts["rule"]] if "rule" in facts else rule_of(error)
    texts = [None if x is None else str(x) for x in (error.expected, error.got)]
    at = place(
        error.where, facts.get("who"), facts.get("position"), facts.get("loops", ())
    )
    return Finding(
        rule, error.what, texts[0], texts[1], error.hint, at, facts.get("other"),
        facts.get("buffer"), facts.get("elements"), facts.get("barrier"),
    )  # fmt: skip
