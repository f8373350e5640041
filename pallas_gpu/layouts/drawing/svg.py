# SPDX-License-Identifier: Apache-2.0
"""Drawings as SVG: a table of coloured cells with labels, title and legend."""

from __future__ import annotations

import colorsys
import dataclasses
from collections.abc import Sequence
from html import escape

# Pixels.
_WIDTH, _HEIGHT = 46, 30
_MARGIN, _TOP, _BOTTOM = 44, 58, 34
_CHARACTER = 7.3


@dataclasses.dataclass(frozen=True)
class Cell:
    """An element of the array.

    Attributes:
      upper, lower: the two parts of its text.
      owner: cells of one owner have one colour, and no line between them.
      hue: of the colour, 0 to 359.
      light: of the colour, 0 (dark) to 7.
    """

    upper: str
    lower: str
    owner: int
    hue: int
    light: int

    @property
    def text(self) -> str:
        """Both parts."""
        return f"{self.upper} {self.lower}"


def render(
    title: str,
    legend: str,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[Cell]],
) -> str:
    """Returns the SVG of a table."""
    right = _MARGIN + _WIDTH * len(columns)
    bottom = _TOP + _HEIGHT * len(rows)
    width = max(right + 12, 12 + int(_CHARACTER * max(len(title), len(legend))))
    height = bottom + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="Menlo, Consolas, monospace" '
        'font-size="11" text-anchor="middle">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _label(8, 22, title, 'font-size="14" font-weight="bold" text-anchor="start"'),
        *_labels(rows, columns),
        *_cells(cells),
        f'<path d="{_borders(cells)}" stroke="#333" stroke-width="1.2" fill="none"/>',
        _label(8, bottom + 22, legend, 'text-anchor="start" fill="#444"'),
        "</svg>",
    ]
    return "\n".join(parts)


def _label(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {attributes}>{escape(text, quote=False)}</text>'


def _labels(rows: Sequence[str], columns: Sequence[str]) -> list[str]:
    above = [
        _label(_MARGIN + (i + 0.5) * _WIDTH, _TOP - 7, text, 'fill="#666"')
        for i, text in enumerate(columns)
    ]
    left = [
        _label(
            _MARGIN - 7,
            _TOP + i * _HEIGHT + 19,
            text,
            'text-anchor="end" fill="#666"',
        )
        for i, text in enumerate(rows)
    ]
    return above + left


def _cells(cells: Sequence[Sequence[Cell]]) -> list[str]:
    boxes, texts = [], []
    for i, row in enumerate(cells):
        for j, cell in enumerate(row):
            x, y = _MARGIN + j * _WIDTH, _TOP + i * _HEIGHT
            colour = _colour(cell.hue, cell.light)
            boxes.append(
                f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" '
                f'fill="{colour}"/>'
            )
            middle = x + _WIDTH / 2
            texts.append(_label(middle, y + 13, cell.upper))
            texts.append(
                _label(middle, y + 25, cell.lower, 'fill="#333" font-size="9"')
            )
    return [*boxes, *texts]


def _colour(hue: int, light: int) -> str:
    """A colour of a hue; not every program that shows SVG knows `hsl()`."""
    parts = colorsys.hls_to_rgb(hue / 360, 0.7 + 0.032 * light, 0.65)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _borders(cells: Sequence[Sequence[Cell]]) -> str:
    """The lines between cells of different owners, and around the table."""
    owners = [[cell.owner for cell in row] for row in cells]
    height, width = len(owners), len(owners[0])
    lines = []
    for i in range(height + 1):
        for j in range(width):
            inner = 0 < i < height
            if not inner or owners[i - 1][j] != owners[i][j]:
                lines.append(f"M{_MARGIN + j * _WIDTH} {_TOP + i * _HEIGHT}h{_WIDTH}")
    for j in range(width + 1):
        for i in range(height):
            inner = 0 < j < width
            if not inner or owners[i][j - 1] != owners[i][j]:
                lines.append(f"M{_MARGIN + j * _WIDTH} {_TOP + i * _HEIGHT}v{_HEIGHT}")
    return "".join(lines)
