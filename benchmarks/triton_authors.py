# SPDX-License-Identifier: Apache-2.0
"""The rivals of `benchmarks/author_kernels/` in Triton.

Triton compiles the source of a function, which therefore is in a module of its own.
`CANDIDATES` has, for each kernel, what a tuner would try.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _nearest(
    x, centroids, norms, o, k,
    D: tl.constexpr, POINTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * POINTS + tl.arange(0, POINTS)
    depth, column = tl.arange(0, D), tl.arange(0, BLOCK)
    mine = tl.load(x + row[:, None] * D + depth[None, :])
    best = tl.full((POINTS,), float("inf"), tl.float32)
    index = tl.zeros((POINTS,), tl.int32)
    for first in tl.range(0, k, BLOCK, num_stages=STAGES):
        part = tl.load(centroids + (first + column)[None, :] * D + depth[:, None])
        distance = tl.load(norms + first + column)[None, :] - 2 * tl.dot(mine, part)
        least, at = tl.min(distance, 1, return_indices=True)
        index = tl.where(least < best, at + first, index)
        best = tl.minimum(least, best)
    tl.store(o + row, index)


def _launch_nearest(config: Any, x: Any, centroids: Any, norms: Any) -> Any:
    points, block, stages, warps = config
    (n, d), k = x.shape, len(centroids)
    out = torch.empty(n, dtype=torch.int32, device="cuda")
    _nearest[(n // points,)](
        x, centroids, norms, out, k, d, points, block, stages, num_warps=warps
    )
    return out


@triton.jit
def _sink_attention(
    q, k, v, sinks, o, length, scale, GROUP: tl.constexpr, D: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0) * ROWS, tl.program_id(1).to(tl.int64)
    row, column = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    depth = tl.arange(0, D)
    at = (head * length + row)[:, None] * D + depth[None, :]
    mine = tl.load(q + at)
    own = (head // GROUP) * length
    acc = tl.zeros((ROWS, D), tl.float32)
    high = tl.zeros((ROWS,), tl.float32) + tl.load(sinks + head) * 1.44269504
    total = tl.full((ROWS,), 1.0, tl.float32)
    begin = tl.maximum(first - WINDOW + 1, 0) // COLUMNS * COLUMNS
    for start in tl.range(begin, first + ROWS, COLUMNS, num_stages=STAGES):
        key = start + column
        part = (own + key)[:, None] * D + depth[None, :]
        scores = tl.dot(mine, tl.trans(tl.load(k + part))) * (scale * 1.44269504)
        seen = (key[None, :] <= row[:, None]) & (key[None, :] > row[:, None] - WINDOW)
        scores = tl.where(seen, scores, -float("inf"))
        new = tl.maximum(high, tl.max(scores, 1))
        p, faded = tl.exp2(scores - new[:, None]), tl.exp2(high - new)
        values = tl.load(v + part)
        acc = tl.dot(p.to(values.dtype), values, acc * faded[:, None])
        high, total = new, total * faded + tl.sum(p, 1)
    tl.store(o + at, (acc / total[:, None]).to(o.dtype.element_ty))


def _launch_sink_attention(config: Any, q: Any, k: Any, v: Any, sinks: Any) -> Any:
    rows, columns, stages, warps = config
    heads, length, d = q.shape
    out = torch.empty_like(q)
    _sink_attention[(length // rows, heads)](
        q, k, v, sinks, out, length, d**-0.5, heads // len(k), d, 128, rows, columns,
        stages, num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit
def _block_sparse(
    x, blocks, table, o, m, k, n, stored, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, STRIP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns, number = n // BLOCK, tl.program_id(0)
    # Groups of rows of blocks, as in Triton's tutorial.
    group, rest = number // (STRIP * columns), number % (STRIP * columns)
    i, j = group * STRIP + rest % STRIP, rest // STRIP
    row, column = i * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    depth = tl.arange(0, DEPTH)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    parts: tl.constexpr = BLOCK // DEPTH
    for s in tl.range(0, stored * parts, num_stages=STAGES):
        first = tl.load(table + j * stored + s // parts) * BLOCK + s % parts * DEPTH
        a = tl.load(x + row[:, None].to(tl.int64) * k + (first + depth)[None, :])
        at = (j * stored * BLOCK + s * DEPTH + depth)[:, None] * BLOCK
        acc = tl.dot(a, tl.load(blocks + at + column[None, :]), acc)
    at = row[:, None].to(tl.int64) * n + (j * BLOCK + column)[None, :]
    tl.store(o + at, acc.to(o.dtype.element_ty))


def _launch_block_sparse(config: Any, x: Any, blocks: Any, table: Any) -> Any:
    rows, depth, strip, stages, warps = config
    (m, k), (columns, stored), block = x.shape, table.shape, blocks.shape[1]
    out = torch.empty(m, columns * block, dtype=x.dtype, device="cuda")
    _block_sparse[(m // rows * columns,)](
        x, blocks, table, out, m, k, columns * block, stored, rows, block, depth, strip,
        stages, num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit
def _hadamard(
    x, h, o, N: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    matrix = tl.load(h + i * N + j)
    for s in tl.range(0, STEPS, num_stages=STAGES):
        at = (tl.program_id(0).to(tl.int64) * STEPS + s) * N * N + i * N + j
        right = tl.dot(tl.load(x + at), matrix)
        both = tl.dot(matrix, right.to(matrix.dtype))
        tl.store(o + at, both.to(o.dtype.element_ty))


def _launch_hadamard(config: Any, x: Any, h: Any) -> Any:
    steps, stages, warps = config
    out = torch.empty_like(x)
    grid = (len(x) // steps,)
    _hadamard[grid](x, h, out, 64, steps, stages, num_warps=warps)
    return out


@triton.jit
def _swiglu_fp8(x, o, scales, n, WIDTH: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = column < n
    gate = tl.load(x + row * 2 * n + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(x + row * 2 * n + n + column, mask=inside, other=0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    scale = tl.maximum(tl.max(tl.abs(y), 0), 1e-10) / 448.0
    tl.store(o + row * n + column, (y * (1 / scale)).to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, scale)


def _launch_swiglu_fp8(config: Any, x: Any) -> Any:
    rows, n = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, n, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.empty(rows, dtype=torch.float32, device="cuda")
    width = triton.next_power_of_2(n)
    _swiglu_fp8[(rows,)](x, out, scales, n, width, num_warps=config[0])
    return out, scales


@triton.jit
def _causal_conv(
    x, weights, bias, o, time, channels, STEPS: tl.constexpr, WIDTH: tl.constexpr
):
    """One block of steps, loaded at four shifts."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    step = tl.program_id(1) * STEPS + tl.arange(0, STEPS)[:, None]
    own = tl.program_id(2).to(tl.int64) * time
    y = tl.zeros((STEPS, WIDTH), tl.float32) + tl.load(bias + column)
    for k in tl.static_range(4):
        at = step + k - 3
        part = tl.load(x + (own + at) * channels + column, mask=at >= 0, other=0)
        y += tl.load(weights + k * channels + column) * part.to(tl.float32)
    y = y * tl.sigmoid(y)
    tl.store(o + (own + step) * channels + column, y.to(o.dtype.element_ty))


