# SPDX-License-Identifier: Apache-2.0
"""The emulated GPU, with one rule file per family; importing it registers the rules."""

from __future__ import annotations

from pallas_gpu.emulator.engine import control
from pallas_gpu.emulator.gpu import (
    access,
    cp_async,
    debug,
    griddepcontrol,
    launch_control,
    mbarrier,
    registers,
    rows,
    scheduling,
    scoped,
    tma,
    warp,
)
from pallas_gpu.emulator.gpu.accesses import async_stores, atomics, indexed, positions
from pallas_gpu.emulator.gpu.copies import im2col, prefetch
from pallas_gpu.emulator.gpu.machine import grid
from pallas_gpu.emulator.gpu.sync import delay, semaphore
from pallas_gpu.emulator.gpu.tensor_cores import copies as tensor_copies
from pallas_gpu.emulator.gpu.tensor_cores import mma, operand_copy, tcgen05, tmem, wgmma

__all__ = [
    "access",
    "async_stores",
    "atomics",
    "control",
    "cp_async",
    "debug",
    "delay",
    "griddepcontrol",
    "launch_control",
    "grid",
    "im2col",
    "indexed",
    "mbarrier",
    "mma",
    "operand_copy",
    "positions",
    "prefetch",
    "registers",
    "rows",
    "scheduling",
    "scoped",
    "semaphore",
    "tcgen05",
    "tensor_copies",
    "tma",
    "tmem",
    "warp",
    "wgmma",
]
