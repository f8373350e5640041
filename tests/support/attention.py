# SPDX-License-Identifier: Apache-2.0
"""Attention from the whole matrix of scores, in float64, and its derivatives.

NumPy's: JAX would compile each of the operations.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Attention:
    """A result, and what its derivatives are made of.

    Attributes:
      q, k, v: the operands, with as many heads each.
      p: the share of each column: (batch, heads, rows, columns).
      slope: the derivatives of the scores, before biases, by the products of q and k.
      kv_heads: heads of the operands k and v.
      bias_shape: that of the bias.
      packed: whether the operands have no batch.
      logsumexp: of each row's scores: -inf where it sees nothing.
    """

    q: Any
    k: Any
    v: Any
    p: Any
    slope: Any
    kv_heads: int
    bias_shape: tuple[int, ...] | None
    packed: bool
    logsumexp: Any

    @property
    def out(self) -> Any:
        """The result: zeros for rows that see nothing."""
        out = np.einsum("bhqk,bkhd->bqhd", self.p, self.v)
        return out[0] if self.packed else out

    @property
    def both(self) -> tuple[Any, Any]:
        """The result and logsumexp."""
        return self.out, self.logsumexp[0] if self.packed else self.logsumexp

    def derivatives(self, do: Any, dlse: Any = 0.0) -> list[Any]:
        """Returns those of q, k, v, and of a bias, for cotangents of the results."""
        do, dlse = (np.asarray(x, np.float64) for x in (do, dlse))
        do = do[None] if self.packed else do
        dp = np.einsum("bqhd,bkhd->bhqk", do, self.v)
        ds = self.p * (dp - ((self.p * dp).sum(axis=3) - dlse)[..., None])
        dqk = ds * self.slope
        dq = np.einsum("bhqk,bkhd->bqhd", dqk, self.k)
        of_kv = (
            np.einsum("bhqk,bqhd->bkhd", dqk, self.q),
            np.einsum("bhqk,bqhd->bkhd", self.p, do),
        )
        dk, dv = (
            x.reshape(*x.shape[:2], self.kv_heads, -1, x.shape[3]).sum(axis=3)
            for x in of_kv
        )
        found = [dq, dk, dv]
        if self.bias_shape is not None:
            ones = tuple(i for i, n in enumerate(self.bias_shape) if n == 1)
            found.append(ds.sum(axis=ones, keepdims=True))
        return [x[0] for x in found] if self.packed else found


def _sequences(starts: Any, size: int) -> tuple[Any, Any, Any]:
    """Each token's sequence, its position there, and the sequences' lengths."""
    starts = np.asarray(starts)
    token = np.arange(size)
    which = np.searchsorted(starts, token, side="right") - 1
    return which, token - starts[which], np.diff(starts)


def _places(batch: int, rows: int, columns: int, options: dict[str, Any]) -> Any:
    """Which columns exist for a row, how far they are, and the row's sequence.

    Distances are to the start, and what aligns the sequences' ends comes with them.
    """
    if "cu_seqlens_q" in options:
        which, row, m = _sequences(options["cu_seqlens_q"], rows)
        of_kv, column, n = _sequences(options["cu_seqlens_kv"], columns)
        exists = (which[:, None] == of_kv[None, :])[None]
        return exists, (column - row[:, None])[None], (n - m)[which][None, :, None]
    row, column = np.arange(rows)[:, None], np.arange(columns)
    m, n = (
        np.asarray(options.get(name, np.full(batch, size)))[:, None, None]
        for name, size in (("q_lengths", rows), ("kv_lengths", columns))
    )
    return (row < m) & (column < n), (column - row)[None], n - m


def reference(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    align: str = "start",
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    **lengths: Any,
) -> Attention:
    """Returns attention of options that are called as those of `ops.attention`."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    packed = q.ndim == 3
    q, k, v = (x[None] if packed else x for x in (q, k, v))
    kv_heads, scale = k.shape[2], sm_scale or q.shape[3] ** -0.5
    k, v = (np.repeat(x, q.shape[2] // kv_heads, axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    slope = np.full(scores.shape, scale)
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
        slope *= 1 - (scores / soft_cap) ** 2
    seen, away, shift = _places(q.shape[0], q.shape[1], k.shape[1], lengths)
    away = away - (shift if align == "end" else 0)
    left, right = window if isinstance(window, tuple) else (window, window)
    seen = seen & (left is None or away >= -left) & (right is None or away <= right)
    seen = (seen & (away <= 0) if causal else seen)[:, None]
    if q_segment_ids is not None:
        ids = np.asarray(q_segment_ids), np.asarray(kv_segment_ids)
        seen = seen & (ids[0][:, :, None] == ids[1][:, None, :])[:, None]
    if alibi_slopes is not None:
        slopes = np.asarray(alibi_slopes, np.float64)
        if slopes.ndim == 2:
            which, *_ = _sequences(lengths["cu_seqlens_q"], q.shape[1])
            scores -= slopes[which].T[:, :, None] * np.abs(away)[:, None]
        else:
            scores -= slopes[:, None, None] * np.abs(away)[:, None]
    if bias is not None:
        bias = np.asarray(bias, np.float64)
        seen = seen & (bias > -np.inf)
        scores = scores + np.where(bias > -np.inf, bias, 0)
    scores = np.where(seen, scores, -np.inf)
    with np.errstate(divide="ignore"):
        top = np.maximum(scores.max(axis=3, keepdims=True), -1e300)
        p = np.exp(scores - top)
        total = p.sum(axis=3, keepdims=True)
        logsumexp = (top + np.log(total))[..., 0]
    shape = None if bias is None else bias.shape
    p /= np.where(total == 0, 1, total)
    return Attention(q, k, v, p, slope, kv_heads, shape, packed, logsumexp)
