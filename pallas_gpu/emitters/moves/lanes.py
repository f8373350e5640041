# SPDX-License-Identifier: Apache-2.0
"""Votes, matches and shuffles of the lanes of a warp, one element at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

from pallas_gpu.emitters.elements import arith, dtypes
from pallas_gpu.emitters.elements.convert import convert_value
from pallas_gpu.emitters.moves import redux, shuffle

_VOTES = {"any": "or", "all": "and"}
_SHUFFLES = {
    "idx": shuffle.from_lane,
    "up": shuffle.from_below,
    "down": shuffle.from_above,
    "xor": shuffle.from_other,
}


def ballot(x: ir.Value, dtype: np.dtype) -> ir.Value:
    """The lanes with a true value. PTX: `vote.sync.ballot.b32`."""
    i32 = ir.IntegerType.get_signless(32)
    votes = nvvm.vote_sync(
        shuffle.full_mask(),
        dtypes.extract(x, 0),
        nvvm.VoteSyncKind.ballot,
        results=[i32],
    )
    return dtypes.splat(votes, 1)


def vote(x: ir.Value, dtype: np.dtype, *, kind: str) -> ir.Value:
    """Whether any or all lanes have a true value. PTX: `vote.sync`."""
    return redux.voted(_VOTES[kind], x, dtype)


def match_any(x: ir.Value, dtype: np.dtype) -> ir.Value:
    """The lanes with the same value. PTX: `match.any.sync.b32` or `.b64`."""
    if dtype == dtypes.BOOL:
        x, dtype = convert_value(x, dtype, dtypes.U32), dtypes.U32
    bits = max(dtypes.bits(dtype), 32)
    word = dtypes.extract(dtypes.bitcast(x, np.dtype(f"int{dtypes.bits(dtype)}")), 0)
    if dtypes.bits(dtype) < bits:
        word = arith.extui(ir.IntegerType.get_signless(bits), word)
    i32 = ir.IntegerType.get_signless(32)
    # XLA refuses nvvm.match.sync: its bytecode has no kind (jaxlib 0.11.2).
    lanes = llvm.inline_asm(
        i32,
        [word],
        f"match.any.sync.b{bits} $0, $1, 0xffffffff;",
        "=r,r" if bits == 32 else "=r,l",
        has_side_effects=True,
    )
    return dtypes.splat(lanes, 1)


def shfl(x: ir.Value, dtype: np.dtype, lane: ir.Value, *, mode: str) -> ir.Value:
    """The value of another lane. PTX: `shfl.sync`, for each word."""
    if dtype == dtypes.BOOL:
        wide = shfl(convert_value(x, dtype, dtypes.U32), dtypes.U32, lane, mode=mode)
        return convert_value(wide, dtypes.U32, dtype)
    place = dtypes.extract(lane, 0)
    return shuffle.by_words(x, dtype, lambda word: _SHUFFLES[mode](word, place))


EMITTERS: dict[str, Callable[..., ir.Value]] = {
    "ballot": ballot,
    "vote": vote,
    "match_any": match_any,
    "shfl": shfl,
}
