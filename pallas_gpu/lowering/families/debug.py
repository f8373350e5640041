# SPDX-License-Identifier: Apache-2.0
"""Printing from a kernel."""

from __future__ import annotations

from typing import Any

from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.rules import uniform
from pallas_gpu.mosaic.elements import printing
from pallas_gpu.primitives.debug import debug_print_p, pieces


@uniform(debug_print_p)
def _debug_print(ctx: RuleContext, *invals: Any) -> list[Any]:
    types_of = (vals.numpy_dtype(v.aval) for v in ctx.eqn.invars)
    values = [vals.scalar_value(x) for x in invals]
    texts = pieces(ctx.eqn.params["fmt"])
    printing.print_line(texts, list(zip(values, types_of, strict=True)))
    return []
