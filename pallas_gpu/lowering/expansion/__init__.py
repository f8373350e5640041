# SPDX-License-Identifier: Apache-2.0
"""From the warpgroup-level module to the code of a thread, by mosaic's emitters."""

from pallas_gpu.lowering.expansion.pressure import Room, register_limit
from pallas_gpu.lowering.expansion.walk import expand

__all__ = ["Room", "expand", "register_limit"]
