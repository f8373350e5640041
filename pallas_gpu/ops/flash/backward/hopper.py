# SPDX-License-Identifier: Apache-2.0
"""The kernel of attention's derivatives for Hopper: a block has rows of K and V.

A block has one producer and two consumers. The rows of K and V stay in SMEM; the
producer copies tiles of Q and of the result's cotangent dO into rings of buffers, with
two numbers for each row: the logarithm of its sum of exponentials, and D, the product
of the result with its cotangent. With P the probabilities and S the scores,

    dV = P.T @ dO    dP = dO @ V.T    dS = P * (dP - D)    dK = dS.T @ Q    dQ = dS @ K

Blocks add their parts of dQ in GMEM, by TMA.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.flash.backward import persistent
from pallas_gpu.ops.flash.backward.config import CONSUMERS, REGISTERS, ROWS
from pallas_gpu.ops.flash.backward.consumers import Narrow
from pallas_gpu.ops.flash.backward.problem import BackwardProblem, Tile
from pallas_gpu.ops.flash.backward.wide import WithK, WithV
from pallas_gpu.ops.flash.masks import Blocks
from pallas_gpu.ops.flash.persistent import Visits
from pallas_gpu.ops.flash.problem import launch
from pallas_gpu.ops.folded import plus, times
from pallas_gpu.ops.memory import Memory
from pallas_gpu.ops.rules import cached
from pallas_gpu.ops.tiles import tiles


@cached
def make_kernel(p: BackwardProblem) -> Any:
    """Returns the function of the problem's inputs and of a reference of dQ, float32.

    dQ lacks the factor of the scores. Deterministic kernels do not take it. It returns
    dK and dV. With parts of heads it takes references of those, float32, too.
    """
    c = p.config
    full = plgpu.Barrier(num_arrivals=2, num_barriers=c.stages)
    empty = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=c.stages)
    statistic = plgpu.SMEM((c.stages, c.block_q), jnp.float32)
    k_shape = (2,) * p.persistent + (p.block_kv, p.head_dim)
    scratch = {
        "k_smem": tiles(k_shape, p.dtype, p.dq_part[1]),
        "v_smem": tiles((p.block_kv, p.v_dim), p.dtype),
        "lse_smem": statistic,
        "delta_smem": statistic,
        "k_full": plgpu.Barrier(),
        "v_full": plgpu.Barrier(),
        "q_full": full,
        "do_full": full,
        "q_empty": empty,
        **_rings(p),
    }
    if p.wide or not c.deterministic:
        scratch["ds_smem"] = tiles((2, p.block_kv, c.block_q), p.dtype)
        # Wide heads: one consumer has all of dS.
        arrivals = 1 if p.wide else CONSUMERS
        scratch["ds_full"] = plgpu.Barrier(num_arrivals=arrivals)
    if p.persistent:
        scratch["kv_empty"] = plgpu.Barrier(num_arrivals=CONSUMERS)
    else:
        scratch["do_empty"] = empty
        scratch["together"] = plgpu.Barrier(num_arrivals=CONSUMERS)
    if p.wide:
        scratch["p_full"] = plgpu.Barrier()
    if p.has_matrix:
        shape = p.bias_stages, c.block_q, p.block_kv
        # Wide heads: one consumer computes the probabilities.
        scratch["bias_ring"] = plgpu.Ring.of(
            tiles(shape, p.bias_dtype), consumers=1 if p.wide else CONSUMERS
        )
    rows = p.outer, p.kv_len, p.kv_heads
    results = {"dk": (*rows, p.head_dim), "dv": (*rows, p.v_dim)}
    types = {x: jax.ShapeDtypeStruct(results[x], p.dtype) for x in p.returned}
    body, inputs = functools.partial(_body, p), (*p.inputs, *p.added)
    return launch(
        *(p, "attention_backward", body, inputs, types, scratch),
        grid={"block": p.blocks},
        warpgroups=CONSUMERS + 1,
    )


def _rings(p: BackwardProblem) -> dict[str, Any]:
    c = p.config
    dims = {"q": p.head_dim, "do": p.v_dim}
    rings = {x: tiles((c.stages, c.block_q, n), p.dtype) for x, n in dims.items()}
    part = functools.partial(tiles, dtype=np.dtype(np.float32))
    if p.persistent:
        # dK and dV leave through the same buffers; each consumer has its own.
        sums = part((CONSUMERS, *p.dq_part))
        fit = 1 if p.splits_columns else 2
        results = tiles((CONSUMERS, fit, ROWS, p.head_dim), p.dtype)
        rings = {f"{x}_smem": ring for x, ring in rings.items()}
        return rings | {"results": plgpu.RefUnion(sums, results)}
    if not p.wide or c.deterministic:
        own = {} if c.deterministic else {"dq_smem": part((CONSUMERS, *p.dq_part))}
        return {f"{x}_smem": ring for x, ring in rings.items()} | own
    pieces = part((c.stages, p.dq_pieces, *p.dq_part))
    return {f"{x}_or_dq": plgpu.RefUnion(ring, pieces) for x, ring in rings.items()}


def _body(p: BackwardProblem, mem: Memory) -> None:
    wg = lax.axis_index("wg")
    if p.persistent:
        mem.dq_smem, mem.results_smem = mem.results
    elif p.wide and not p.config.deterministic:
        mem.q_smem, mem.q_dq = mem.q_or_dq
        mem.do_smem, mem.do_dq = mem.do_or_dq
    q, do = (mem.q_smem, mem.lse_smem), (mem.do_smem, mem.delta_smem)
    mem.q_ring = plgpu.Ring(q, mem.q_empty, mem.q_full)
    # Persistent blocks release both together.
    do_empty = mem.q_empty if p.persistent else mem.do_empty
    mem.do_ring = plgpu.Ring(do, do_empty, mem.do_full)
    if p.persistent:
        visits = Visits(p.tiles, lax.axis_index("block"), p.blocks, mem.schedule)
        # Behind two conditions the operands of products would take registers.
        both = (
            functools.partial(persistent.produce, p, mem, visits),
            functools.partial(persistent.consume, p, mem, wg, visits),
        )
        plgpu.Roles(CONSUMERS, REGISTERS, two_branches=True).run(wg, *both)
        return
    place = p.tile(mem, lax.axis_index("block"))
    blocks = p.tiles_of_q(mem, place)

    def consume() -> None:
        if not p.wide:
            Narrow(p, mem, wg, place, blocks).run()
            return
        for i, role in enumerate((WithV, WithK)):
            plgpu.when(wg == i)(role(p, mem, i, place, blocks).run)

    produce = functools.partial(_produce, p, mem, place, blocks)
    plgpu.Roles(CONSUMERS, REGISTERS).run(wg, produce, consume)


def _produce(p: BackwardProblem, mem: Memory, place: Tile, blocks: Blocks) -> None:
    """Copies the rows of K and V, then tiles of Q and dO in the order of their use."""
    c = p.config
    batch, kv_head = place.batch, place.head
    own_rows = plgpu.ds(plus(place.kv_first, place.start), p.block_kv)
    own = batch, own_rows, p.head_of_kv(kv_head)
    # Sequences that are packed may be empty, also at the end of the array.
    mode = plgpu.OOBFillMode.ZEROS if p.packed else None
    # Sequences start where TMA can address them, see `of_statistics`.
    by_tma = plgpu.AsyncCopyImplementation.TMA if p.packed else None
    load = functools.partial(
        plgpu.copy_gmem_to_smem, oob_mode=mode, implementation=by_tma
    )
    load(mem.k.at[own], mem.k_smem, mem.k_full)
    total = p.total(blocks)

    def copy(position, sources, ring):
        slot = ring.fill(position)
        head, tile = p.visited(place, blocks, position)
        start, q_first = times(tile, c.block_q), place.q_first
        if p.packed and (p.wide or c.stages > 2):
            # What follows from it would take too many registers around the loop.
            q_first = lax.optimization_barrier(q_first)
        rows = plgpu.ds(plus(q_first, start), c.block_q)
        number, first = p.of_statistics(batch, q_first)
        numbers = plgpu.ds(plus(first, start), c.block_q)
        parts = (batch, rows, head), (number, head, numbers)
        for source, part, buffer in zip(sources, parts, slot.buffers, strict=True):
            load(source.at[part], buffer, slot.full)

    def copy_bias(position):
        slot = mem.bias_ring.fill(position)
        head, tile = p.visited(place, blocks, position)
        rows = plgpu.ds(times(tile, c.block_q), c.block_q)
        part = p.bias_part(mem, place, head, rows, own[1])
        load(part, slot.buffers, slot.full)

    def copy_q(position):
        if p.has_matrix:
            copy_bias(position)
        copy(position, (mem.q, mem.lse), mem.q_ring)

    def copy_do(position):
        copy(position, (mem.do, mem.delta), mem.do_ring)

    # In the order of the first products.
    copy_q(jnp.int32(0))
    load(mem.v.at[own], mem.v_smem, mem.v_full)
    copy_do(jnp.int32(0))

    @plgpu.loop(1, total)
    def _(step):
        copy_q(step)
        copy_do(step)
