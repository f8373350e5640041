# SPDX-License-Identifier: Apache-2.0
"""Copies of left operands of tcgen05_mma to TMEM."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.emulator.gpu.tensor_cores import copies
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.tensor_cores import operand_copy


@registry.register(operand_copy.async_copy_smem_to_tmem_p, registry.RuleKind.EMULATE)
def _copy(
    wg: Warpgroup, operands: dict[str, Any], collective_axis: str | None, **_: Any
) -> None:
    what = "async_copy_smem_to_tmem"
    copies.start_in_each(wg, operands, collective_axis, what, np.copy)
