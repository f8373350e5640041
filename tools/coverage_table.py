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

*Issuers* are the threads that can issue an operation: a warpgroup, or one warp inside
`warp_map`. *Reads* and *writes* name its operands; *needs* is a feature of the target.

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
    found += _one_sided(registry)
    for name, kind in registry.KNOWN_GAPS:
        if (name, kind.of_operations) not in keys:
            found.append(f"the known gap {name} ({kind.value}) names no operation")
    return found


def _one_sided(registry: Any) -> list[str]:
    """JAX's operations that are described and not lowered, or under one semantics."""
    ours = {op.primitive for op in registry.PRIMITIVES.values()}
    needed = {op.primitive for op in registry.JAX_PRIMITIVES.values()}
    kinds = _lowerings(registry)
    needed = needed.union(*(registry.rules(kind) for kind in kinds)) - ours
    return [
        f"{name} has no {kind.value} rule"
        for kind in kinds
        for name in sorted(p.name for p in needed - set(registry.rules(kind)))
    ]


def _jax_families(registry: Any) -> list[tuple[str, str, Any]]:
    """JAX's operations with their families: the file of the rule, if not described."""
    ours = {op.primitive for op in registry.PRIMITIVES.values()}
    found = []
    for primitive, rule in registry.rules(_lowerings(registry)[0]).items():
        if primitive not in ours:
            described = registry.JAX_PRIMITIVES.get(primitive.name)
            stem = rule.__module__.rpartition(".")[2]
            family = stem if described is None else described.family
            found.append((family, primitive.name, primitive))
    return sorted(found, key=lambda row: row[:2])


def _lowerings(registry: Any) -> list[Any]:
    """The kinds that every operation of JAX needs: the emulator leaves most to JAX."""
    return [k for k in _kinds(registry, of_operations=False) if k.value != "emulate"]


def _kinds(registry: Any, of_operations: bool) -> list[Any]:
    return [kind for kind in registry.RuleKind if kind.of_operations is of_operations]


def _operations(registry: Any, emitted: Collection[str]) -> list[str]:
    """Names of all MLIR operations that some rule emits or handles."""
    handled = (registry.rules(kind) for kind in _kinds(registry, of_operations=True))
    return sorted(set(emitted).union(*handled))


def table(registry: Any, emitted: Collection[str]) -> str:
    """The whole text of docs/coverage.md."""
    reasons = sorted(set(registry.KNOWN_GAPS.values()))
    lines = [_HEAD, *_our_operations(registry, reasons), ""]
    lines += _jax_operations(registry)
    lines += _array_operations(registry, emitted, reasons)
    if reasons:
        lines += [*(f"{n}. {reason}" for n, reason in enumerate(reasons, 1)), ""]
    return "\n".join(lines)


def _our_operations(registry: Any, reasons: list[str]) -> list[str]:
    """The table of this package's operations: what is true of each, and its rules."""
    kinds = _kinds(registry, of_operations=False)
    titles = ["operation", "family", "issuers", "reads", "writes", "is", "needs"]
    titles += [kind.value.replace("emulate", "emulator") for kind in kinds]
    lines = ["## Operations of this package", ""]
    lines += [f"| {' | '.join(titles)} |", "|---|" + "---|" * (len(titles) - 1)]
    entries = registry.PRIMITIVES.items()
    for name, entry in sorted(entries, key=lambda item: (item[1].family, item[0])):
        cells = [f"`{name}`", *_facts(entry)]
        cells += [
            _cell(registry, reasons, name, entry.primitive, kind) for kind in kinds
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _facts(entry: Any) -> list[str]:
    words = {"atomic": entry.atomic, "asynchronous": entry.asynchronous}
    return [
        entry.family,
        ", ".join(entry.issuers),
        ", ".join(entry.reads),
        ", ".join(entry.writes),
        ", ".join(word for word, is_so in words.items() if is_so),
        "" if entry.feature is None else entry.feature.value,
    ]


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
    kinds = _lowerings(registry)
    lines = ["## Operations of JAX", ""]
    lines += [
        "The emulator gives JAX's operations on values to JAX; the check pass refuses",
        "what is not in this table before either of them sees it. Elementwise",
        "operations name the kinds of dtype that they take.",
        "",
    ]
    taken = _element_kinds()
    titles = " | ".join(["family", *(kind.value for kind in kinds), "takes"])
    lines += [f"| operation | {titles} |", "|---|" + "---|" * (len(kinds) + 2)]
    for family, name, primitive in _jax_families(registry):
        rules = [registry.rule(primitive, kind) for kind in kinds]
        cells = [family, *("no" if rule is None else "yes" for rule in rules)]
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
