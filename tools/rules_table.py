# SPDX-License-Identifier: Apache-2.0
"""The table of rules in docs/checking.md, and the ids in docs/verdict.schema.json."""

from __future__ import annotations

import json
import re

from pallas_gpu.findings import RULES
from tools.source_tree import ROOT

PAGE = ROOT / "docs/checking.md"
SCHEMA = ROOT / "docs/verdict.schema.json"
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


def schema() -> str:
    """docs/verdict.schema.json with the ids as they are to be."""
    found = json.loads(SCHEMA.read_text(encoding="utf-8"))
    found["$defs"]["rule"]["enum"] = [rule.id for rule in RULES]
    return json.dumps(found, indent=2) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    SCHEMA.write_text(schema(), encoding="utf-8")
