# SPDX-License-Identifier: Apache-2.0
"""Positions on the grid, cluster and thread axes."""

from __future__ import annotations

from typing import Any

from pallas_gpu import errors
from pallas_gpu.emitters import elementwise
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.references import I32
from pallas_gpu.lowering.rules import emits


@emits("axis_index")
def _axis_index(ctx: RuleContext, *, axis_name: Any) -> Any:
    index = ctx.kernel.axes.get(axis_name)
    if index is None:
        raise errors.AxisNameError(
            f"axis_index: no axis is named {axis_name!r}",
            expected=f"one of {[n for n, _ in ctx.kernel.params.mesh.axes]}",
            got=repr(axis_name),
        )
    return elementwise.scalar(index, I32)
