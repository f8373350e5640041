# SPDX-License-Identifier: Apache-2.0
"""Values in registers. Layouts are invisible here: a value is an array."""

from __future__ import annotations

from typing import Any

from pallas_gpu import _jax
from pallas_gpu.emulator import plan
from pallas_gpu.emulator.machine import Warpgroup
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import registers


@registry.register(registers.load_p, registry.RuleKind.EMULATE)
def _load(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> Any:
    value = wg.read(operands["src"])
    return value[()] if value.ndim == 0 else value


@registry.register(registers.layout_cast_p, registry.RuleKind.EMULATE)
def _layout_cast(x: Any, **_: Any) -> Any:
    return x


# A pure loop may hold a layout_cast; with a lowering of its own it compiles as a whole.
plan.PURE.add(registers.layout_cast_p)
_jax.mlir.register_lowering(
    registers.layout_cast_p,
    _jax.mlir.lower_fun(_layout_cast, multiple_results=False),
    platform="cpu",
)
