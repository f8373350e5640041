# SPDX-License-Identifier: Apache-2.0
"""One class per mistake, one base class, the user's source line.

Three families share `PallasGpuError`:

* `KernelError`: the kernel is wrong; its author can fix it.
* `UnsupportedError`: the kernel may be right; this primitive, scope, target or JAX
  transformation does not support it.
* `InternalError`: the package is wrong.

Each class of the first family is a `ValueError`, as most mistakes are in JAX and in
upstream's Pallas, and also the builtin that they or NumPy raise for that mistake
(`TypeError`, `IndexError`, `NameError`).
"""

from __future__ import annotations

import contextlib
import linecache
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, Self

from pallas_gpu import findings


class PallasGpuError(Exception):
    """Base class of every error this package raises.

    Args:
      what: the mistake in one sentence, without a full stop at the end.
      expected: what would have been right.
      got: what was found instead.
      hint: what to do about it.
      where: the line of the kernel, as `file:line (function)`. Its text is printed
        beneath.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
        where: str | None = None,
    ):
        self.what = what
        self.expected = expected
        self.got = got
        self.hint = hint
        self.where = where
        self.schedule: str | None = None
        self.facts: dict[str, Any] = {}
        super().__init__(what)

    def with_location(self, where: str | None) -> PallasGpuError:
        """Adds the kernel's source line, unless the error already has one."""
        if self.where is None:
            self.where = where
        return self

    def about(self, **facts: Any) -> Self:
        """Adds what a finding says beside the text; what is there remains.

        Args:
          **facts: `rule` (its id), `buffer`, `elements`, `barrier`, `who`, `position`,
            `loops` and `other`; see `findings`.
        """
        given = {name: x for name, x in facts.items() if x is not None}
        self.facts = given | self.facts
        return self

    @property
    def finding(self) -> findings.Finding:
        """The error as a check of the kernel reports it."""
        return findings.finding_of(self)

    def with_schedule(self, schedule: str) -> PallasGpuError:
        """Adds how to repeat the run of the emulator that failed."""
        self.schedule = schedule
        return self

    def __str__(self) -> str:
        rows = [
            ("expected", self.expected),
            ("got", self.got),
            ("hint", self.hint),
            ("at", None if self.where is None else _with_source(self.where)),
            ("schedule", self.schedule),
        ]
        lines = [self.what]
        for label, value in rows:
            if value is None:
                continue
            text = textwrap.indent(str(value), " " * 13)[13:]
            lines.append(f"  {label + ':':<10} {text}")
        return "\n".join(lines)

    def __reduce__(self):
        # Exceptions are pickled by the offline worker; the default protocol would lose
        # the keyword-only state.
        return (_rebuild, (type(self), self.__dict__))


@contextlib.contextmanager
def at(where: Callable[[], str | None]) -> Iterator[None]:
    """Gives errors without a line, which leave the context, the one that it returns."""
    try:
        yield
    except PallasGpuError as error:
        raise error.with_location(where()) from None


def _with_source(where: str) -> str:
    """Adds the text of the line beneath `file:line (function)`, if it can be read."""
    first, *rest = where.split("\n")
    named = re.match(r"(.+):(\d+) \(", first)
    source = linecache.getline(named[1], int(named[2])).strip() if named else ""
    return "\n".join([first, *(f"    {line}" for line in [source] if line), *rest])


def _rebuild(cls: type[PallasGpuError], state: dict[str, object]) -> PallasGpuError:
    error = cls.__new__(cls)
    Exception.__init__(error, state["what"])
    error.__dict__.update(state)
    return error


# --- the kernel's mistake -----------------------------------------------------------


class KernelError(PallasGpuError, ValueError):
    """The kernel, or the call of it, is wrong."""


class ShapeError(KernelError):
    """Shapes do not match each other or the operation."""


class DTypeError(KernelError, TypeError):
    """The operation does not support the element type."""


class MemorySpaceError(KernelError):
    """A reference is in a memory space that the operation cannot use."""


class LayoutError(KernelError):
    """A register layout, a tiling or a swizzle does not fit."""


