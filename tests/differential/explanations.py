# SPDX-License-Identifier: Apache-2.0
"""Where our kernels have more or fewer instructions than upstream's, and why.

Keys are (kernel, column). What is within the margin has no entry.
"""

from __future__ import annotations

_SELECTS = (
    "rows of this untiled array begin in the same bank: 128 selects each way reorder "
    "the registers, and an access takes 2 wavefronts, where upstream's takes 8"
)

MORE: dict[tuple[str, str], str] = {
    ("plain SMEM", "total"): _SELECTS,
    ("plain SMEM", "sass"): _SELECTS,
}

_WIDE = "a thread's accesses to GMEM are 16 bytes wide, upstream's 8"
_POSITIONS = (
    "positions are or-ed from bits that LLVM knows, so that it decides more of the "
    "comparisons and drops what only they need; upstream divides a linear index"
)
_SWAP = (
    "a store that nobody reads back only stores; upstream's loads the old values too, "
    "by ldmatrix, which LLVM cannot drop"
)
_ELECTED = (
    "the elected thread branches around its copies; upstream predicates them, and "
    "ptxas moves their descriptors through vector registers and back"
)
_RING = (
    "one ring runs on through all tiles; upstream peels each tile's first copies, "
    "unrolls the copies that follow and waits for every slot at a tile's end"
)
_SETUP = (
    "nothing is set up that the kernel does not use; upstream elects a thread twice "
    "more, fetches tensor maps and fences barriers that may not exist"
)
_WARP = (
    "the warp's number is asked for once in a kernel, in upstream's where it is used"
)

FEWER: dict[tuple[str, str], str] = {
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
    ("copy", "total"): _SETUP,
    ("copy", "sass"): _ELECTED,
    ("multicast", "total"): _SETUP,
    ("multicast", "sass"): _ELECTED,
    ("swizzled SMEM", "matrix"): _SWAP,
    ("swizzled SMEM", "total"): _SWAP,
    ("swizzled SMEM", "sass"): _ELECTED,
    ("convert and store", "matrix"): _SWAP,
    ("convert and store", "total"): _SWAP,
    ("convert and store", "sass"): _SWAP,
    ("wgmma f16", "matrix"): _SWAP,
    ("wgmma f16", "total"): _SWAP,
    ("wgmma f16", "sass"): _ELECTED,
    ("wgmma bf16", "matrix"): _SWAP,
    ("wgmma bf16", "total"): _SWAP,
    ("wgmma bf16", "sass"): _ELECTED,
    ("wgmma transposed b", "matrix"): _SWAP,
    ("wgmma transposed b", "total"): _SWAP,
    ("wgmma transposed b", "sass"): _ELECTED,
    ("wgmma A in registers", "matrix"): _SWAP,
    ("wgmma A in registers", "total"): _SWAP,
    ("wgmma A in registers", "sass"): _ELECTED,
    ("matmul with a ring", "matrix"): _SWAP,
    ("matmul with a ring", "sass"): _ELECTED,
    ("persistent matmul", "waits"): _RING,
    ("persistent matmul", "tma"): _RING,
    ("persistent matmul", "matrix"): _SWAP,
    ("persistent matmul", "barriers"): _RING,
    ("persistent matmul", "shuffles"): _WARP,
    ("persistent matmul", "sass"): _RING,
    ("persistent matmul in clusters", "waits"): _RING,
    ("persistent matmul in clusters", "tma"): _RING,
    ("persistent matmul in clusters", "matrix"): _SWAP,
    ("persistent matmul in clusters", "barriers"): _RING,
    ("persistent matmul in clusters", "shuffles"): _WARP,
    ("persistent matmul in clusters", "sass"): _RING,
}
