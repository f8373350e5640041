# SPDX-License-Identifier: Apache-2.0
"""The check pass over a traced kernel: what is refused before it runs or compiles."""

from __future__ import annotations

from typing import Any

from pallas_gpu import errors
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.program.nodes import Fault
from pallas_gpu.program.walk import walk
from pallas_gpu.sparsecore.types import MACHINE


def check(jaxpr: Any, mesh: Any, params: Any, name: str, num_inputs: int) -> None:
    """Checks every operation of a body, and raises what is wrong with the first."""
    for site in walk(jaxpr):
        op = site.op
        try:
            if isinstance(op.operands, Fault):
                raise op.operands.error
            own = registry.check_of(op.primitive, MACHINE)
            if own is not None:
                own(op, mesh, params)
        except errors.PallasGpuError as error:
            raise error.with_location(site.where) from None