class ArgumentError(KernelError):
    """An argument of a public function is out of range."""


class ArgumentTypeError(KernelError, TypeError):
    """An argument of a public function has the wrong type."""


class OutOfBoundsError(KernelError, IndexError):
    """An index or a slice is out of bounds of a reference."""


class OutOfResources(KernelError):  # noqa: N818 - the name users of Triton know
    """The kernel requires more than the target's limit per block.

    Attributes:
      resource: which one, e.g. `"SMEM"`.
      limit_bytes: what the target offers.
      used_bytes: what the kernel requires.
    """

    def __init__(
        self, what: str, *, resource: str, limit_bytes: int, used_bytes: int, **kw
    ):
        super().__init__(what, **kw)
        self.resource = resource
        self.limit_bytes = limit_bytes
        self.used_bytes = used_bytes


class PerformanceWarning(UserWarning):
    """A kernel does something slowly: bank conflicts, unaligned accesses, spills."""


class UndefinedResultWarning(UserWarning):
    """What is read or returned is never stored, wholly or in part, or CTAs share it."""


class TuningWarning(UserWarning):
    """A tuned function runs without a measurement, or its stored result is damaged."""


class TuningError(KernelError, RuntimeError):
    """No candidate of a tuned function can be used.

    Attributes:
      reasons: for each candidate its configuration and why it failed.
    """

    def __init__(self, what: str, *, reasons: tuple[tuple[str, str], ...] = (), **kw):
        super().__init__(what, **kw)
        self.reasons = reasons


class MeasurementError(KernelError, RuntimeError):
    """Calls of a measured function do not launch the same kernels."""


class ClosureError(KernelError):
    """The kernel's body uses an array from the enclosing function."""


class TracedValueError(KernelError, TypeError, IndexError):
    """Python needs a value that is known only when the kernel runs."""


class AxisNameError(KernelError, LookupError, NameError):
    """No axis of that name surrounds the operation."""


# --- mistakes that only a run can show (emulator) -----------------------------------


class BarrierError(KernelError):
    """A barrier is used against its protocol (missed phase, bytes left over …)."""


class SemaphoreError(KernelError):
    """A semaphore is not zero when the kernel ends."""


class RaceError(KernelError):
    """Two accesses to the same memory are not ordered."""


class DeadlockError(KernelError, RuntimeError):
    """Every thread waits, and no asynchronous work in flight can wake one."""


class LivelockError(KernelError, RuntimeError):
    """The kernel still runs after its budget of steps."""


class UnwrittenResultError(KernelError):
    """A result has elements that no CTA stored."""


class DebugCheckError(KernelError, AssertionError):
    """The condition of a `debug_check` is False."""


class UninitializedReadError(KernelError):
    """Memory is read before anything was written to it."""


class PtxError(KernelError, AssertionError):
    """The code that a kernel is lowered to breaks a rule of the PTX ISA.

    The kernel has the mistake, or the package: the emulator, which runs the kernel
    itself, says which.
    """


# --- not supported ------------------------------------------------------------------


class UnsupportedError(PallasGpuError, NotImplementedError):
    """A legal program that the primitive, scope, target or transformation lacks."""


class TargetError(UnsupportedError):
    """The feature does not exist on the chosen target."""


class NoGpuError(UnsupportedError, ValueError):
    """The call requires a GPU and there is none."""


class DifferentiationError(UnsupportedError):
    """JAX was asked to differentiate through a kernel."""


class NotModelledError(UnsupportedError):
    """The emulator does not model the operation."""


class OfflineUnavailableError(UnsupportedError, RuntimeError):
    """Offline compilation requires CUDA packages that are not installed."""


# --- our bug ------------------------------------------------------------------------


class InternalError(PallasGpuError, AssertionError):
    """An invariant of the package is broken; please report it with the kernel."""


class CompilationError(InternalError, RuntimeError):
    """MLIR, LLVM or ptxas refused what the package emitted."""


__all__ = [
    name
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, PallasGpuError)
]


def __dir__() -> list[str]:
    return sorted(__all__)
