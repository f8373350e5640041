# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens to their experts: positions by counting, then a gather."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gpu import errors
from pallas_gpu import sparsecore as plsc
from pallas_gpu.sparsecore.ops._rows import (
    ALIGNMENT,
    SUBCORE,
    ArrayLike,
    Launch,
    count_values,
    padded,
    require_rows,
    rounded,
    within,
)
from pallas_gpu.sparsecore.ops.embedding import MISSING, embedding_lookup


def dispatch(
    x: ArrayLike,
    experts: ArrayLike,
    num_experts: int,
    capacity: int,
    *,
    target: str | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Moves the row of each token to its expert, as mixtures of experts need it.

    The tokens of an expert keep their order; those beyond its capacity are dropped.
    The subcores of one core count their tokens for each expert, and number them from
    where the subcores before end; the rows are then gathered by all.

    Args:
      x: (tokens, width) of float32, bfloat16 or int32.
      experts: int32 of shape (tokens,): the expert of each token; others than 0 to
        num_experts - 1 drop the token.
      num_experts, capacity: static; `num_experts * capacity` words fit VMEM_SHARED.
      target, interpret: the chip, and as of `plsc.kernel`.

    Returns:
      The rows, (num_experts, capacity, width), zero where an expert has fewer tokens;
      and for each token its position `expert * capacity + i`, or -1 if it is dropped.

    Raises:
      ShapeError: other shapes or types.
      OutOfResources: too many experts or positions.
    """
    experts = require_rows(experts, "dispatch", "experts")
    if x.shape[0] != experts.size:
        raise errors.ShapeError(
            "dispatch: a token does not have one expert",
            expected=f"{x.shape[0]} experts, one for each row",
            got=experts.size,
            hint="call it once for each of several experts of a token",
        )
    launch = Launch(target, interpret)
    source, places = _numbered(experts, num_experts, capacity, launch)
    rows = embedding_lookup(x, source, missing=True, target=target, interpret=interpret)
    return rows.reshape(num_experts, capacity, x.shape[1]), places


def _numbered(experts: Any, num_experts: int, capacity: int, launch: Launch) -> Any:
    """Returns the token at each position, and the position of each token."""
    chip = launch.chip
    lanes, subcores = chip.lanes, chip.subcores
    unit = max(lanes, ALIGNMENT)
    own = rounded(-(-experts.size // subcores), unit)
    counters = rounded(num_experts, unit)
    each = rounded(-(-num_experts * capacity // subcores), unit)
    total = each * subcores

    def body(
        experts_ref: Any,
        source: Any,
        places: Any,
        expert: Any,
        place: Any,
        token: Any,
        counts: Any,
        others: Any,
        empty: Any,
        shared_counts: Any,
        shared_source: Any,
    ) -> None:
        subcore = lax.axis_index(SUBCORE)
        mine = plsc.ds(subcore * own, own)
        part = plsc.ds(subcore * each, each)
        plsc.sync_copy(experts_ref.at[mine], expert)
        _fill(empty, each, MISSING, lanes)
        _fill(counts, counters, 0, lanes)
        plsc.sync_copy(empty, shared_source.at[part])

        count_values(expert, own, counts, num_experts, lanes)
        plsc.sync_copy(counts, shared_counts.at[plsc.ds(subcore * counters, counters)])
        plsc.subcore_barrier()
        plsc.sync_copy(shared_counts, others)
        _fill(counts, counters, 0, lanes)

        @plsc.loop(0, subcore)
        def _(before: Any) -> None:
            @plsc.parallel_loop(0, counters, step=lanes, unroll=8)
            def _(i: Any) -> None:
                counted = others[plsc.ds(before * counters + i, lanes)]
                plsc.addupdate(counts.at[plsc.ds(i, lanes)], counted)

        @plsc.loop(0, own, step=lanes)
        def _(i: Any) -> None:
            value = expert[plsc.ds(i, lanes)]
            mask = within(value, num_experts)
            number = _number(counts, value, mask)
            fits = mask & (number < capacity)
            at = jnp.where(fits, value * capacity + number, MISSING)
            place[plsc.ds(i, lanes)] = at
            names = subcore * own + i + lax.iota(jnp.int32, lanes)
            token[plsc.ds(i, lanes)] = names

        plsc.sync_copy(token, shared_source.at[plsc.Indices(place, MISSING)])
        plsc.sync_copy(place, places.at[mine])
        plsc.subcore_barrier()
        plsc.sync_copy(shared_source.at[part], source.at[part])

    def vector(n: int) -> Any:
        return plsc.VMEM((n,), jnp.int32)

    scratch = [
        *[vector(own)] * 3,
        vector(counters),
        vector(subcores * counters),
        vector(each),
        plsc.VMEM_SHARED((subcores * counters,), jnp.int32),
        plsc.VMEM_SHARED((total,), jnp.int32),
    ]
    out = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (total, subcores * own)]
    given = padded(experts, subcores * own, MISSING)
    source, places = launch.kernel(body, out, scratch, num_cores=1)(given)
    return source[: num_experts * capacity], places[: experts.size]


def _number(counts: Any, value: Any, mask: Any) -> Any:
    """Numbers the tokens of a register, each after those of its expert so far."""
    seen, last = plsc.scan_count(value, mask)
    start = plsc.load_gather(counts, [jnp.where(mask, value, 0)])
    plsc.store_scatter(counts, [value], start + seen, mask=last)
    return start + seen - 1


def _fill(ref: Any, size: int, value: int, lanes: int) -> None:
    @plsc.parallel_loop(0, size, step=lanes, unroll=8)
    def _(i: Any) -> None:
        ref[plsc.ds(i, lanes)] = jnp.full(lanes, value, jnp.int32)
