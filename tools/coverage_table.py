# SPDX-License-Identifier: Apache-2.0
"""Writes docs/coverage.md, the table of supported operations: `make coverage-table`.

It is generated from the registry of primitives and rules in which the emulator and the
lowering look up their rules. The MLIR operations that the lowering emits are read from
its source, whether or not a test executes the line.
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
`warp_map`. *Reads* and *writes* name its operands; *needs* is a required feature of the
target.

Under Warpgroup semantics a kernel is first lowered to a module of operations on arrays:

- *infer*: layout inference has the constraints of the operation.
- *expand*: the operation is expanded to code of one thread.
"""


def filled_registry() -> ModuleType:
    """The registry, after every room has registered its rules."""
    import pallas_gpu  # noqa: F401 - the import registers the rules
    from pallas_gpu.primitives import _registry

    return _registry


def coverage_complaints(registry: Any, emitted: Collection[str]) -> list[str]:
    """Missing rules that are not known gaps, and known gaps that are closed.

    Args:
      registry: the module of primitives and rules, or one with its interface.
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
                found.append(f"{name} has no {kind.value} rule and is not a known gap")
            if has_rule and gap:
                found.append(f"{name} has a {kind.value} rule: take it off KNOWN_GAPS")
    found += _one_sided(registry)
    for name, kind in registry.KNOWN_GAPS:
        if (name, kind.of_operations) not in keys:
            found.append(f"the known gap {name} ({kind.value}) names no operation")
    return found


def _one_sided(registry: Any) -> list[str]:
    """JAX's operations without a lowering under one or both semantics."""
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
    """JAX's operations with their families: the rule's file, if not described."""
    ours = {op.primitive for op in registry.PRIMITIVES.values()}
    found = []
    rules = {**registry.rules(_lowerings(registry)[0]), **_composites(registry)}
    for primitive, rule in rules.items():
        if primitive not in ours:
            described = registry.JAX_PRIMITIVES.get(primitive.name)
            stem = rule.__module__.rpartition(".")[2]
            family = stem if described is None else described.family
            found.append((family, primitive.name, primitive))
    return sorted(found, key=lambda row: row[:2])


def _lowerings(registry: Any) -> list[Any]:
    """The kinds required of JAX's operations: the emulator leaves most to JAX."""
    return [k for k in _kinds(registry, of_operations=False) if k.value != "emulate"]


def _kinds(registry: Any, of_operations: bool) -> list[Any]:
    """The kinds that operations need: a composite has none of its own."""
    return [
        kind
        for kind in registry.RuleKind
        if kind.of_operations is of_operations and kind.value != "composite"
    ]


def _composites(registry: Any) -> dict[Any, Any]:
    """The rules of operations that consist of others."""
    kinds = [kind for kind in registry.RuleKind if kind.value == "composite"]
    return {key: rule for kind in kinds for key, rule in registry.rules(kind).items()}


def _operations(registry: Any, emitted: Collection[str]) -> list[str]:
    """The names of all MLIR operations that a rule emits or handles."""
    handled = (registry.rules(kind) for kind in _kinds(registry, of_operations=True))
    return sorted(set(emitted).union(*handled))


def table(registry: Any, emitted: Collection[str]) -> str:
    """The text of docs/coverage.md."""
    reasons = sorted(set(registry.KNOWN_GAPS.values()))
    lines = [_HEAD, *_our_operations(registry, reasons), "", *_features()]
    lines += _jax_operations(registry)
    lines += _array_operations(registry, emitted, reasons)
    if reasons:
        lines += [*(f"{n}. {reason}" for n, reason in enumerate(reasons, 1)), ""]
    return "\n".join(lines)


def _our_operations(registry: Any, reasons: list[str]) -> list[str]:
    """The table of this package's operations: their properties and rules."""
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


def _features() -> list[str]:
    """The tables of copies, barriers, clusters and memory, feature by feature."""
    from tests.support.features import REFUSED, ROWS

    lines = ["## Copies, barriers, clusters, memory", ""]
    lines += [
        "Each runs in the emulator and, as emitted under both semantics, in a model of",
        "the PTX ISA; those of `sm_90a` ran on an H200. Each is compiled offline, and",
        "the instruction is found there. *Reported*: without which of these, where a",
        "kernel needs it, the emulator reports an error.",
        "`tests/support/features/` names the tests.",
        "",
        "| feature | target | instruction | reported |",
        "|---|---|---|---|",
    ]
    for row in ROWS:
        target = "sm_100a" if row.blackwell else "sm_90a"
        found = [k for k, v in row.omissions.items() if not v.startswith("(")]
        lines.append(
            f"| {row.feature} | `{target}` | `{row.instruction}` | {', '.join(found)} |"
        )
    lines += ["", "What the hardware has, or upstream takes, and is refused:", ""]
    lines += ["| what | error | why |", "|---|---|---|"]
    lines += [f"| {r.feature} | `{r.error}` | {r.reason} |" for r in REFUSED]
    return [*lines, ""]


def _facts(entry: Any) -> list[str]:
    words = {"atomic": entry.atomic, "asynchronous": entry.asynchronous}
    return [
        entry.family,
        "warpgroup, warp" if entry.by_warp else "warpgroup",
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
        "Elementwise operations are omitted: each has the name of JAX's operation,",
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
    """For each elementwise operation the kinds of dtype that it supports."""
    from pallas_gpu.mosaic.elements.table import TABLE

    return {name: ", ".join(row.kinds) for name, row in TABLE.items()}


def _jax_operations(registry: Any) -> list[str]:
    """The table of JAX's own operations that kernels can contain."""
    kinds = _lowerings(registry)
    lines = ["## Operations of JAX", ""]
    lines += [
        "The emulator evaluates JAX's operations on values with JAX; the check pass",
        "rejects operations that are not in this table. For elementwise operations the",
        "kinds of dtype are given. A *composite* is replaced by other operations of",
        "this table before it is lowered (`pallas_gpu/composites/`).",
        "",
    ]
    taken, composites = _element_kinds(), _composites(registry)
    titles = " | ".join(["family", *(kind.value for kind in kinds), "dtypes"])
    lines += [f"| operation | {titles} |", "|---|" + "---|" * (len(kinds) + 2)]
    for family, name, primitive in _jax_families(registry):
        rules = [registry.rule(primitive, kind) for kind in kinds]
        cells = [family, *("no" if rule is None else "yes" for rule in rules)]
        if primitive in composites:
            cells = [family, *["composite"] * len(kinds)]
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
