# SPDX-License-Identifier: Apache-2.0
"""Copies: DMAs and streams, of whole parts or of rows that indices name."""

from __future__ import annotations

from typing import Any

from pallas_gpu.sparsecore.emitters import memory
from pallas_gpu.sparsecore.lowering.state import emits
from pallas_gpu.sparsecore.primitives import copies


@emits(copies.copy_start_p)
def _copy_start(
    ctx: Any, src, dst, indices, semaphore, *, indexed, priority, ignored_value, add
) -> None:
    if indexed is None:
        memory.start_copy(src, dst, semaphore, priority)
        return
    memory.start_indirect(
        src, dst, _indices(indices), semaphore, ignored=ignored_value, add=add
    )


@emits(copies.copy_wait_p)
def _copy_wait(ctx: Any, src: Any, dst: Any, semaphore: Any, *, indexed: Any) -> None:
    wait = memory.wait_copy if indexed is None else memory.wait_indirect
    wait(src, dst, semaphore)


def _indices(given: Any) -> Any:
    """Returns the indices: a reference to them, or a register."""
    return memory.view(given) if isinstance(given, memory.Part) else given.value
