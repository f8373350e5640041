# SPDX-License-Identifier: Apache-2.0
"""Attention on Hopper: the configuration for a problem that comes without one."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_gpu import arch
from pallas_gpu.ops.flash.config import REGISTERS, AttentionConfig
from pallas_gpu.ops.flash.problem import Problem

# Registers of a consumer beside accumulators and operands: plain, with a bias, with
# ALiBi. With fewer, ptxas spills.
OTHER_REGISTERS, _OTHER_IF_BIASED, _OTHER_IF_ALIBI = 32, 60, 73
# SMEM for barriers.
_BARRIER_BYTES = 1024
_LARGEST_BLOCK, _BLOCK_MULTIPLE = 128, 16


def configured(p: Problem[Any]) -> AttentionConfig:
    """Returns the configuration for the problem, whose own is ignored."""
    plain = p.bias is None and not p.scores.alibi
    if plain and p.head_dim == p.v_dim:
        causal = p.mask.right is not None
        chosen = AttentionConfig.default(p.head_dim, causal=causal)
        static = not p.packed and not p.mask.ragged and not p.mask.segments
        return chosen if static else dataclasses.replace(chosen, blocks=None)
    other = OTHER_REGISTERS if plain else _OTHER_IF_BIASED
    if p.scores.alibi:
        other = _OTHER_IF_ALIBI
    _, available = REGISTERS[2]
    for block_kv in range(_LARGEST_BLOCK, 0, -_BLOCK_MULTIPLE):
        config = AttentionConfig(block_kv=block_kv)
        registers = config.accumulator_registers(p.v_dim) + other
        if (
            registers <= available
            and _bytes(p, config) <= arch.SM_90A.smem_bytes_per_block
        ):
            break
    return config


def _bytes(p: Problem[Any], c: AttentionConfig) -> int:
    """Returns the SMEM of a block."""
    rows = c.block_q * p.head_dim
    if p.v_dim != p.head_dim:
        rows += c.block_q * p.v_dim
    ring = c.block_kv * (p.head_dim + p.v_dim) * p.dtype.itemsize
    if p.bias is not None:
        of_rows = c.block_q if p.bias[2] > 1 else 1
        ring += of_rows * c.block_kv * p.bias_dtype.itemsize
    return rows * p.dtype.itemsize + c.stages * ring + _BARRIER_BYTES
