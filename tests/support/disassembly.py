# SPDX-License-Identifier: Apache-2.0
"""The offline compiler's children print SASS only for the tests marked `sass`.

nvdisasm takes three quarters of the CPU time of a child (0.8 s of 1.0 s for a kernel
of attention), and what nearly all tests read is PTX and ptxas's report.
"""

from __future__ import annotations

import os

from pallas_gpu import arch
from pallas_gpu.runtime import worker

# As users have them; made by the package when first needed.
_DISASSEMBLING = worker._workers
# None of them starts a child before its first kernel.
_OTHERS = {
    (os.getpid(), name): worker.Worker(name, disassemble=False) for name in arch.TARGETS
}


def disassemble(wanted: bool) -> None:
    """Gives this process the workers that print SASS, or those that do not."""
    worker._workers = _DISASSEMBLING if wanted else _OTHERS
