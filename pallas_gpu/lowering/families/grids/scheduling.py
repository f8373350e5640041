# SPDX-License-Identifier: Apache-2.0
"""Dynamic scheduling: claims of positions, and their way to the CTAs of a cluster."""

from __future__ import annotations

import math
from typing import Any

from pallas_gpu.emitters import elementwise
from pallas_gpu.emitters.grids import scheduling
from pallas_gpu.lowering import workspace
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.references import I32
from pallas_gpu.lowering.rules import emits
from pallas_gpu.memory.workspace import POSITIONS
from pallas_gpu.primitives.grids.scheduling import claim_p


@emits(claim_p)
def _claim(ctx: RuleContext, predicate: Any) -> list[Any]:
    params = ctx.kernel.params
    instances = math.prod(axis.size for axis in params.batch)
    launched = math.prod(ctx.builder.spec.grid) // math.prod(params.mesh.cluster)
    counter = ctx.builder.buffers[workspace.handle(ctx.kernel, POSITIONS).buffer_index]
    claimed = scheduling.claim(counter, launched // instances, ctx.argument(predicate))
    return [elementwise.scalar(claimed, I32)]
