# SPDX-License-Identifier: Apache-2.0
"""Prints of references; those of values are the same on any machine."""

from __future__ import annotations

from typing import Any

from pallas_gpu.emulator.engine.operations.elements import known
from pallas_gpu.emulator.gpu.debug import print_line
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.sparsecore.emulator.cores import Subcore
from pallas_gpu.sparsecore.primitives.debug import print_reference_p
from pallas_gpu.sparsecore.types import MACHINE
from pallas_gpu.types import formats


@registry.register(print_reference_p, registry.RuleKind.EMULATE, MACHINE)
def _print_reference(
    thread: Subcore, operands: dict[str, Any], fmt: str, **_: Any
) -> None:
    value = known(thread.read(operands["ref"]))
    print_line(formats.parse(fmt), [value])
