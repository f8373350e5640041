# SPDX-License-Identifier: Apache-2.0
"""Copies: DMAs and streams, of whole parts or of rows that indices name."""

from __future__ import annotations

from typing import Any

from pallas_gpu.sparsecore.emitters import memory
from pallas_gpu.sparsecore.lowering.state import emits
from pallas_gpu.sparsecore.primitives import copies


@emits(copies.copy_start_p)
def _copy_start(
    ctx: Any, src, dst, indices, semaphore, *, priority, ignored_value, add
) -> None:
    memory.start_copy(
        src, dst, indices, semaphore, priority=priority, ignored=ignored_value, add=add
    )


@emits(copies.copy_wait_p)
def _copy_wait(ctx: Any, src: Any, dst: Any, semaphore: Any, *, indexed: Any) -> None:
    memory.wait_copy(src, dst, semaphore, of_rows=indexed is not None)
