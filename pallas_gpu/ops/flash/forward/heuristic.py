# SPDX-License-Identifier: Apache-2.0
"""Attention on Hopper: the configuration for a problem that comes without one."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_gpu import arch, errors
from pallas_gpu.ops.flash import narrow
from pallas_gpu.ops.flash.config import REGISTERS, AttentionConfig
from pallas_gpu.ops.flash.problem import Problem

# Registers of a consumer beside accumulators and operands: plain, with a bias, with
# ALiBi. With fewer, ptxas spills.
_OTHER_REGISTERS, _OTHER_IF_BIASED, _OTHER_IF_ALIBI = 32, 60, 73
# SMEM for barriers.
_BARRIER_BYTES = 1024
# The largest block of K and V, and what blocks are multiples of; those of float8 are
# from a run on an H200.
_BLOCKS, _NARROW_BLOCKS = (128, 16), (192, narrow.DEPTH)
# Wider heads leave no SMEM for a second tile of Q.
_LARGEST_PERSISTENT = 128


def configured(p: Problem[Any]) -> AttentionConfig:
    plain = p.bias is None and not p.scores.alibi
    if plain and p.head_dim == p.v_dim and not p.narrow:
        causal = p.mask.right is not None
        kv_len = p.kv_len if p.known and p.mask.left is None else None
        chosen = AttentionConfig.default(p.head_dim, causal=causal, kv_len=kv_len)
        return chosen if p.known else dataclasses.replace(chosen, blocks=None)
    other = _OTHER_REGISTERS if plain else _OTHER_IF_BIASED
    if p.scores.alibi:
        other = _OTHER_IF_ALIBI
    _, available = REGISTERS[2]
    largest, multiple = _NARROW_BLOCKS if p.narrow else _BLOCKS
    for block_kv in range(largest, 0, -multiple):
        config = AttentionConfig(block_kv=block_kv)
        registers = config.accumulator_registers(p.v_dim, p.dtype.itemsize) + other
        if (
            registers <= available
            and _bytes(p, config) <= arch.SM_90A.smem_bytes_per_block
        ):
            break
    if p.narrow and plain and p.known and p.v_dim <= _LARGEST_PERSISTENT:
        return dataclasses.replace(config, blocks=arch.SM_90A.sm_count)
    return config


def _bytes(p: Problem[Any], c: AttentionConfig) -> int:
    rows = c.block_q * p.head_dim * p.dtype.itemsize
    if p.v_dim != p.head_dim or p.narrow:
        rows += c.block_q * p.v_dim * p.out_dtype.itemsize
    ring = c.block_kv * (p.head_dim + p.v_dim) * p.dtype.itemsize
    if p.bias is not None:
        of_rows = c.block_q if p.bias[2] > 1 else 1
        ring += of_rows * c.block_kv * p.bias_dtype.itemsize
    return rows + c.stages * ring + _BARRIER_BYTES


def check_registers(p: Problem[AttentionConfig]) -> None:
    c = p.config
    needed = c.accumulator_registers(p.v_dim, p.dtype.itemsize) + _OTHER_REGISTERS
    _, available = REGISTERS[c.consumers]
    if needed > available:
        raise errors.ArgumentError(
            "attention: the tiles do not fit in a consumer's registers",
            expected=f"at most {available} registers a thread with "
            f"{c.consumers} consumers",
            got=f"about {needed} for rows={c.rows}, block_kv={c.block_kv}, "
            f"head_dim={p.v_dim}",
            hint="choose a smaller block_kv, or two consumers",
        )
