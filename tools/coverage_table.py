# SPDX-License-Identifier: Apache-2.0
"""Writes docs/coverage.md, which operation works where: `make coverage-table`.

Everything in it comes from the registry of primitives and rules, the same one that the
emulator and the lowering look their rules up in. Which MLIR operations the lowering
emits is read from its source, whether or not a test runs the line.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import ModuleType
from typing import Any

from tools.emitted_operations import emitted_operations, lowering_sources
from tools.source_tree import ROOT

PATH = ROOT / "docs" / "coverage.md"
_HEAD = """\
# What works where

Written by `make coverage-table` from the registry of primitives and their rules. Do not
edit it by hand.

- *emulator*: runs on a CPU, in the emulator.
- *lane*: compiles for a GPU under Lane semantics.
- *warpgroup*: compiles for a GPU under Warpgroup semantics.

Under Warpgroup semantics a kernel passes through a module of operations on arrays:

- *infer*: layout inference knows which layouts the operation permits.
- *expand*: the operation becomes code of a thread.
"""


def filled_registry() -> ModuleType:
    """The registry, after every room has entered its rules."""
    import pallas_gpu  # noqa: F401 - importing it enters the rules
    from pallas_gpu.primitives import _registry

    return _registry


def coverage_complaints(registry: Any, emitted: Collection[str]) -> list[str]:
    """Holes that are not known gaps, and known gaps that no longer are gaps.

    Args:
      registry: the module of primitives and rules, or one of its form.
      emitted: names of the MLIR operations that the lowering emits.
    """
    found = []
    keys = {(n, False): e.primitive for n, e in registry.PRIMITIVES.items()}
    keys |= {(name, True): name for name in _operations(registry, emitted)}
    for (name, of_operations), key in keys.items():
        for kind in _kinds(registry, of_operations):
            gap = (name, kind) in registry.KNOWN_GAPS
            has_rule = registry.rule(key, kind) is not None
            if not has_rule and not gap:
                found.append(f"{name} has no {kind.value} rule and is no known gap")
            if has_rule and gap:
                found.append(f"{name} has a {kind.value} rule: take it off KNOWN_GAPS")
    for name, kind in registry.KNOWN_GAPS:
        if (name, kind.of_operations) not in keys:
            found.append(f"the known gap {name} ({kind.value}) names no operation")
    return found


def _kinds(registry: Any, of_operations: bool) -> list[Any]:
    return [kind for kind in registry.RuleKind if kind.of_operations is of_operations]


def _operations(registry: Any, emitted: Collection[str]) -> list[str]:
    """Names of all MLIR operations that some rule emits or handles."""
    handled = (registry.rules(kind) for kind in _kinds(registry, of_operations=True))
    return sorted(set(emitted).union(*handled))


def table(registry: Any, emitted: Collection[str]) -> str:
    """The whole text of docs/coverage.md."""
    kinds = _kinds(registry, of_operations=False)
    reasons = sorted(set(registry.KNOWN_GAPS.values()))
    titles = " | ".join(kind.value for kind in kinds).replace("emulate", "emulator")
    lines = [_HEAD, "## Operations of this package", ""]
    lines += [f"| operation | family | {titles} |", "|---|---|" + "---|" * len(kinds)]
    entries = registry.PRIMITIVES.items()
    for name, entry in sorted(entries, key=lambda item: (item[1].family, item[0])):
        cells = []
        for kind in kinds:
            cells.append(_cell(registry, reasons, name, entry.primitive, kind))
        lines.append(f"| `{name}` | {entry.family} | {' | '.join(cells)} |")
    lines += ["", *_jax_operations(registry)]
    lines += _array_operations(registry, emitted, reasons)
    if reasons:
        lines += [*(f"{n}. {reason}" for n, reason in enumerate(reasons, 1)), ""]
    return "\n".join(lines)


def _cell(registry: Any, reasons: list[str], name: str, key: Any, kind: Any) -> str:
    if registry.rule(key, kind) is not None:
        return "yes"
    if reason := registry.KNOWN_GAPS.get((name, kind)):
        return f"no ({reasons.index(reason) + 1})"
    return "no"


def _array_operations(
    registry: Any, emitted: Collection[str], reasons: list[str]
) -> list[str]:
    """The table of the warpgroup-level module's operations."""
    prefix = _prefix()
    elementwise = {prefix + name for name in _element_kinds()}
    kinds = _kinds(registry, of_operations=True)
    titles = " | ".join(kind.value for kind in kinds)
    lines = ["## Operations of the warpgroup-level module", ""]
    lines += [
        "Elementwise operations are left out: each has the name of JAX's operation,",
        f"with the prefix `{prefix}`, and both rules.",
        "",
    ]
    lines += [f"| operation | {titles} |", "|---|" + "---|" * len(kinds)]
    for name in _operations(registry, emitted):
        if name in elementwise:
            continue
        cells = [_cell(registry, reasons, name, name, kind) for kind in kinds]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return [*lines, ""]


def _prefix() -> str:
    from pallas_gpu.mosaic import logical

    return logical.OWN


def _element_kinds() -> dict[str, str]:
    """For each elementwise operation the kinds of dtype that it takes."""
    from pallas_gpu.mosaic.elements.table import TABLE

    return {name: ", ".join(row.kinds) for name, row in TABLE.items()}


def _jax_operations(registry: Any) -> list[str]:
    """The table of JAX's own operations that can stand in a kernel."""
    ours = {id(entry.primitive) for entry in registry.PRIMITIVES.values()}
    kinds = [k for k in _kinds(registry, of_operations=False) if k.value != "emulate"]
    names = {
        kind: {p.name for p in registry.rules(kind) if id(p) not in ours}
        for kind in kinds
    }
    titles = " | ".join(kind.value for kind in kinds)
    lines = ["## Operations of JAX", ""]
    lines += [
        "The emulator gives JAX's operations on values to JAX; the check pass refuses",
        "what is not in this table before either of them sees it. Elementwise",
        "operations name the kinds of dtype that they take.",
        "",
    ]
    taken = _element_kinds()
    lines += [f"| operation | {titles} | takes |", "|---|---|" + "---|" * len(kinds)]
    for name in sorted(set().union(*names.values())):
        cells = ["yes" if name in names[kind] else "no" for kind in kinds]
        cells.append(taken.get(name, ""))
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> int:
    PATH.parent.mkdir(exist_ok=True)
    text = table(filled_registry(), emitted_operations(lowering_sources()))
    PATH.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
