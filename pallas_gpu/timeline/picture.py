# SPDX-License-Identifier: Apache-2.0
"""Profiles as SVG: the warpgroups of an SM as lanes over time, with what they did."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import numpy as np

# Pixels.
_LEFT, _RIGHT, _TOP, _LANE, _GAP = 130, 30, 44, 34, 6
_CHARACTER = 6.2
# Spans that are narrower are not drawn: an eye cannot tell them from their neighbours.
_NARROWEST = 0.3
# Of scopes, and of waits, which are hatched.
_SCOPES = ("#8fb4d9", "#9fd0a8", "#d9c98f", "#c3aee0", "#8fd0cf", "#d0b3a0", "#b8c4cc")
_WAITS = ("#d62728", "#e8790c", "#c2408f", "#8c564b", "#a3123a")


@dataclasses.dataclass(frozen=True)
class Part:
    """What is drawn.

    Attributes:
      begin, end: the time that is shown.
      width: of the picture, in pixels.
      has_times: whether times are in ns.
    """

    launch: int
    sm: int
    begin: float
    end: float
    width: int
    has_times: bool

    def x(self, time: float) -> float:
        """Returns the horizontal position of a time."""
        inside = min(max(time, self.begin), self.end) - self.begin
        scale = (self.width - _LEFT - _RIGHT) / ((self.end - self.begin) or 1.0)
        return _LEFT + inside * scale


def part_of(
    profile: Any, launch: int, sm: int | None, between: Any, width: int
) -> Part:
    """Returns the part to draw: by default the SM with the most spans, all the time."""
    traces = profile.traces[profile.traces["launch"] == launch]
    if sm is None:
        spans = profile.spans[profile.spans["launch"] == launch]
        drawn = spans if len(spans) else traces
        numbers, counts = np.unique(drawn["sm"], return_counts=True)
        sm = int(numbers[counts.argmax()]) if len(numbers) else 0
    traces = traces[traces["sm"] == sm]
    if between is None:
        begin, end = traces["begin"].min(initial=np.inf), traces["end"].max(initial=0)
        between = (min(begin, end), end)
    return Part(
        launch, sm, float(between[0]), float(between[1]), width, profile.has_times
    )


def render(profile: Any, part: Part) -> str:
    """Returns the SVG of a part of a profile."""
    described = profile.launches[part.launch]
    traces = _of(profile.traces, part)
    rows = _rows(traces)
    spans = _of(profile.spans, part)
    colours = _colours(spans)
    bottom = _TOP + (_LANE + _GAP) * len(set(rows.values()))
    legend = [*_legend(colours, bottom + 34, part.width)]
    height = bottom + 34 + 18 * (1 + max((y for y, _ in legend), default=0))
    where = f"SM {part.sm}" if profile.has_times else "events on the CPU in their order"
    title = f"kernel {described.kernel}, {where}"
    lanes = {(lane, slot): y for (lane, slot), y in _heights(rows).items()}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{part.width}" '
        f'height="{height}" viewBox="0 0 {part.width} {height}" '
        'font-family="Menlo, Consolas, monospace" font-size="10">',
        '<defs><pattern id="wait" width="5" height="5" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path d="M0 0V5" stroke="white" '
        'stroke-width="2" stroke-opacity="0.55"/></pattern></defs>',
        f'<rect width="{part.width}" height="{height}" fill="white"/>',
        _text(8, 18, title, 'font-size="13" font-weight="bold"'),
        *(
            _text(_LEFT - 8, y + 20, name, 'text-anchor="end" fill="#444"')
            for name, y in _labels(described, lanes)
        ),
        *_backgrounds(traces, rows, lanes, part),
        *_boxes(spans, rows, lanes, colours, part),
        *_axis(part, bottom),
        *(text for _, text in legend),
        "</svg>",
    ]
    return "\n".join(parts)


def _of(table: np.ndarray, part: Part) -> np.ndarray:
    inside = (table["begin"] <= part.end) & (table["end"] >= part.begin)
    at = (table["launch"] == part.launch) & (table["sm"] == part.sm)
    return table[inside & at]


def _rows(traces: np.ndarray) -> dict[tuple[int, int], tuple[int, int]]:
    """Returns the row of each CTA and lane: the lane, and which of the CTAs at a time.

    CTAs that follow each other share rows.
    """
    ends: list[float] = []
    slots: dict[int, int] = {}
    for cta in sorted(
        set(traces["cta"].tolist()),
        key=lambda c: float(traces["begin"][traces["cta"] == c].min()),
    ):
        own = traces[traces["cta"] == cta]
        free = (i for i, end in enumerate(ends) if end <= own["begin"].min())
        slots[cta] = next(free, len(ends))
        ends[slots[cta] : slots[cta] + 1] = [float(own["end"].max())]
    keys = zip(traces["cta"].tolist(), traces["lane"].tolist(), strict=True)
    return {(cta, lane): (lane, slots[cta]) for cta, lane in keys}


def _heights(rows: dict[Any, tuple[int, int]]) -> dict[tuple[int, int], int]:
    ordered = sorted(set(rows.values()), key=lambda row: (row[1], row[0]))
    return {row: _TOP + i * (_LANE + _GAP) for i, row in enumerate(ordered)}


def _labels(described: Any, lanes: dict[tuple[int, int], int]) -> Any:
    several = any(slot for _, slot in lanes)
    for (lane, slot), y in lanes.items():
        yield described.lane(lane) + (f" ({slot})" if several else ""), y


def _colours(spans: np.ndarray) -> dict[tuple[str, bool], str]:
    found: dict[tuple[str, bool], str] = {}
    for name, is_wait in zip(spans["name"], spans["is_wait"].tolist(), strict=True):
        if (name, is_wait) not in found:
            palette = _WAITS if is_wait else _SCOPES
            used = sum(wait == is_wait for _, wait in found)
            found[name, is_wait] = palette[used % len(palette)]
    return found


def _backgrounds(traces, rows, lanes, part: Part) -> Iterator[str]:
    """Where a CTA runs: what remains visible of it is a bubble."""
    for trace in traces:
        y = lanes[rows[int(trace["cta"]), int(trace["lane"])]]
        x, right = part.x(trace["begin"]), part.x(trace["end"])
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{right - x:.1f}" height="{_LANE}" '
            f'fill="#ececec" stroke="#999" stroke-width="0.5">'
            f"<title>CTA {trace['cta']}</title></rect>"
        )


def _boxes(spans, rows, lanes, colours, part: Part) -> Iterator[str]:
    for i, span in enumerate(spans):
        x, right = part.x(span["begin"]), part.x(span["end"])
        width = right - x
        if width < _NARROWEST:
            continue
        name, is_wait = span["name"], bool(span["is_wait"])
        inset = min(3 * int(span["depth"]), _LANE // 2 - 4)
        y = lanes[rows[int(span["cta"]), int(span["lane"])]] + inset
        size = _LANE - 2 * inset
        box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{size}"'
        long = duration(span["end"] - span["begin"], part.has_times)
        title = f"{'wait for ' if is_wait else ''}{name}: {long}"
        if not span["is_complete"]:
            title += ", its end was not recorded"
        yield (
            f'<rect {box} fill="{colours[name, is_wait]}" stroke="white" '
            f'stroke-width="0.4"><title>{escape(title, quote=False)}</title></rect>'
        )
        if is_wait:
            yield f'<rect {box} fill="url(#wait)" pointer-events="none"/>'
        if i + 1 < len(spans) and spans["depth"][i + 1] > span["depth"]:
            # The first span in it hides what is behind its beginning.
            width = min(width, part.x(spans["begin"][i + 1]) - x)
        if _CHARACTER * len(name) + 6 < width:
            fill = "white" if is_wait else "#222"
            yield _text(
                x + 4, y + size / 2 + 3.5, name, f'fill="{fill}" pointer-events="none"'
            )


def _axis(part: Part, y: int) -> Iterator[str]:
    span = (part.end - part.begin) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(n for n in (1, 2, 5, 10) if span / (n * step) <= 8)
    first = math.ceil(part.begin / step)
    for i in range(first, math.floor(part.end / step) + 1):
        x = part.x(i * step)
        yield f'<path d="M{x:.1f} {_TOP - 6}V{y}" stroke="#bbb" stroke-width="0.5"/>'
        label = duration(i * step, part.has_times)
        yield _text(x, y + 12, label, 'text-anchor="middle" fill="#444"')


def _legend(colours: Any, y: int, width: int) -> Iterator[tuple[int, str]]:
    """Yields the entries of the legend, with the number of their line."""
    x, line = _LEFT, 0
    entries = [
        (f"wait for {name}" if is_wait else name, colour, is_wait)
        for (name, is_wait), colour in colours.items()
    ]
    entries.append(("bubble: outside of all spans", "#ececec", False))
    for name, colour, is_wait in entries:
        size = 24 + int(_CHARACTER * len(name)) + 10
        if x + size > width:
            x, line = _LEFT, line + 1
        at = y + 18 * line
        box = f'x="{x}" y="{at - 9}" width="14" height="11"'
        text = f'<rect {box} fill="{colour}" stroke="#999" stroke-width="0.4"/>'
        if is_wait:
            text += f'<rect {box} fill="url(#wait)"/>'
        yield line, text + _text(x + 19, at, name, 'fill="#222"')
        x += size


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" {attributes}>{escape(text, quote=False)}</text>'


def duration(time: float, has_times: bool = True) -> str:
    """Returns a time as text."""
    if not has_times:
        return f"{time:,.0f}"
    if abs(time) < 1000:
        return f"{time:,.0f} ns"
    return f"{time / 1e3:,.4g} µs"


def page(pictures: Sequence[str], text: str) -> str:
    """Returns pictures and a text as HTML."""
    return "".join(pictures) + f"<pre>{escape(text, quote=False)}</pre>"
