# SPDX-License-Identifier: Apache-2.0
"""Elements of values at positions: the emulator evaluates lax's own operations.

These rules serve bodies that are already expanded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import positions

_UPDATES: dict[str, Any] = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


@registry.register(positions.gather_positions_p, registry.RuleKind.EMULATE)
def _gather(wg: Any, operands: dict[str, Any], **_: Any) -> Any:
    x, index, fill = (operands[name] for name in ("x", "index", "fill"))
    inside = (index >= 0) & (index < x.size)
    taken = x.reshape(-1)[np.where(inside, index, 0)]
    return np.where(inside, taken, fill).astype(x.dtype)


@registry.register(positions.scatter_positions_p, registry.RuleKind.EMULATE)
def _scatter(wg: Any, operands: dict[str, Any], kind: str, **_: Any) -> Any:
    x, index, updates = (operands[name] for name in ("x", "index", "updates"))
    inside = (index >= 0) & (index < x.size)
    result = np.array(x).reshape(-1)
    for position, update in zip(index[inside], updates[inside], strict=True):
        old = result[position]
        result[position] = update if kind == "set" else _UPDATES[kind](old, update)
    return result.reshape(x.shape)
