# SPDX-License-Identifier: Apache-2.0
"""The kernels of `benchmarks/registers.py` in Triton, at the sizes measured there.

Triton compiles the source of a function, which therefore is in a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _add_one(x, o, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o + at, tl.load(x + at) + 1)


@triton.jit
def _softmax(x, o, n, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    at = tl.program_id(0).to(tl.int64) * n + column
    value = tl.load(x + at, mask=column < n, other=-float("inf")).to(tl.float32)
    value = tl.exp(value - tl.max(value, 0))
    value = value / tl.sum(value, 0)
    tl.store(o + at, value.to(o.dtype.element_ty), mask=column < n)


@triton.jit
def _norm(x, scale, o, n, WIDTH: tl.constexpr, CENTRED: tl.constexpr):
    column = tl.arange(0, WIDTH)
    at = tl.program_id(0).to(tl.int64) * n + column
    value = tl.load(x + at).to(tl.float32)
    if CENTRED:
        value -= tl.sum(value, 0) / n
    value *= tl.rsqrt(tl.sum(value * value, 0) / n + 1e-5)
    value *= tl.load(scale + column).to(tl.float32)
    tl.store(o + at, value.to(o.dtype.element_ty))


@triton.jit
def _cross_entropy(x, labels, o, n, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top, total = -float("inf"), 0.0
    for start in range(0, n, WIDTH):
        column = start + tl.arange(0, WIDTH)
        value = tl.load(x + row * n + column, mask=column < n, other=-float("inf"))
        value = value.to(tl.float32)
        new_top = tl.maximum(top, tl.max(value, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(value - new_top), 0)
        top = new_top
    picked = tl.load(x + row * n + tl.load(labels + row)).to(tl.float32)
    tl.store(o + row, top + tl.log(total) - picked)


@triton.jit
def _cross_entropy_in_parts(x, labels, o, n, DEPTH: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tops = tl.full([PARTS], -3.4028234663852886e38, tl.float32)
    totals = tl.zeros([PARTS], tl.float32)
    at = tl.arange(0, DEPTH)[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    for start in range(0, n, DEPTH * PARTS):
        column = start + at
        value = tl.load(x + row * n + column, mask=column < n, other=-float("inf"))
        value = value.to(tl.float32)
        new_tops = tl.maximum(tops, tl.max(value, 0))
        terms = tl.sum(tl.exp(value - new_tops[None, :]), 0)
        totals = totals * tl.exp(tops - new_tops) + terms
        tops = new_tops
    top = tl.max(tops, 0)
    total = tl.sum(totals * tl.exp(tops - top), 0)
    picked = tl.load(x + row * n + tl.load(labels + row)).to(tl.float32)
    tl.store(o + row, top + tl.log(total) - picked)


@triton.jit
def _sums(x, o, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o + block, tl.sum(tl.load(x + at), 0))


@triton.jit
def _scan(x, before, o, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o + at, tl.cumsum(tl.load(x + at), 0) + tl.load(before + block))


def _launcher(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of JAX arrays that launches a kernel and waits for it."""

    def run(*arrays: Any) -> Any:
        result = launch(*map(torch.from_dlpack, arrays))
        torch.cuda.synchronize()
        return result

    return run


def add_one(block: int, warps: int) -> Callable[..., Any]:
    """x + 1; the blocks divide x."""

    def launch(x):
        out = torch.empty_like(x)
        _add_one[(x.numel() // block,)](x, out, block, num_warps=warps)
        return out

    return _launcher(launch)


def softmax(warps: int) -> Callable[..., Any]:
    """Softmax of rows."""

    def launch(x):
        out, (rows, n) = torch.empty_like(x), x.shape
        width = triton.next_power_of_2(n)
        _softmax[(rows,)](x, out, n, width, num_warps=warps)
        return out

    return _launcher(launch)


def norm(centred: bool, warps: int) -> Callable[..., Any]:
    """Layer norm or RMS norm of rows of a power of two of columns, with a scale."""

    def launch(x, scale):
        out, (rows, n) = torch.empty_like(x), x.shape
        _norm[(rows,)](x, scale, out, n, n, centred, num_warps=warps)
        return out

    return _launcher(launch)


def cross_entropy(width: int, warps: int) -> Callable[..., Any]:
    """Cross-entropy of rows of logits."""

    def launch(x, labels):
        rows, n = x.shape
        out = torch.empty(rows, dtype=torch.float32, device=x.device)
        _cross_entropy[(rows,)](x, labels, out, n, width, num_warps=warps)
        return out

    return _launcher(launch)


def cross_entropy_in_parts(depth: int, parts: int, warps: int) -> Callable[..., Any]:
    """Cross-entropy of rows of logits, the parts of which are combined at the end."""

    def launch(x, labels):
        rows, n = x.shape
        out = torch.empty(rows, dtype=torch.float32, device=x.device)
        _cross_entropy_in_parts[(rows,)](
            x, labels, out, n, depth, parts, num_warps=warps
        )
        return out

    return _launcher(launch)


def cumsum(block: int, warps: int) -> Callable[..., Any]:
    """Cumulative sum, as in `examples/cumsum.py`: sums of blocks, then each block."""

    def prefix(x):
        blocks = x.numel() // block
        if blocks <= 1:
            return torch.cumsum(x, 0)
        sums = torch.empty(blocks, dtype=x.dtype, device=x.device)
        _sums[(blocks,)](x, sums, block, num_warps=warps)
        before = prefix(sums) - sums
        out = torch.empty_like(x)
        _scan[(blocks,)](x, before, out, block, num_warps=warps)
        return out

    return _launcher(prefix)
