# SPDX-License-Identifier: Apache-2.0
"""Bodies without what kernels lack: keys of random numbers, other platforms' code."""

from pallas_gpu.entry.plain.bodies import REPLACED, is_array, plain

__all__ = ["REPLACED", "is_array", "plain"]
