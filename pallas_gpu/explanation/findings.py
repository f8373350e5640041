# SPDX-License-Identifier: Apache-2.0
"""What `explain` finds: kinds with stable ids, and findings with estimated times.

`KINDS` is the list of docs/explain.md and docs/explain.schema.json. An id never changes
its meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pallas_gpu.findings import Json, Place, Rule

# Of the estimated time of a kernel: what takes less is not called slow.
SLOW_SHARE = 0.05
_WARNING = "PerformanceWarning"

KINDS: tuple[Rule, ...] = (
    Rule("mma-sync", _WARNING,
         "A product is multiplied by mma.sync, and wgmma could multiply it.", "slow"),
    Rule("unpipelined-loads", _WARNING,
         "Each iteration of a loop waits for what it loads from GMEM.", "slow"),
    Rule("short-ring", _WARNING,
         "A ring of buffers has too few slots to hide the latency of memory.", "slow"),
    Rule("spill", _WARNING,
         "Registers are stored to local memory and loaded again.", "slow"),
    Rule("uncoalesced", _WARNING,
         "The threads of a warp access more sectors of GMEM than the elements take.",
         "slow"),
    Rule("bank-conflicts", _WARNING,
         "The lanes of a warp access different words of one bank of SMEM.", "slow"),
    Rule("narrow-access", _WARNING,
         "Accesses or copies by threads are narrower than the part allows: its start "
         "is not known to be aligned.", "slow"),
    Rule("element-access", _WARNING,
         "An address is computed for each element.", "slow"),
    Rule("conversion", _WARNING,
         "An array moves to another layout, or between threads.", "slow"),
    Rule("occupancy", _WARNING,
         "Too few CTAs are resident on an SM to hide the latency of memory, or waits "
         "of products and arithmetic for each other.", "slow"),
    Rule("contended-atomics", _WARNING,
         "Many CTAs update the same elements of GMEM, in turn.", "slow"),
    Rule("product", "", "The instruction that a product became.", "note"),
    Rule("access", "", "Loads or stores by threads.", "note"),
    Rule("copy", "", "A copy between GMEM and SMEM.", "note"),
    Rule("loop", "", "Iterations of a loop, and what each waits for.", "note"),
    Rule("not-ahead", "",
         "A load that a loop with `num_stages`, or with products, does not copy ahead.",
         "note"),
)  # fmt: skip
BY_ID: dict[str, Rule] = {kind.id: kind for kind in KINDS}


@dataclasses.dataclass(frozen=True)
class SlowFinding:
    """Something that takes time in a kernel.

    Attributes:
      what: in one sentence, with figures.
      got: what was emitted, and for which array or operands.
      hint: what to do; None unless the cost model expects the kernel to gain by it.
      at: the line.
      loops: the lines of the loops around it, innermost first, and their iterations in
        each CTA; None where it is not known.
      seconds: the estimated time that it takes in a launch.
      lost_seconds: the part that `hint` or better code would save, at most.
      share: `lost_seconds` of the estimated time of the kernel.
      is_counted: whether the cost model's time of the kernel has `lost_seconds`, or it
        comes on top.
      facts: figures, by names that end in their units.
    """

    kind: Rule
    what: str
    got: str | None = None
    hint: str | None = None
    at: Place = Place()  # noqa: RUF009
    loops: tuple[tuple[str | None, float | None], ...] = ()
    seconds: float = 0.0
    lost_seconds: float = 0.0
    share: float = 0.0
    is_counted: bool = False
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def severity(self) -> str:
        """ "slow", or "note" for what takes little of the time."""
        return "slow" if self.is_slow else "note"

    @property
    def is_slow(self) -> bool:
        """Whether it takes a considerable part of the kernel's time."""
        return self.kind.severity == "slow" and self.share >= SLOW_SHARE

    def of_kernel(self, seconds: float) -> SlowFinding:
        """Returns the finding with its share of a kernel's estimated time."""
        found = dataclasses.replace(self, share=self.lost_seconds / seconds)
        return found if found.is_slow else dataclasses.replace(found, hint=None)

    def to_dict(self) -> Json:
        """Returns the finding as JSON has it."""
        return {
            "kind": self.kind.id,
            "severity": self.severity,
            "what": self.what,
            "got": self.got,
            "hint": self.hint,
            "at": self.at.source,
            "loops": [{"at": at, "iterations": n} for at, n in self.loops],
            "microseconds": 1e6 * self.seconds,
            "lost_microseconds": 1e6 * self.lost_seconds,
            "share": self.share,
            "facts": dict(self.facts),
        }
