# SPDX-License-Identifier: Apache-2.0
"""Copies: DMAs and streams, of whole parts or of rows that indices name."""

from __future__ import annotations

from typing import Any

from pallas_gpu.sparsecore.emitters import memory
from pallas_gpu.sparsecore.lowering.state import emits, operands
from pallas_gpu.sparsecore.primitives import copies


@emits(copies.copy_start_p)
def _copy_start(ctx: Any, *invals: Any) -> list[Any]:
    given, params = operands(ctx, invals), ctx.op.params
    src, dst, semaphore = given["src"], given["dst"], given["semaphore"]
    if params["indexed"] is None:
        memory.start_copy(src, dst, semaphore, params["priority"])
        return []
    memory.start_indirect(
        src,
        dst,
        _indices(given["indices"]),
        semaphore,
        ignored=params["ignored_value"],
        add=params["add"],
    )
    return []


@emits(copies.copy_wait_p)
def _copy_wait(ctx: Any, *invals: Any) -> list[Any]:
    given = operands(ctx, invals)
    src, dst, semaphore = given["src"], given["dst"], given["semaphore"]
    if ctx.op.params["indexed"] is None:
        memory.wait_copy(src, dst, semaphore)
    else:
        memory.wait_indirect(src, dst, semaphore)
    return []


def _indices(given: Any) -> Any:
    """Returns the indices: a reference to them, or a register."""
    return memory.view(given) if isinstance(given, memory.Part) else given.value
