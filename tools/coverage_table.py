# SPDX-License-Identifier: Apache-2.0
"""Writes docs/coverage.md, which operation works where: `make coverage-table`.

Everything in it comes from the registry of primitives and rules, the same one that the
emulator and the lowering look their rules up in.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from tools.source_tree import ROOT

PATH = ROOT / "docs" / "coverage.md"
_HEAD = """\
# What works where

Written by `make coverage-table` from the registry of primitives and their rules. Do not
edit it by hand.

- *emulator*: runs on a CPU, in the emulator.
- *lane*: compiles for a GPU under Lane semantics.
- *warpgroup*: compiles for a GPU under Warpgroup semantics.
"""


def filled_registry() -> ModuleType:
    """The registry, after every room has entered its rules."""
    import pallas_gpu  # noqa: F401 - importing it enters the rules
    from pallas_gpu.primitives import _registry

    return _registry


def coverage_complaints(registry: Any) -> list[str]:
    """Holes that are not known gaps, and known gaps that are none any more."""
    found = []
    for name, entry in registry.PRIMITIVES.items():
        for kind in registry.RuleKind:
            gap = (name, kind) in registry.KNOWN_GAPS
            has_rule = registry.rule(entry.primitive, kind) is not None
            if not has_rule and not gap:
                found.append(f"{name} has no {kind.value} rule and is no known gap")
            if has_rule and gap:
                found.append(f"{name} has a {kind.value} rule: take it off KNOWN_GAPS")
    for name, kind in registry.KNOWN_GAPS:
        if name not in registry.PRIMITIVES:
            found.append(f"the known gap {name} ({kind.value}) is no primitive")
    return found


def table(registry: Any) -> str:
    """The whole text of docs/coverage.md."""
    kinds = list(registry.RuleKind)
    reasons = sorted(set(registry.KNOWN_GAPS.values()))
    titles = " | ".join(kind.value for kind in kinds).replace("emulate", "emulator")
    lines = [_HEAD, "## Operations of this package", ""]
    lines += [f"| operation | family | {titles} |", "|---|---|" + "---|" * len(kinds)]
    entries = registry.PRIMITIVES.items()
    for name, entry in sorted(entries, key=lambda item: (item[1].family, item[0])):
        cells = []
        for kind in kinds:
            if registry.rule(entry.primitive, kind) is not None:
                cells.append("yes")
            elif reason := registry.KNOWN_GAPS.get((name, kind)):
                cells.append(f"no ({reasons.index(reason) + 1})")
            else:
                cells.append("no")
        lines.append(f"| `{name}` | {entry.family} | {' | '.join(cells)} |")
    lines += ["", *(f"{n}. {reason}" for n, reason in enumerate(reasons, 1)), ""]
    return "\n".join(lines + _jax_operations(registry))


def _jax_operations(registry: Any) -> list[str]:
    """The table of JAX's own operations that can stand in a kernel."""
    ours = {id(entry.primitive) for entry in registry.PRIMITIVES.values()}
    kinds = [kind for kind in registry.RuleKind if kind.value != "emulate"]
    names = {
        kind: {p.name for p in registry.rules(kind) if id(p) not in ours}
        for kind in kinds
    }
    titles = " | ".join(kind.value for kind in kinds)
    lines = ["## Operations of JAX", ""]
    lines += [
        "The emulator gives JAX's operations on values to JAX; the check pass refuses",
        "what is not in this table before either of them sees it.",
        "",
    ]
    lines += [f"| operation | {titles} |", "|---|" + "---|" * len(kinds)]
    for name in sorted(set().union(*names.values())):
        cells = ["yes" if name in names[kind] else "no" for kind in kinds]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> int:
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(table(filled_registry()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
