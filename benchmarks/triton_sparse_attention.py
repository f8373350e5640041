# SPDX-License-Identifier: Apache-2.0
"""The rival of `benchmarks/sparse_attention.py` in Triton.

Triton compiles the source of a function, which therefore is in a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _attention(
    q, k, v, table, o, queries, keys, blocks, scale,
    BLOCK: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, column = tl.arange(0, BLOCK), tl.arange(0, D)
    at = (head * queries + i * BLOCK + row)[:, None] * D + column[None, :]
    mine = tl.load(q + at)
    named = table + (head * tl.num_programs(0) + i) * blocks
    acc = tl.zeros((BLOCK, D), tl.float32)
    high = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.range(0, blocks, num_stages=STAGES):
        first = head * keys + tl.load(named + j) * BLOCK
        part = (first + row)[:, None] * D + column[None, :]
        scores = tl.dot(mine, tl.trans(tl.load(k + part))) * scale
        new = tl.maximum(high, tl.max(scores, 1))
        p, faded = tl.exp(scores - new[:, None]), tl.exp(high - new)
        values = tl.load(v + part)
        acc = tl.dot(p.to(values.dtype), values, acc * faded[:, None])
        high, total = new, total * faded + tl.sum(p, 1)
    tl.store(o + at, (acc / total[:, None]).to(o.dtype.element_ty))


def sparse_attention(block: int, stages: int) -> Callable[..., Any]:
    """Attention over the blocks of a table, with so many stages."""

    def run(*arrays: Any) -> Any:
        q, k, v, table = map(torch.from_dlpack, arrays)
        heads, queries, d = q.shape
        out = torch.empty_like(q)
        _attention[(queries // block, heads)](
            q, k, v, table, out, queries, k.shape[1], table.shape[2], d**-0.5,
            block, d, stages, num_warps=4,
        )  # fmt: skip
        torch.cuda.synchronize()
        return out

    return run