@triton.jit
def _causal_conv_loop(
    x, weights, bias, o, time, channels, STEPS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One step after another, with the three before it in registers."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    first, own = tl.program_id(1) * STEPS, tl.program_id(2).to(tl.int64) * time
    w0, w1 = tl.load(weights + column), tl.load(weights + channels + column)
    w2 = tl.load(weights + 2 * channels + column)
    w3 = tl.load(weights + 3 * channels + column)
    added = tl.load(bias + column)
    before = x + (own + first) * channels + column
    has = first > 0
    a = tl.load(before - 3 * channels, mask=has, other=0).to(tl.float32)
    b = tl.load(before - 2 * channels, mask=has, other=0).to(tl.float32)
    c = tl.load(before - channels, mask=has, other=0).to(tl.float32)
    for t in tl.range(0, STEPS, num_stages=STAGES):
        at = (own + first + t) * channels + column
        d = tl.load(x + at).to(tl.float32)
        y = added + w0 * a + w1 * b + w2 * c + w3 * d
        tl.store(o + at, (y * tl.sigmoid(y)).to(o.dtype.element_ty))
        a, b, c = b, c, d


def _launch_causal_conv(config: Any, x: Any, weights: Any, bias: Any) -> Any:
    steps, width, stages, warps = config
    sequences, time, channels = x.shape
    out = torch.empty_like(x)
    kernel = _causal_conv_loop if stages else _causal_conv
    options = (stages,) if stages else ()
    kernel[(channels // width, time // steps, sequences)](
        x, weights, bias, out, time, channels, steps, width, *options, num_warps=warps
    )
    return out


@triton.jit
def _moe_combine(
    y, positions, weights, o, hidden, CHOSEN: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for k in tl.range(0, CHOSEN, num_stages=STAGES):
        at = tl.load(positions + row * CHOSEN + k).to(tl.int64)
        part = tl.load(y + at[:, None] * hidden + column).to(tl.float32)
        acc += tl.load(weights + row * CHOSEN + k)[:, None] * part
    at = row[:, None].to(tl.int64) * hidden + column
    tl.store(o + at, acc.to(o.dtype.element_ty))


def _launch_moe_combine(config: Any, y: Any, positions: Any, weights: Any) -> Any:
    rows, width, stages, warps = config
    (tokens, chosen), hidden = positions.shape, y.shape[1]
    out = torch.empty(tokens, hidden, dtype=y.dtype, device="cuda")
    _moe_combine[(tokens // rows, hidden // width)](
        y, positions, weights, out, hidden, chosen, rows, width, stages, num_warps=warps
    )
    return out


@triton.jit
def _moe_slots_each(experts, counts, o, BLOCK: tl.constexpr):
    """An atomic operation for each choice."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one = tl.full((BLOCK,), 1, tl.int32)
    tl.store(o + at, tl.atomic_add(counts + tl.load(experts + at), one, sem="relaxed"))


@triton.jit
def _moe_slots(
    experts, counts, o, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr
):
    """An atomic operation for each expert of a block; numbers by running sums."""
    first = tl.program_id(0) * BLOCK
    every = tl.arange(0, EXPERTS)
    own = tl.histogram(tl.load(experts + first + tl.arange(0, BLOCK)), EXPERTS)
    start = tl.atomic_add(counts + every, own, sem="relaxed")
    for part in range(0, BLOCK, PART):
        at = first + part + tl.arange(0, PART)
        is_own = (tl.load(experts + at)[:, None] == every[None, :]).to(tl.int32)
        number = tl.cumsum(is_own, 0) - 1 + start[None, :]
        tl.store(o + at, tl.sum(number * is_own, 1))
        start += tl.sum(is_own, 0)


@triton.jit
def _moe_slots_pairs(
    experts, counts, o, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr
):
    """As before; numbers by comparing each choice with all of its part."""
    first = tl.program_id(0) * BLOCK
    every, own = tl.arange(0, EXPERTS), tl.arange(0, PART)
    total = tl.histogram(tl.load(experts + first + tl.arange(0, BLOCK)), EXPERTS)
    start = tl.atomic_add(counts + every, total, sem="relaxed")
    for part in range(0, BLOCK, PART):
        expert = tl.load(experts + first + part + own)
        again = tl.load(experts + first + part + own)
        is_before = (expert[:, None] == again[None, :]) & (own[:, None] > own[None, :])
        number = tl.gather(start, expert, 0) + tl.sum(is_before.to(tl.int32), 1)
        tl.store(o + first + part + own, number)
        start += tl.histogram(expert, EXPERTS)


def _launch_moe_slots(config: Any, experts: Any, counts: Any) -> Any:
    way, block, part, warps = config
    out = torch.empty_like(experts)
    grid = (experts.numel() // block,)
    kernel = {"sums": _moe_slots, "pairs": _moe_slots_pairs}.get(way)
    if kernel is not None:
        kernel[grid](experts, counts, out, 256, block, part, num_warps=warps)
    else:
        _moe_slots_each[grid](experts, counts, out, block, num_warps=warps)
    return out, counts


CANDIDATES: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    # Points, centroids, stages, warps.
    "kmeans": (_launch_nearest, [
        (128, 128, 2, 8), (128, 128, 3, 8), (128, 256, 2, 8), (64, 128, 3, 4),
        (64, 256, 2, 4), (128, 64, 3, 4),
    ]),
    # Queries, keys, stages, warps.
    "sink_attention": (_launch_sink_attention, [
        (64, 64, 2, 4), (64, 64, 3, 4), (128, 64, 2, 4), (128, 64, 2, 8),
        (128, 64, 3, 8), (128, 128, 2, 8), (128, 32, 3, 4), (64, 32, 3, 4),
    ]),
    # Rows, depth, rows of blocks in a group, stages, warps.
    "block_sparse": (_launch_block_sparse, [
        (128, 64, 8, 3, 8), (128, 64, 8, 4, 8), (128, 64, 8, 3, 4), (128, 64, 1, 4, 8),
        (256, 64, 8, 3, 8), (256, 64, 4, 4, 8), (128, 32, 8, 4, 4), (64, 64, 8, 4, 4),
    ]),
    # Rows of a block, stages, warps.
    "hadamard": (_launch_hadamard, [
        (1, 1, 4), (4, 2, 4), (8, 2, 4), (8, 3, 4), (16, 3, 4), (1, 1, 2),
    ]),
    # Warps.
    "swiglu_fp8": (_launch_swiglu_fp8, [(2,), (4,), (8,), (16,)]),
    # Steps, channels, stages (0: at four shifts), warps.
    "causal_conv": (_launch_causal_conv, [
        (16, 256, 0, 4), (32, 256, 0, 4), (16, 512, 0, 4), (32, 128, 0, 4),
        (32, 512, 1, 4), (64, 256, 4, 2), (64, 512, 4, 4), (128, 256, 4, 1),
    ]),
    # Tokens, columns, stages, warps.
    "moe_combine": (_launch_moe_combine, [
        (1, 1024, 1, 4), (1, 2048, 1, 4), (1, 4096, 1, 8), (1, 1024, 4, 4),
        (4, 512, 3, 4), (4, 1024, 3, 8), (8, 512, 3, 4), (2, 1024, 4, 4),
    ]),
    # How numbers are found, choices, those of a part, warps.
    "moe_slots": (_launch_moe_slots, [
        ("atomics", 1024, 0, 4), ("sums", 512, 32, 4), ("sums", 1024, 32, 4),
        ("sums", 1024, 16, 4), ("pairs", 256, 128, 4), ("pairs", 512, 128, 4),
        ("pairs", 1024, 128, 4), ("pairs", 1024, 256, 8), ("pairs", 2048, 128, 4),
        ("pairs", 2048, 256, 8), ("pairs", 1024, 64, 4), ("pairs", 1024, 64, 2),
    ]),
}  # fmt: skip
