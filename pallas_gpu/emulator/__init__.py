# SPDX-License-Identifier: Apache-2.0
"""The machine in Python: runs a traced kernel on the CPU and looks for its mistakes.

Importing it registers the rules of every family and gives the kernel primitive its
meaning on the CPU.
"""

from __future__ import annotations

from pallas_gpu.emulator import mbarrier, refs, registers, scoped, tma, wgmma
from pallas_gpu.emulator.run import lowering_rule, run_kernel

__all__ = [
    "lowering_rule",
    "mbarrier",
    "refs",
    "registers",
    "run_kernel",
    "scoped",
    "tma",
    "wgmma",
]
