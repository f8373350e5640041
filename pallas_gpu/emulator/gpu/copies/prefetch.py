# SPDX-License-Identifier: Apache-2.0
"""Prefetches: results do not depend on them, so only their operands are checked."""

from __future__ import annotations

from typing import Any

from pallas_gpu import types
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.emulator.gpu.mbarrier import skipped
from pallas_gpu.layouts.gmem.tma_start import require_start
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.copies.prefetch import async_prefetch_p


@registry.register(async_prefetch_p, registry.RuleKind.EMULATE)
def _async_prefetch(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> None:
    if skipped(operands):
        return
    ref = operands["ref"]
    bits = types.itemsize_bits(ref.dtype)
    require_start(ref.window, bits, f"a prefetch of {ref.memory.name}", store=False)
