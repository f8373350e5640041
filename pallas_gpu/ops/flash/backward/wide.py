# SPDX-License-Identifier: Apache-2.0
"""Attention's derivatives, wide heads: one consumer has dV, and the other one dK.

Both have the same 64 rows of K and V. The first computes the probabilities and leaves
them in SMEM, where the second finds them and replaces them by dS. While the second does
that, the tensor core has dV of the first. Parts of dQ leave through the buffers of Q
and dO that a consumer is the last one to read.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.flash.backward.config import ROWS
from pallas_gpu.ops.flash.backward.consumers import Consumer
from pallas_gpu.ops.folded import plus

# Rows of K up to which factors in float16 are as exact as in bfloat16, or more so.
_MOST_ROWS = 2**16


class _Wide(Consumer):
    def shared(self, position) -> Any:
        """The buffer of a step's probabilities, and of its dS."""
        return self.mem.ds_smem.at[lax.rem(position, np.int32(2))]

    @property
    def shared_type(self) -> Any:
        """The type of shared factors, which are at most 1.

        float16 has more digits than bfloat16. It loses some of small numbers, which do
        not count where the largest are not small, too: their sum is 1.
        """
        return jnp.float16 if self.p.kv_len < _MOST_ROWS else self.p.dtype

    def as_shared(self, factors: Any) -> Any:
        return lax.bitcast_convert_type(factors.astype(self.shared_type), self.p.dtype)

    def from_shared(self, bits: Any) -> Any:
        values = lax.bitcast_convert_type(bits, self.shared_type)
        return values.astype(jnp.float32)

    def visit_dq(self, position, pieces, ring, head, tile, restart, last) -> None:
        """Adds its part of dQ in two pieces, and calls `restart` meanwhile.

        Args:
          pieces: room for two, in slots of the ring, which no product reads any more.
        """
        slots = pieces.at[ring.slot(position).index]

        def compute(dq, piece):
            self.start_dq(dq, self.shared(position), piece)
            if piece == 0 or last:
                return dq[...]
            restart()
            return plgpu.wgmma_accumulator_load(dq, wait_n=1)

        for piece in range(self.p.dq_pieces):
            of_piece = functools.partial(compute, piece=piece)
            part = plgpu.run_scoped(of_piece, plgpu.ACC(self.p.dq_part))
            self.add_to_dq(part, slots.at[piece], self.of_dq(head, tile), piece)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class WithV(_Wide):
    """The consumer that computes probabilities and has dV."""

    def run(self) -> None:
        p, mem = self.p, self.mem

        def over_tiles(dv, scores):
            plgpu.barrier_wait(mem.k_full)
            self.start_scores(scores, jnp.int32(0))
            self.for_each_tile(functools.partial(self.step, dv, scores))
            return dv[...]

        accumulators = plgpu.ACC((ROWS, p.v_dim)), self.scores_type
        dv = plgpu.run_scoped(over_tiles, *accumulators)
        # The other consumer's last product reads V.
        plgpu.barrier_arrive_and_wait(mem.together)
        self.store(dv, mem.v_smem, mem.dv)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def step(self, dv, scores, position, head, tile, masked, last=False) -> None:
        p, mem = self.p, self.mem
        found = self.factors(scores[...], position, head, tile, masked)
        wide, factors = found
        probabilities = wide.astype(p.dtype)
        buffer = self.shared(position)
        buffer[...] = self.as_shared(factors)
        plgpu.barrier_arrive(mem.p_full)
        mem.q_ring.release(position)
        do, _ = mem.do_ring.take(position).buffers
        plgpu.wgmma(dv, probabilities, do)

        def restart():
            if last:
                return
            self.restart(self.start_scores, scores, plus(position, 1))

        if p.config.deterministic:
            restart()
            plgpu.barrier_wait(mem.ds_full)
            plgpu.wgmma_wait(0 if last else 1)
        else:
            # The other consumer has read dO before.
            plgpu.barrier_wait(mem.ds_full)
            self.visit_dq(position, mem.do_dq, mem.do_ring, head, tile, restart, last)
        mem.do_ring.release(position)


class WithK(_Wide):
    """The consumer that computes dS and has dK."""

    def run(self) -> None:
        p, mem = self.p, self.mem

        def over_tiles(dk, dp):
            plgpu.barrier_wait(mem.k_full)
            plgpu.barrier_wait(mem.v_full)
            # The slots of Q that it uses have been waited for, too.
            mem.q_ring.take(0)
            self.start_dp(dp, jnp.int32(0))
            self.for_each_tile(functools.partial(self.step, dk, dp))
            return dk[...]

        accumulators = plgpu.ACC((ROWS, p.head_dim)), self.scores_type
        dk = plgpu.run_scoped(over_tiles, *accumulators)
        # The other consumer's last product reads K.
        plgpu.barrier_arrive_and_wait(mem.together)
        self.store(dk * p.scores.sm_scale, mem.k_smem, mem.dk)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def step(self, dk, dp, position, head, tile, masked, last=False) -> None:
        del masked
        p, mem = self.p, self.mem
        buffer = self.shared(position)
        values = dp[...]
        plgpu.barrier_wait(mem.p_full)
        factors = self.from_shared(plgpu.load(buffer, layout=plgpu.Layout.WGMMA))
        ds = self.derivatives(factors, values, position)
        buffer[...] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(mem.ds_full)
        mem.do_ring.release(position)
        plgpu.wgmma(dk, ds, mem.q_ring.slot(position).buffers[0])

        def restart():
            if last:
                return
            following = plus(position, 1)
            mem.q_ring.take(following)
            self.restart(self.start_dp, dp, following)

        if p.config.deterministic:
            restart()
            plgpu.wgmma_wait(0 if last else 1)
        else:
            self.visit_dq(position, mem.q_dq, mem.q_ring, head, tile, restart, last)
        mem.q_ring.release(position)
