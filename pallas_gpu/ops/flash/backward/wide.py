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
from pallas_gpu.ops import integers
from pallas_gpu.ops.flash.backward.config import ROWS
from pallas_gpu.ops.flash.backward.consumers import Consumer


class _Wide(Consumer):
    """What both have in common."""

    def shared(self, position) -> Any:
        """The buffer of a step's probabilities, and of its dS."""
        return self.mem.ds_smem.at[lax.rem(position, np.int32(2))]

    def visit_dq(self, ds, slots, head, tile, restart, last) -> None:
        """Adds its part of dQ in two pieces, and calls `restart` meanwhile.

        Args:
          ds: the buffer of a step's dS.
          slots: room for two pieces, which no product reads any more.
        """

        def compute(dq, piece):
            self.start_dq(dq, ds, piece)
            if piece == 0 or last:
                return dq[...]
            restart()
            return plgpu.wgmma_accumulator_load(dq, wait_n=1)

        for piece in range(self.p.dq_pieces):
            of_piece = functools.partial(compute, piece=piece)
            part = plgpu.run_scoped(of_piece, plgpu.ACC(self.p.dq_part))
            self.add_to_dq(part, slots.at[piece], head, tile, piece)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class WithV(_Wide):
    """The consumer that computes probabilities and has dV."""

    def run(self) -> None:
        """Computes and stores dV."""
        p, mem = self.p, self.mem

        def over_tiles(dv, scores):
            plgpu.barrier_wait(mem.k_full)
            self.start_scores(scores, jnp.int32(0))
            self.for_each_tile(functools.partial(self.step, dv, scores))
            return dv[...]

        accumulators = plgpu.ACC((ROWS, p.v_head_dim)), self.scores_type
        dv = plgpu.run_scoped(over_tiles, *accumulators)
        # The other consumer's last product reads V.
        plgpu.barrier_arrive_and_wait(mem.together)
        self.store(dv, mem.v_smem, mem.dv)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def step(self, dv, scores, position, head, tile, masked, last=False) -> None:
        """Adds a tile of Q to dV and dQ; starts the scores of the next one."""
        p, mem = self.p, self.mem
        found = self.probabilities(scores[...], position, head, tile, masked)
        probabilities, factors = found
        buffer, slot = self.shared(position), self.slot(position)
        buffer[...] = factors
        plgpu.barrier_arrive(mem.p_full)
        plgpu.barrier_arrive(mem.q_empty.at[slot])
        plgpu.barrier_wait(mem.do_full.at[slot])
        plgpu.wgmma(dv, probabilities, mem.do_smem.at[slot])

        def restart():
            if last:
                return
            self.restart(self.start_scores, scores, integers.plus(position, 1))

        if p.config.deterministic:
            restart()
            plgpu.barrier_wait(mem.ds_full)
            plgpu.wgmma_wait(0 if last else 1)
        else:
            # The other consumer has read dO before.
            plgpu.barrier_wait(mem.ds_full)
            self.visit_dq(buffer, mem.do_dq.at[slot], head, tile, restart, last)
        plgpu.barrier_arrive(mem.do_empty.at[slot])


class WithK(_Wide):
    """The consumer that computes dS and has dK."""

    def run(self) -> None:
        """Computes and stores dK."""
        p, mem = self.p, self.mem

        def over_tiles(dk, dp):
            plgpu.barrier_wait(mem.k_full)
            plgpu.barrier_wait(mem.v_full)
            # The slots of Q that it uses have been waited for, too.
            plgpu.barrier_wait(mem.q_full.at[0])
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
        """Adds a tile of Q to dK and dQ; starts dP of the next one."""
        del masked
        p, mem = self.p, self.mem
        buffer, slot = self.shared(position), self.slot(position)
        values = dp[...]
        plgpu.barrier_wait(mem.p_full)
        factors = plgpu.load(buffer, layout=plgpu.Layout.WGMMA)
        ds = self.derivatives(factors, values, position)
        buffer[...] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(mem.ds_full)
        plgpu.barrier_arrive(mem.do_empty.at[slot])
        plgpu.wgmma(dk, ds, mem.q_smem.at[slot])

        def restart():
            if last:
                return
            following = integers.plus(position, 1)
            plgpu.barrier_wait(mem.q_full.at[self.slot(following)])
            self.restart(self.start_dp, dp, following)

        if p.config.deterministic:
            restart()
            plgpu.wgmma_wait(0 if last else 1)
        else:
            self.visit_dq(buffer, mem.q_dq.at[slot], head, tile, restart, last)
        plgpu.barrier_arrive(mem.q_empty.at[slot])
