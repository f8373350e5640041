# SPDX-License-Identifier: Apache-2.0
"""Rows that an array of indices names: copies in flight, as those of TMA."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.poison import Poisoned
from pallas_gpu.emulator.gpu import tma
from pallas_gpu.emulator.gpu.cp_async import Load, LoadStream
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.emulator.gpu.mbarrier import skipped
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import rows as primitives

_EMULATE = registry.RuleKind.EMULATE


def _row(region: Region, index: int) -> Region:
    window = region.window
    rest = window.shape[1:]
    part = window.slice([index, *[0] * len(rest)], [None, *rest])
    return Region(region.memory, part)


def _indices(gmem: Region, rows: Any, verb: str) -> list[int]:
    """Returns the indices of rows of an array.

    An index without a value or without a row is reported.
    """
    if isinstance(rows, Poisoned):
        report(rows.origin.error())
        rows = rows.value
    found = np.asarray(rows)
    count = gmem.shape[0]
    outside = np.flatnonzero((found < 0) | (found >= count))
    if outside.size:
        first = int(outside[0])
        error = errors.OutOfBoundsError(
            f"a row of {gmem.memory.name} is {verb} out of bounds",
            expected=f"indices 0 to {count - 1}",
            got=f"index {found[first]} at position {first} of {len(found)}",
            hint="check the indices; clamp those of rows that are not used",
        )
        report(error.about(buffer=gmem.memory.name))
    return [int(i) for i in np.clip(found, 0, count - 1)]


# --- gather ---------------------------------------------------------------------------


@registry.register(primitives.gather_rows_p, _EMULATE)
def _gather(wg: Warpgroup, operands: dict[str, Any], **params: Any) -> None:
    begun = LoadStream.begin(wg, operands)
    if begun is None:
        return
    stream, barrier = begun
    src, dst = operands["src"], operands["dst"]
    dst.require_in_bounds("the destination of a copy")
    src.require_in_bounds("copied")
    indices = _indices(src, operands["rows"], "copied")
    group, (by, hint) = stream.open_group, stream.tracked(barrier)
    to_smem = f"the copy from {src.memory.name}"
    wg.access(dst, writes=True, what=to_smem, by=by, hint=hint)
    parts = [(_row(src, n), _row(dst, i)) for i, n in enumerate(indices)]
    for row, _ in parts:
        what = f"the copy to {dst.memory.name}"
        wg.access(row, writes=False, what=what, by=by, hint=hint)
    stream.start(wg, barrier, sum(tma.size_bytes(part) for _, part in parts))
    wg.group.in_flight.submit(Load(parts, barrier, stream, group, None, wg.location))


# --- scatter --------------------------------------------------------------------------


@registry.register(primitives.scatter_rows_p, _EMULATE)
def _scatter(
    wg: Warpgroup, operands: dict[str, Any], commit_group: bool, **_: Any
) -> None:
    if not skipped(operands):
        src, dst = operands["src"], operands["dst"]
        src.require_in_bounds("the source of a copy")
        dst.require_in_bounds("written by a copy")
        indices = _indices(dst, operands["rows"], "written by a copy")
        _require_different(dst, indices)
        stream = tma.StoreStream.by_all(wg)
        for i, row in enumerate(indices):
            tma.start_store(wg, stream, _row(src, i), _row(dst, row))
    if commit_group:
        tma.commit(wg)


def _require_different(dst: Region, indices: list[int]) -> None:
    seen: dict[int, int] = {}
    for i, row in enumerate(indices):
        if row in seen:
            error = errors.RaceError(
                f"two rows of a copy go to one row of {dst.memory.name}",
                expected="different indices: copies have no order among each other",
                got=f"index {row} at positions {seen[row]} and {i}",
                hint="combine these rows first, or use reduction_op with one copy each",
            )
            report(error.about(rule="repeated-index", buffer=dst.memory.name))
        seen[row] = i
