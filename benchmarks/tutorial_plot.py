# SPDX-License-Identifier: Apache-2.0
"""Writes measured speeds into tutorial 2: a bar plot, and the rows of its table.

python -m benchmarks.tutorial_matmul --json > tutorials/02_matmul_speed.json  # on a GPU
python -m benchmarks.tutorial_plot
jupytext --sync tutorials/02_matmul.py
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

TUTORIAL = Path(__file__).resolve().parents[1] / "tutorials" / "02_matmul.py"
SPEEDS = TUTORIAL.with_name("02_matmul_speed.json")
# In pixels. SVG scales; only the proportions matter.
WIDTH = 680
LABELS = 170  # width of the names, left of the bars
NUMBERS = 60  # width of the speeds, right of the bars
TOP = 34
ROW = 30
BAR = 20

STYLE = (
    "text{font:13px sans-serif;fill:#222}"
    ".small{font-size:11px;fill:#555}"
    ".step{fill:#2f6f9f}.peer{fill:#9a9a9a}"
)


def draw(record: dict[str, Any]) -> str:
    """Returns an SVG with a bar for each row of a record of `timing.report`."""
    rows = record["rows"]
    fastest = max(row["TFLOP/s"] for row in rows)
    scale = (WIDTH - LABELS - NUMBERS) / fastest
    height = TOP + ROW * len(rows) + 24
    environment = record["environment"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}">',
        f"<style>{STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="10" y="20">TFLOP/s, {escape(rows[-1]["m, n, k"])}</text>',
    ]
    for number, row in enumerate(rows):
        parts += _bar(row, TOP + ROW * number, scale)
    caption = (
        f"{environment['device']}, jax {environment['jax']}, jaxlib "
        f"{environment['jaxlib']}; bfloat16, random normal inputs. "
        "Step 1 computes one tile."
    )
    parts += [
        f'<text class="small" x="10" y="{height - 8}">{escape(caption)}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _bar(row: dict[str, Any], y: float, scale: float) -> list[str]:
    length = max(row["TFLOP/s"] * scale, 1.0)
    kind = "step" if row["step"][0].isdigit() else "peer"
    middle = y + BAR / 2 + 5
    return [
        f'<text x="10" y="{middle:.0f}">{escape(row["step"])}</text>',
        f'<rect class="{kind}" x="{LABELS}" y="{y}" width="{length:.1f}" '
        f'height="{BAR}"/>',
        f'<text x="{LABELS + length + 6:.1f}" y="{middle:.0f}">'
        f"{_speed(row['TFLOP/s'])}</text>",
    ]


def table_row(row: dict[str, Any]) -> str:
    """Returns a row of the tutorial's table."""
    whole = row["TFLOP/s"] >= 1
    share = f"{row['of cuBLAS']:.2f}" if whole else ""
    return f"| {row['step']} | {row['µs']:.1f} | {_speed(row['TFLOP/s'])} | {share} |"


def _speed(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 1 else f"{tflops:.1g}"


def with_table(text: str, record: dict[str, Any]) -> str:
    """Returns the tutorial's text with the rows of its table replaced."""
    rows = {row["step"]: table_row(row) for row in record["rows"]}
    lines = []
    for line in text.splitlines():
        first_cell = line.split("|")[1].strip() if line.startswith("|") else ""
        lines.append(rows.get(first_cell, line))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Draws the plot and updates the table."""
    record = json.loads(SPEEDS.read_text())
    SPEEDS.with_suffix(".svg").write_text(draw(record))
    TUTORIAL.write_text(with_table(TUTORIAL.read_text(), record))


if __name__ == "__main__":
    main()
