# SPDX-License-Identifier: Apache-2.0
"""Atomic operations: indices, mask and values have one layout, as in `indexed.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_gpu.emitters import atomics
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.families.indexed import placed_access, related_access
from pallas_gpu.lowering.inference.collect import Node
from pallas_gpu.lowering.rules import emits_and_relates
from pallas_gpu.primitives.atomics import PRIMITIVES


def _make(name: str) -> Callable[..., Any]:
    def rule(
        on: RuleContext | Node, *invals: Any, sem: Any, scope: Any, shape: Any
    ) -> Any:
        if isinstance(on, Node):
            variable, (aval,) = related_access(on, "ref", *values), on.op.results
            return on.scalar(aval) if variable is None else on.make(variable, aval)
        elements, given, placement = placed_access(on, invals, "ref", *values)
        with on.in_order():
            order, returns = atomics.Order(sem, scope), on.is_read
            needed = atomics.scratch_bytes(placement, elements.dtype) if returns else 0
            got = f"{elements.dtype}{list(shape)}"
            room = scratch.of_bytes(on.kernel, needed, "an atomic operation", got)
            return atomics.update(
                elements, placement, name, given, returns, room, order
            )

    values = ("compare", "value") if name == "atomic_cas" else ("value",)
    return rule


for _name, _primitive in PRIMITIVES.items():
    emits_and_relates(_primitive)(_make(_name))
