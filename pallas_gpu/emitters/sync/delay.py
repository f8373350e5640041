# SPDX-License-Identifier: Apache-2.0
"""Delays."""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm


def delay(nanos: ir.Value) -> None:
    """Suspends the thread for up to twice the given i32, 1,000,000 at most.

    PTX: `nanosleep.u32`. Since: sm_70.
    """
    llvm.inline_asm(None, [nanos], "nanosleep.u32 $0;", "r", has_side_effects=True)
