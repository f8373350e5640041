# SPDX-License-Identifier: Apache-2.0
"""Printed lines."""

from __future__ import annotations

from typing import Any

from pallas_gpu.emulator.gpu.cta import Warpgroup
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.debug import debug_print_p


@registry.register(debug_print_p, registry.RuleKind.EMULATE)
def _debug_print(_: Warpgroup, values: Any, fmt: str, **__: Any) -> None:
    print(fmt.format(*(value.item() for value in values)), flush=True)
