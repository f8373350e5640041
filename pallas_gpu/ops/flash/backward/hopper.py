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
from pallas_gpu.ops import integers, roles
from pallas_gpu.ops.flash.backward import persistent
from pallas_gpu.ops.flash.backward.config import CONSUMERS, REGISTERS, ROWS
from pallas_gpu.ops.flash.backward.consumers import Memory, Narrow
from pallas_gpu.ops.flash.backward.problem import (
    BackwardProblem,
    Place,
    launch,
)
from pallas_gpu.ops.flash.backward.wide import WithK, WithV
from pallas_gpu.ops.flash.masks import Blocks
from pallas_gpu.ops.flash.persistent import Visits
from pallas_gpu.ops.tiles import tiles


@functools.lru_cache(maxsize=64)
def make_kernel(p: BackwardProblem, compiler_params: Any, interpret: Any) -> Any:
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
        "v_smem": tiles((p.block_kv, p.v_head_dim), p.dtype),
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
        scratch["bias_smem"] = tiles(shape, p.bias_dtype)
        scratch["bias_full"] = plgpu.Barrier(num_barriers=p.bias_stages)
        # Wide heads: one consumer computes the probabilities.
        scratch["bias_empty"] = plgpu.Barrier(
            num_arrivals=1 if p.wide else CONSUMERS, num_barriers=p.bias_stages
        )
    rows = p.batch, p.kv_len, p.kv_heads
    results = {"dk": (*rows, p.head_dim), "dv": (*rows, p.v_head_dim)}
    return launch(
        functools.partial(_body, p),
        tuple(jax.ShapeDtypeStruct(results[x], p.dtype) for x in p.returned),
        scratch,
        blocks=p.blocks,
        name="attention_backward",
        compiler_params=compiler_params,
        interpret=interpret,
    )


def _rings(p: BackwardProblem) -> dict[str, Any]:
    """Declares the buffers of Q and dO, and those of parts of dQ."""
    c = p.config
    dims = {"q": p.head_dim, "do": p.v_head_dim}
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
    return {f"{x}_ring": plgpu.RefUnion(ring, pieces) for x, ring in rings.items()}


def _body(p: BackwardProblem, *refs: Any, **scratch: Any) -> None:
    wg = lax.axis_index("wg")
    names = *p.inputs, *p.added, *p.returned
    for x in ("q", "do"):
        if f"{x}_ring" in scratch:
            scratch[f"{x}_smem"], scratch[f"{x}_dq"] = scratch.pop(f"{x}_ring")
    if "results" in scratch:
        scratch["dq_smem"], scratch["results_smem"] = scratch.pop("results")
    mem = Memory(**dict(zip(names, refs, strict=True)), **scratch)
    if p.persistent:
        visits = Visits(p.tiles, lax.axis_index("block"), p.blocks, mem.schedule)
        # Behind two conditions the operands of products would take registers.
        both = (
            functools.partial(persistent.produce, p, mem, visits),
            functools.partial(persistent.consume, p, mem, wg, visits),
        )
        roles.split(wg, CONSUMERS, REGISTERS, *both, two_branches=True)
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
    roles.split(wg, CONSUMERS, REGISTERS, produce, consume)


def _produce(p: BackwardProblem, mem: Memory, place: Place, blocks: Blocks) -> None:
    """Copies the rows of K and V, then tiles of Q and dO in the order of their use."""
    c = p.config
    batch, kv_head = place.batch, place.head
    own_rows = plgpu.ds(integers.plus(place.kv_first, place.start), p.block_kv)
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

    def copy(position, sources, rings, full, empty):
        slot = lax.rem(position, np.int32(c.stages))

        @plgpu.when(lax.ge(position, np.int32(c.stages)))
        def _():
            plgpu.barrier_wait(empty.at[slot])

        member, tile = p.visited(blocks, position)
        head = integers.plus(integers.times(kv_head, p.group), member)
        start = integers.times(tile, c.block_q)
        q_first = place.q_first
        if p.packed and (p.wide or c.stages > 2):
            # What follows from it would take too many registers around the loop.
            q_first = lax.optimization_barrier(q_first)
        rows = plgpu.ds(integers.plus(q_first, start), c.block_q)
        number, first = p.of_statistics(place.batch, q_first)
        numbers = plgpu.ds(integers.plus(first, start), c.block_q)
        parts = (batch, rows, head), (number, head, numbers)
        for source, part, ring in zip(sources, parts, rings, strict=True):
            load(source.at[part], ring.at[slot], full.at[slot])

    def copy_bias(position):
        slot = lax.rem(position, np.int32(p.bias_stages))

        @plgpu.when(lax.ge(position, np.int32(p.bias_stages)))
        def _():
            plgpu.barrier_wait(mem.bias_empty.at[slot])

        member, tile = p.visited(blocks, position)
        head = integers.plus(integers.times(kv_head, p.group), member)
        rows = plgpu.ds(integers.times(tile, c.block_q), c.block_q)
        part = p.bias_part(mem.bias, place, head, rows, own[1])
        load(part, mem.bias_smem.at[slot], mem.bias_full.at[slot])

    def copy_q(position):
        if p.has_matrix:
            copy_bias(position)
        rings = mem.q_smem, mem.lse_smem
        copy(position, (mem.q, mem.lse), rings, mem.q_full, mem.q_empty)

    def copy_do(position):
        rings = mem.do_smem, mem.delta_smem
        copy(position, (mem.do, mem.delta), rings, mem.do_full, mem.do_empty)

    # In the order of the first products.
    copy_q(jnp.int32(0))
    load(mem.v.at[own], mem.v_smem, mem.v_full)
    copy_do(jnp.int32(0))

    @plgpu.loop(1, total)
    def _(step):
        copy_q(step)
        copy_do(step)
