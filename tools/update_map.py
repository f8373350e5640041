# SPDX-License-Identifier: Apache-2.0
"""Updates MAP.md's list of files: `make map`.

The text above the marker is written by hand and kept. Below it is one line per source
file, with the first sentence of the file's docstring, so the purpose of a file is
stated once, in the file.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from pathlib import Path, PurePosixPath

from tools.source_tree import ROOT, source_files

MARKER = "<!-- below: written by `make map` -->"
ENTRY = re.compile(r"^- `([^`]+)`", re.MULTILINE)


def purpose(path: Path) -> str:
    """The first sentence of a file's docstring, or of a script's opening comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        opening = ast.get_docstring(ast.parse(text)) or ""
    else:
        comments = itertools.takewhile(lambda x: x.startswith("#"), text.splitlines())
        words = (line.lstrip("#!").strip() for line in comments)
        opening = "\n".join(w for w in words if not w.startswith(("SPDX", "/", "---")))
    paragraph = " ".join(opening.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[\w)`])\.(?: |$)", paragraph, maxsplit=1)[0]


def file_list(root: Path) -> str:
    """The generated part of the map: a heading per folder, a line per file."""
    lines = []
    by_folder: dict[str, list[str]] = {}
    for file in source_files(root):
        by_folder.setdefault(str(PurePosixPath(file).parent), []).append(file)
    for folder, files in sorted(by_folder.items()):
        lines += [f"## {folder}/", ""]
        lines += [f"- `{file}`: {purpose(root / file)}" for file in files]
        lines.append("")
    return "\n".join(lines)


def map_complaints(root: Path) -> list[str]:
    """Errors in MAP.md: missing files, duplicates, and files that do not exist."""
    listed = ENTRY.findall((root / "MAP.md").read_text(encoding="utf-8"))
    files = source_files(root)
    found = [f"MAP.md lacks {file}" for file in files if file not in listed]
    for name in dict.fromkeys(listed):
        if listed.count(name) > 1:
            found.append(f"MAP.md names {name} {listed.count(name)} times")
        if name not in files:
            found.append(f"MAP.md names {name}, which is not there")
    return found


def main() -> int:
    path = ROOT / "MAP.md"
    by_hand, marker, _ = path.read_text(encoding="utf-8").partition(MARKER)
    if not marker:
        print(f"MAP.md has no line {MARKER!r}", file=sys.stderr)
        return 1
    path.write_text(f"{by_hand}{MARKER}\n\n{file_list(ROOT)}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
