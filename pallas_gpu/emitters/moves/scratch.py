# SPDX-License-Identifier: Apache-2.0
"""SMEM scratch of the operations that exchange data between warps."""

from __future__ import annotations

import dataclasses

from jaxlib.mlir import ir

from pallas_gpu import errors
from pallas_gpu.emitters import module


@dataclasses.dataclass(frozen=True)
class SmemScratch:
    """SMEM reserved for one warpgroup, or one warp, during one operation.

    Attributes:
      pointer: `!llvm.ptr<3>`, 16-byte aligned.
      size_bytes: its size, a multiple of 16.
    """

    pointer: ir.Value
    size_bytes: int


def require(
    scratch: SmemScratch | None, needed_bytes: int, operation: str
) -> SmemScratch:
    """Returns the scratch if it has enough bytes.

    Args:
      scratch: None if the kernel reserves none.
      needed_bytes: what the operation needs, for one warpgroup or one warp.
      operation: what needs it, for the message.
    """
    available = 0 if scratch is None else scratch.size_bytes
    if scratch is None or available < needed_bytes:
        kernel = module.current()
        shares = module.WARPGROUP_THREADS // kernel.issuer_threads
        needed_bytes, available = needed_bytes * shares, available * shares
        raise errors.OutOfResources(
            f"{operation} needs more scratch in SMEM",
            resource="SMEM",
            limit_bytes=available,
            used_bytes=needed_bytes,
            expected=f"at least {needed_bytes} bytes for each warpgroup",
            got=f"{available} bytes",
            hint=f"pass CompilerParams(reduction_scratch_bytes={needed_bytes})",
        )
    return scratch
