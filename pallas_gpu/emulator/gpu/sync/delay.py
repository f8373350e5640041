# SPDX-License-Identifier: Apache-2.0
"""Delays: others run meanwhile."""

from __future__ import annotations

from typing import Any

from pallas_gpu.emulator.engine.waits import TURN, Run
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.sync import delay


@registry.register(delay.delay_p, registry.RuleKind.EMULATE)
def _delay(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> Run:
    int(operands["nanos"])  # raises if it has no value
    yield TURN
