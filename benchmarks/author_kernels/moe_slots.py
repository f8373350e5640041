# SPDX-License-Identifier: Apache-2.0
"""A place among the rows of its expert for each choice of a router."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu

EXPERTS, LANES = 256, 32
# Rows of 32 choices of a block.
CONFIGS = [(16,), (32,), (64,), (128,)]


def moe_slots(experts, config=CONFIGS[0]):
    """Returns for each choice its number among those of its expert, and their counts.

    Which of the choices of an expert has which number is not defined.

    Args:
      experts: (choices,), int32: from 0 to 255.
    """
    (rows,) = config
    block = rows * LANES

    def body(experts_ref, _, o_ref, counts_ref, own_ref):
        mine = plgpu.ds(plgpu.program_id(0) * block, block)
        expert = experts_ref[mine].reshape(rows, LANES)
        own_ref[...] = jnp.zeros(EXPERTS, jnp.int32)
        # Lanes with the same expert: the first counts all of them, once.
        peers = plgpu.match_any(expert)
        lane = plgpu.broadcasted_iota(jnp.uint32, (rows, LANES), 1)
        below = jax.lax.population_count(peers & ((jnp.uint32(1) << lane) - 1))
        first = 31 - jax.lax.clz(peers & -peers)
        before = plgpu.atomic_add(
            own_ref.at[expert],
            jax.lax.population_count(peers).astype(jnp.int32),
            mask=below == 0,
        )
        number = plgpu.shfl(before, first) + below.astype(jnp.int32)
        own_ref[...] = plgpu.atomic_add(counts_ref, own_ref[...])
        o_ref[mine] = (number + own_ref[expert]).reshape(block)

    return plgpu.pallas_call(
        body,
        out_shape=(experts, jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)),
        grid=experts.size // block,
        scratch_shapes=[plgpu.SMEM((EXPERTS,), jnp.int32)],
        input_output_aliases={1: 1},
    )(experts, jnp.zeros(EXPERTS, jnp.int32))


def reference(experts):
    counts = jnp.bincount(experts, length=EXPERTS).astype(jnp.int32)
    order = jnp.argsort(experts, stable=True)
    starts = jnp.cumsum(counts) - counts
    ranks = jnp.arange(experts.size, dtype=jnp.int32) - starts[experts[order]]
    return jnp.zeros_like(experts).at[order].set(ranks), counts


def comparable(args, slots, counts):
    """The numbers of each expert in order, and the counts."""
    return [slots[jnp.lexsort((slots, args[0]))], counts]


SMALL, FULL = (8192,), (1 << 20,)


def arrays(choices):
    return (np.random.default_rng(0).integers(0, EXPERTS, choices, np.int32),)


function = moe_slots
