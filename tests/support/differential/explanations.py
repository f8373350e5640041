# SPDX-License-Identifier: Apache-2.0
"""Where our kernels have more or fewer instructions than upstream's, and why.

`MORE` and `FEWER` are tables for each semantics, from (kernel, column) to a sentence.
What is within the margin has no entry.
"""

from __future__ import annotations

Table = dict[tuple[str, str], str]

# --- more -----------------------------------------------------------------------------

_UNTILED = (
    "rows of this untiled array begin in the same bank: 128 selects each way reorder "
    "the registers, and an access takes 2 wavefronts, where upstream's takes 8"
)
_CONFLICTS_ACCEPTED = (
    "64 selects keep the load free of bank conflicts, though optimized=False accepts "
    "them; upstream's takes 4 wavefronts an access, twice as many"
)
_DIVISION = (
    "a division by one number a row is written out, so that its reciprocal and its "
    "scale are computed once: more PTX, but less SASS than ptxas's expansion of each"
)

MORE: dict[str, Table] = {
    "Lane": {
        ("softmax", "total"): _DIVISION,
        ("plain SMEM", "total"): _UNTILED,
        ("plain SMEM", "sass"): _UNTILED,
    },
    "Warpgroup": {
        ("softmax", "total"): _DIVISION,
        ("plain SMEM", "total"): _CONFLICTS_ACCEPTED,
        ("plain SMEM", "sass"): _CONFLICTS_ACCEPTED,
    },
}

# --- fewer ----------------------------------------------------------------------------

_WIDE = "a thread's accesses to GMEM are 16 bytes wide, upstream's 8"
_POSITIONS = (
    "positions are or-ed from bits that LLVM knows, so that it decides more of the "
    "comparisons and drops what only they need; upstream divides a linear index"
)
_SWAP = (
    "a store that nobody reads back only stores; upstream's loads the old values too, "
    "by ldmatrix: LLVM keeps them, ptxas drops them, so that SASS has none"
)
_SETUP = (
    "nothing is set up that the kernel does not use, and the warp's number and the "
    "elected thread are asked for once; upstream asks again for each use"
)
_TURNS = (
    "warps initialize its mbarriers in turns, each by an instruction for several; one "
    "thread of upstream's initializes all"
)
_ELECTED = (
    "the elected thread branches around its copies; upstream predicates them, and "
    "ptxas moves their descriptors through vector registers and back"
)
_RING = (
    "one ring runs on through all tiles; upstream peels each tile's first copies, "
    "unrolls the copies that follow and waits for every slot at a tile's end"
)
_RING_AND_ELECTED = (
    "see tma and waits, which upstream writes out more often; a third of it is "
    "what its predicated copies move between vector and uniform registers"
)

_STEPS = (
    "nd_loop divides numbers that are not negative to count its steps; upstream's "
    "division rounds down for negative ones too"
)

_PERSISTENT = ("persistent matmul", "persistent matmul in clusters")
_ONE_TILE = ("wgmma f16", "wgmma bf16", "wgmma transposed b", "wgmma A in registers")

_ALIKE: Table = {
    ("elementwise", "memory"): _WIDE,
    ("elementwise", "total"): _WIDE,
    ("elementwise", "sass"): _WIDE,
    ("elementwise on a grid", "total"): _SETUP,
    ("polynomial", "memory"): _WIDE,
    ("polynomial", "total"): _WIDE,
    ("polynomial", "sass"): _WIDE,
    ("mask", "memory"): _POSITIONS,
    ("mask", "total"): _POSITIONS,
    ("mask", "sass"): _POSITIONS,
    ("loop over arrays", "memory"): _WIDE,
    ("loop over arrays", "total"): _WIDE,
    ("loop over arrays", "sass"): _WIDE,
    ("copy", "sass"): _ELECTED,
    ("multicast", "sass"): _ELECTED,
    ("swizzled SMEM", "sass"): _ELECTED,
    ("convert and store", "sass"): _SETUP,
    ("softmax", "sass"): _DIVISION,
    **{(kernel, "sass"): _ELECTED for kernel in (*_ONE_TILE, "matmul with a ring")},
    **{(kernel, "waits"): _RING for kernel in _PERSISTENT},
    **{(kernel, "tma"): _RING for kernel in _PERSISTENT},
    **{(kernel, "barriers"): _RING for kernel in _PERSISTENT},
    **{(kernel, "shuffles"): _SETUP for kernel in _PERSISTENT},
    **{(kernel, "sass"): _RING_AND_ELECTED for kernel in _PERSISTENT},
}
_STORE_THROUGH_SMEM = ("swizzled SMEM", "convert and store", *_ONE_TILE)

FEWER: dict[str, Table] = {
    "Lane": {
        **_ALIKE,
        **{(kernel, "matrix"): _SWAP for kernel in _STORE_THROUGH_SMEM},
        **{(kernel, "total"): _SWAP for kernel in _STORE_THROUGH_SMEM},
        **{
            (kernel, "matrix"): _SWAP for kernel in ("matmul with a ring", *_PERSISTENT)
        },
        **{(kernel, "total"): _STEPS for kernel in _PERSISTENT},
    },
    "Warpgroup": {
        ("inline code", "total"): _SETUP,
        **_ALIKE,
        ("copy", "total"): _SETUP,
        ("swizzled SMEM", "total"): _SETUP,
        ("convert and store", "total"): _SETUP,
        ("multicast", "total"): _SETUP,
        **{(kernel, "total"): _SETUP for kernel in _ONE_TILE},
        ("persistent matmul in clusters", "total"): _TURNS,
        ("inferred wgmma", "sass"): _ELECTED,
        ("inferred softmax", "sass"): _DIVISION,
    },
}
