# SPDX-License-Identifier: Apache-2.0
"""How kernels are profiled: who records, and with how much room."""

from __future__ import annotations

import dataclasses
import enum
import os
import tempfile
from typing import Any

from pallas_gpu import errors, expect
from pallas_gpu.types.profiling.threads import ThreadSubset
from pallas_gpu.types.profiling.trace import EVENT_WORDS, HEADER_WORDS

_WARPS = 4


class TraceScope(enum.Enum):
    """Who records the spans of a profiled kernel on its own.

    * `WARPGROUP`: each warpgroup; in `warp_map` its first warp.
    * `WARP`: each warp.
    """

    WARPGROUP = "warpgroup"
    WARP = "warp"


class SpanNames:
    """The names of a kernel's spans, each with whether it is a wait.

    A tag of an event is a position here. The spans of a program are numbered when it is
    traced, those of code that its author emits when that is lowered, which may be more
    than once.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, bool], int] = {}

    def number(self, name: str, is_wait: bool = False) -> int:
        """Returns the position of a name, a new one behind the others."""
        return self._numbers.setdefault((name, is_wait), len(self._numbers))

    def known(self) -> tuple[tuple[str, bool], ...]:
        """Returns the names so far."""
        return tuple(self._numbers)


@dataclasses.dataclass(frozen=True)
class Recording:
    """How the traces of a kernel are recorded.

    Attributes:
      space: number of spans for which a trace has room.
      scope: who has a trace.
    """

    space: int
    scope: TraceScope

    @property
    def events(self) -> int:
        """Number of events for which a trace has room."""
        return 2 * self.space

    @property
    def words(self) -> int:
        """Words of a trace, its header included."""
        return HEADER_WORDS + EVENT_WORDS * self.events

    def traces(self, warpgroups: int) -> int:
        """Returns the number of traces of a CTA."""
        return warpgroups * (_WARPS if self.scope is TraceScope.WARP else 1)


def _scope(value: Any, what: str) -> Any:
    if isinstance(value, ThreadSubset) and value.name in TraceScope.__members__:
        return TraceScope[value.name]
    return expect.member(TraceScope)(value, what)


@expect.arguments(
    entries_per_warpgroup=expect.integer(0, 1 << 20, unit="entries"),
    trace_scope=_scope,
)
@dataclasses.dataclass(frozen=True)
class ProfilerSpec:
    """How a kernel of the Mosaic level is profiled.

    Attributes:
      entries_per_warpgroup: room of a trace, in words: 3, and 4 for each span.
      dump_path: the folder that gets a file of each launch. `"sponge"`: that of
        `TEST_UNDECLARED_OUTPUTS_DIR`, or that of temporary files.
      trace_scope: who records: a `TraceScope`, or a `mosaic.ThreadSubset` of its name.
      bounds_check: a hint: what finds no room is always dropped, and counted.

    Raises:
      ArgumentError: there is no room for a span.
    """

    entries_per_warpgroup: int
    dump_path: str = "sponge"
    trace_scope: TraceScope = TraceScope.WARPGROUP
    bounds_check: bool = False

    def __post_init__(self) -> None:
        if self.recording.space < 1:
            raise errors.ArgumentError(
                "ProfilerSpec: there is no room for a span",
                expected="entries_per_warpgroup of 7 or more",
                got=self.entries_per_warpgroup,
                hint="a span takes 4 entries, and 3 are for all of them",
            )
        if self.dump_path == "sponge":
            variable = os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR")
            object.__setattr__(self, "dump_path", variable or tempfile.gettempdir())

    @property
    def recording(self) -> Recording:
        """How its traces are recorded."""
        return Recording((self.entries_per_warpgroup - 3) // 4, self.trace_scope)
