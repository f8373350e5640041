# SPDX-License-Identifier: Apache-2.0
"""Writes docs/coverage.md, the table of supported operations: `make coverage-table`.

It is generated from the registry of primitives and rules in which the emulator, layout
inference and the lowering look up their rules.
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

- *emulate*: runs on a CPU, in the emulator.
- *emit*: compiles for a GPU.
- *relation*: layout inference, i.e. Warpgroup semantics, knows which layouts the
  operation supports. Operations on scalars and barriers need no relation.

*Issuers* are the threads that can issue an operation: a warpgroup, or one warp inside
`warp_map`. *Reads* and *writes* name its operands; *needs* is a required feature of the
target.
"""
# Operations of JAX without arrays; calls are part of the program that calls them.
_WITHOUT_ARRAYS = {"axis_index", "jit", "remat2", "custom_jvp_call", "custom_vjp_call"}


def filled_registry() -> ModuleType:
    """The registry, after every room has registered its rules."""
    import pallas_gpu  # noqa: F401 - the import registers the rules
    from pallas_gpu.primitives import _registry

    return _registry


def coverage_complaints(registry: Any) -> list[str]:
    """Missing rules.

    Args:
      registry: the module of primitives and rules, or one with its interface.
    """
    kinds = registry.RuleKind
    ours = {op.primitive: op for op in registry.PRIMITIVES.values()}
    jax = {op.primitive for op in registry.JAX_PRIMITIVES.values()}
    jax = jax.union(registry.rules(kinds.EMIT), registry.rules(kinds.RELATION))
    needed = [(x, kind) for x in ours for kind in (kinds.EMULATE, kinds.EMIT)]
    needed += [(x, kinds.RELATION) for x, op in ours.items() if _has_memory(op)]
    for primitive in sorted(jax - ours.keys(), key=lambda x: x.name):
        needed.append((primitive, kinds.EMIT))
        if primitive.name not in _WITHOUT_ARRAYS:
            needed.append((primitive, kinds.RELATION))
    return [
        f"{primitive.name} has no {kind.value} rule"
        for primitive, kind in needed
        if registry.rule(primitive, kind) is None
    ]


def _has_memory(operation: Any) -> bool:
    """Whether an operation accesses anything but barriers."""
    return bool({*operation.reads, *operation.writes} - {"barrier"})


def _jax_families(registry: Any) -> list[tuple[str, str, Any]]:
    """JAX's operations with their families: the rule's file, if not described."""
    ours = {op.primitive for op in registry.PRIMITIVES.values()}
    kinds, found = registry.RuleKind, []
    rules = {**registry.rules(kinds.EMIT), **registry.rules(kinds.COMPOSITE)}
    for primitive, rule in rules.items():
        if primitive not in ours:
            described = registry.JAX_PRIMITIVES.get(primitive.name)
            stem = rule.__module__.rpartition(".")[2]
            family = stem if described is None else described.family
            found.append((family, primitive.name, primitive))
    return sorted(found, key=lambda row: row[:2])


def table(registry: Any) -> str:
    """The text of docs/coverage.md."""
    lines = [_HEAD, *_our_operations(registry), "", *_features()]
    return "\n".join([*lines, *_jax_operations(registry)])


def _our_operations(registry: Any) -> list[str]:
    """The table of this package's operations: their properties and rules."""
    kinds = [kind for kind in registry.RuleKind if kind.value != "composite"]
    titles = ["operation", "family", "issuers", "reads", "writes", "is", "needs"]
    titles += [kind.value for kind in kinds]
    lines = ["## Operations of this package", ""]
    lines += [f"| {' | '.join(titles)} |", "|---|" + "---|" * (len(titles) - 1)]
    entries = registry.PRIMITIVES.items()
    for name, entry in sorted(entries, key=lambda item: (item[1].family, item[0])):
        cells = [f"`{name}`", *_facts(entry)]
        cells += [_cell(registry, entry.primitive, kind) for kind in kinds]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _features() -> list[str]:
    """The tables of copies, barriers, clusters and memory, feature by feature."""
    from tests.support.features import REFUSED, rows

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
    for row in rows():
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


def _cell(registry: Any, primitive: Any, kind: Any) -> str:
    return "" if registry.rule(primitive, kind) is None else "yes"


def _element_kinds() -> dict[str, str]:
    """For each elementwise operation the kinds of dtype that it supports."""
    from pallas_gpu.emitters.elements.table import TABLE

    return {name: ", ".join(row.kinds) for name, row in TABLE.items()}


def _jax_operations(registry: Any) -> list[str]:
    """The table of JAX's own operations that kernels can contain."""
    kinds = [registry.RuleKind.EMIT, registry.RuleKind.RELATION]
    lines = ["## Operations of JAX", ""]
    lines += [
        "The emulator evaluates JAX's operations on values with JAX; the check pass",
        "rejects operations that are not in this table. For elementwise operations the",
        "kinds of dtype are given. A *composite* is replaced by other operations of",
        "this table before it is lowered (`pallas_gpu/composites/`).",
        "",
    ]
    taken, composites = _element_kinds(), registry.rules(registry.RuleKind.COMPOSITE)
    titles = " | ".join(["family", *(kind.value for kind in kinds), "dtypes"])
    lines += [f"| operation | {titles} |", "|---|" + "---|" * (len(kinds) + 2)]
    for family, name, primitive in _jax_families(registry):
        cells = [family, *(_cell(registry, primitive, kind) for kind in kinds)]
        if primitive in composites:
            cells = [family, *["composite"] * len(kinds)]
        cells.append(taken.get(name, ""))
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> int:
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(table(filled_registry()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
