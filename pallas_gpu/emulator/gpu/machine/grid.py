# SPDX-License-Identifier: Apache-2.0
"""Positions on the axes of the launch."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.primitives import _registry as registry


@registry.register(lax.axis_index_p, registry.RuleKind.EMULATE)
def _axis_index(wg: Warpgroup, _: Any, axis_name: Any, used: Any) -> Any:
    return np.int32(wg.axis_index(axis_name))
