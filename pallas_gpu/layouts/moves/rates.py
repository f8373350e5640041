# SPDX-License-Identifier: Apache-2.0
"""How long an SM of compute capability 9.0 is busy with what one warpgroup issues.

The unit is a cycle of issue: one instruction of all 128 threads, one warp on each of
the SM's four sub-partitions, at full rate. All estimates of cost are made of these
numbers; what they leave out is latency that other warps hide.
"""

from __future__ import annotations

# A register under another name is no instruction.
RENAME = 0.0

# Elementwise work on an element of each thread: one instruction at full rate. Estimate.
ELEMENT = 1.0

# CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", 9.0:
# results per cycle and SM. 64 of 32-bit logic and selects ("compare, minimum,
# maximum"), 64 of prmt ("byte perm"), 64 of conversions from 8 bits, 32 of shfl.
SELECT = 128 / 64
PERMUTE = 128 / 64
CONVERT = 128 / 64
SHUFFLE = 128 / 32

# CUDA C++ Programming Guide, "Shared Memory" of 5.x and later: 32 banks of 32 bits each
# cycle and SM, so a wavefront is a cycle; a bank conflict is one more of them.
SMEM_WAVEFRONT = 1.0

# Arrival, and the wait for the last of four warps: estimate. No other instruction of
# the warpgroup can be issued meanwhile.
BARRIER = 30.0
# bar.warp.sync, where the lanes have not parted: estimate.
WARP_BARRIER = 5.0
# From the address to the value of ld.shared; the barrier before it keeps the
# warpgroup's other work from hiding it. Estimate.
SMEM_LATENCY = 30.0

# Load/store units take one warp instruction a cycle ("32 lanes": estimate).
GMEM_INSTRUCTION = 1.0
# What L2 delivers to one SM each cycle: estimate. GMEM moves in sectors of 32 bytes
# (CUDA C++ Programming Guide, "Device Memory Accesses").
GMEM_BYTES_PER_CYCLE = 64.0
SECTOR_BYTES = 32
