# SPDX-License-Identifier: Apache-2.0
"""The emulator: runs a traced kernel on the CPU and reports its errors.

Importing it registers the rules of every family and the kernel primitive's lowering on
the CPU.
"""

from __future__ import annotations

from pallas_gpu.emulator import gpu, mesh, run

__all__ = ["gpu", "mesh", "run"]
