# SPDX-License-Identifier: Apache-2.0
"""The rules in docs/checking.md, their kernels in docs/rules.md, and their schema.

Likewise the kinds of what `explain` finds.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap

from pallas_gpu.explanation.findings import KINDS
from pallas_gpu.findings import RULES
from tests.support import rule_kernels
from tools.source_tree import ROOT

PAGE = ROOT / "docs/checking.md"
KERNELS = ROOT / "docs/rules.md"
SCHEMA = ROOT / "docs/verdict.schema.json"
EXPLAIN_PAGE = ROOT / "docs/explain.md"
EXPLAIN_SCHEMA = ROOT / "docs/explain.schema.json"
_TABLE = re.compile(r"(?<=<!-- rules -->\n).*(?=<!-- end of rules -->)", re.DOTALL)


def table() -> str:
    """The rules as a table in Markdown."""
    rows = [
        f"| `{rule.id}` | `{rule.error}` | {rule.meaning} |\n"
        for rule in sorted(RULES, key=lambda rule: rule.severity)
    ]
    return "".join(["| rule | error of a call | meaning |\n|---|---|---|\n", *rows])


def page() -> str:
    """docs/checking.md with the table as it is to be."""
    return _TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8"))


_HEAD = """# What the rules mean

Each rule that a run of a kernel can break, with a small kernel that breaks it, the same
kernel without the mistake, and where the rule comes from. The test suite checks all of
them. `make rules-table` writes this page from `tests/support/rule_kernels.py`;
docs/checking.md has the other rules, and says how kernels are checked.

A kernel gets `x`, two rows of 128 float32 in GMEM, stores to `o`, which is like it, and
has the scratch that is named above it. `# at` marks the line of the finding, `# other`
that of the other access.

"""


def kernels() -> str:
    """docs/rules.md as it is to be."""
    wrong = {case.rule: case for case in reversed(rule_kernels.WRONG)}
    sections = [_HEAD]
    for rule in RULES:
        if rule.id not in wrong:
            continue
        sections.append(f"## `{rule.id}`\n\n{textwrap.fill(rule.meaning, 88)}\n\n")
        sections.append(f"From: {rule.source}. Raises: `{rule.error}`.\n")
        for title, case in (
            ("Wrong", wrong[rule.id]),
            ("Right", rule_kernels.RIGHT[rule.id]),
        ):
            sections.append(
                f"\n{title}{_launched(case)}:\n\n```python\n{_body(case)}```\n"
            )
        sections.append("\n")
    return "\n".join("".join(sections).split("\n")).rstrip() + "\n"


def _launched(case: rule_kernels.Case) -> str:
    """How a kernel is launched, in words."""
    parts = [_scratch(x) for x in case.scratch]
    parts += [f"{name}={value}" for name, value in case.options.items()]
    return f" ({', '.join(parts)})" if parts else ""


def _scratch(declared: object) -> str:
    shape = getattr(declared, "shape", None)
    arrivals = getattr(declared, "num_arrivals", None)
    if arrivals is not None:
        return "Barrier()" if arrivals == 1 else f"Barrier(num_arrivals={arrivals})"
    return f"SMEM({tuple(shape)}, float32)" if shape else "a semaphore"


def _body(case: rule_kernels.Case) -> str:
    """The source of a body, without the decorator."""
    lines = inspect.getsource(case.body).splitlines(keepends=True)
    first = next(i for i, text in enumerate(lines) if text.startswith("def "))
    return "".join(lines[first:])


def schema() -> str:
    """docs/verdict.schema.json with the ids as they are to be."""
    found = json.loads(SCHEMA.read_text(encoding="utf-8"))
    found["$defs"]["rule"]["enum"] = [rule.id for rule in RULES]
    return json.dumps(found, indent=2) + "\n"


def explain_page() -> str:
    """docs/explain.md with the table as it is to be."""
    rows = "".join(f"| `{kind.id}` | {kind.meaning} |\n" for kind in KINDS)
    table = f"| kind | meaning |\n|---|---|\n{rows}"
    return _TABLE.sub(lambda _: table, EXPLAIN_PAGE.read_text(encoding="utf-8"))


def explain_schema() -> str:
    """docs/explain.schema.json with the ids as they are to be."""
    found = json.loads(EXPLAIN_SCHEMA.read_text(encoding="utf-8"))
    found["$defs"]["kind"]["enum"] = [kind.id for kind in KINDS]
    return json.dumps(found, indent=2) + "\n"


if __name__ == "__main__":
    EXPLAIN_PAGE.write_text(explain_page(), encoding="utf-8")
    EXPLAIN_SCHEMA.write_text(explain_schema(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    KERNELS.write_text(kernels(), encoding="utf-8")
    SCHEMA.write_text(schema(), encoding="utf-8")
