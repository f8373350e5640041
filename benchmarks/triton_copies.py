# SPDX-License-Identifier: Apache-2.0
"""The rivals of `benchmarks/copies.py` in Triton, at the sizes measured there.

Triton compiles the source of a function, which therefore is in a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _gather(x, indices, o, n, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    source = tl.load(indices + row).to(tl.int64)
    value = tl.load(x + source[:, None] * n + column[None, :])
    tl.store(o + row.to(tl.int64)[:, None] * n + column[None, :], value)


def gather(rows: int, warps: int) -> Callable[..., Any]:
    """Rows of an array, whose number of columns is a power of two."""

    def run(*arrays: Any) -> Any:
        x, indices = map(torch.from_dlpack, arrays)
        n, width = indices.numel(), x.shape[1]
        out = torch.empty((n, width), dtype=x.dtype, device=x.device)
        _gather[(n // rows,)](x, indices, out, width, rows, width, num_warps=warps)
        torch.cuda.synchronize()
        return out

    return run
