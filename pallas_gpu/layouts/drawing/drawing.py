# SPDX-License-Identifier: Apache-2.0
"""A drawing of a layout, and what can be drawn.

A notebook shows a drawing as SVG, `print` as text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pallas_gpu import expect
from pallas_gpu.layouts.drawing import svg


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A table with a cell for each element of an array.

    Attributes:
      title: what is drawn.
      legend: what the two parts of a cell are.
      rows, columns: labels.
      cells: one for each element, row by row.
    """

    title: str
    legend: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[svg.Cell, ...], ...]

    def __str__(self) -> str:
        """A table with a line for each row, below a line of labels; then the legend."""
        texts = [[cell.text for cell in row] for row in self.cells]
        width = max(len(text) for row in texts for text in (*row, *self.columns))
        margin = max(map(len, self.rows))
        head = "  ".join(label.ljust(width) for label in self.columns)
        lines = [f"{'':>{margin}} | {head}".rstrip()]
        for label, row in zip(self.rows, texts, strict=True):
            line = "  ".join(text.ljust(width) for text in row)
            lines.append(f"{label:>{margin}} | {line}".rstrip())
        return "\n".join([self.title, *lines, self.legend])

    def _repr_svg_(self) -> str:
        """The drawing in a notebook."""
        return svg.render(self.title, self.legend, self.rows, self.columns, self.cells)

    @property
    def svg(self) -> str:
        """The drawing as SVG, e.g. to write to a file."""
        return self._repr_svg_()


_DRAW: list[Callable[[Any, Any, Any], Drawing]] = []


def draw_with(draw: Callable[[Any, Any, Any], Drawing]) -> None:
    """Registers the function of a layout, a shape and a part that draws layouts."""
    _DRAW[:] = [draw]


def part_of_array(value: Any, what: str) -> Any:
    """Accepts an index of static integers and slices, one for each axis."""
    if value is None:
        return None
    entries = value if isinstance(value, tuple) else (value,)
    numbers = [
        n
        for x in entries
        for n in ((x.start, x.stop) if isinstance(x, slice) else (x,))
    ]
    steps = [x.step for x in entries if isinstance(x, slice)]
    known = all(n is None or expect.index(n) is not None for n in numbers)
    if known and None not in [x for x in entries if x is None] and not any(steps):
        return tuple(entries)
    raise expect.wrong_type(
        what,
        "a part of an array",
        "integers and slices without steps",
        value,
        "write e.g. part=(slice(0, 16), slice(0, 32))",
    )


class Drawable:
    """What has a drawing: layouts of registers, SMEM and TMEM."""

    @expect.arguments(
        "draw", shape=expect.optional(expect.integers(1)), part=part_of_array
    )
    def draw(
        self,
        shape: Sequence[int] | None = None,
        part: Any = None,
    ) -> Drawing:
        """Draws where the elements of an array are.

        Args:
          shape: of the array; a layout that has a shape of its own does not need it.
          part: for larger arrays, which part to draw: an integer or a slice for each
            axis.

        Returns:
          A drawing: text by `str` and `print`, SVG in a notebook and as `.svg`.

        Raises:
          LayoutError: the layout does not fit the shape; or the part is larger than 128
            rows of 64 elements, or has more than two axes.

        Example:
          >>> plgpu.Layout.WGMMA.draw((64, 128), part=(slice(0, 16), slice(0, 8)))
        """
        return _DRAW[0](self, shape, part)
