# SPDX-License-Identifier: Apache-2.0
"""Delays."""

from __future__ import annotations

from typing import Any

from pallas_gpu.emitters.sync import delay
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.rules import emits
from pallas_gpu.primitives.sync.delay import delay_p


@emits(delay_p)
def _delay(ctx: RuleContext, nanos: Any) -> None:
    delay.delay(vals.scalar_value(nanos))
