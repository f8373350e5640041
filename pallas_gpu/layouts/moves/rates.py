# SPDX-License-Identifier: Apache-2.0
"""Throughputs of an SM of compute capability 9.0 for the instructions of a warpgroup.

The unit is an issue cycle: one instruction of all 128 threads, one warp on each of the
SM's four sub-partitions, at full rate. The cost model is based on these numbers; it
omits latency, which other warps hide.
"""

from __future__ import annotations

# Renaming a register needs no instruction.
RENAME = 0.0

# Elementwise work, one element per thread: one instruction at full rate. Estimate.
ELEMENT = 1.0

# CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", 9.0:
# results per cycle and SM. 64 of 32-bit logic and selects ("compare, minimum,
# maximum"), 64 of prmt ("byte perm"), 64 of conversions from 8 bits, 32 of shfl.
SELECT = 128 / 64
PERMUTE = 128 / 64
CONVERT = 128 / 64
SHUFFLE = 128 / 32

# CUDA C++ Programming Guide, "Shared Memory" of 5.x and later: 32 banks of 32 bits each
# cycle and SM, so a wavefront takes a cycle; a bank conflict is one more wavefront.
SMEM_WAVEFRONT = 1.0
WAVEFRONT_BYTES = 32 * 4

# Arrival, and the wait for the last of four warps: estimate. The warpgroup cannot issue
# other instructions meanwhile.
BARRIER = 30.0
# bar.warp.sync, if the lanes have not diverged: estimate.
WARP_BARRIER = 5.0
# Latency of ld.shared; due to the barrier before it, other work of the warpgroup does
# not hide it. Estimate.
SMEM_LATENCY = 30.0

# Load/store units accept one warp instruction per cycle ("32 lanes": estimate).
GMEM_INSTRUCTION = 1.0
# L2 bandwidth per SM and cycle: estimate. GMEM is transferred in sectors of 32 bytes
# (CUDA C++ Programming Guide, "Device Memory Accesses").
GMEM_BYTES_PER_CYCLE = 64.0
SECTOR_BYTES = 32
