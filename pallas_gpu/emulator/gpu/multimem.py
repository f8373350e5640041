# SPDX-License-Identifier: Apache-2.0
"""Accesses to the memory of all devices at once: one access to that of each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_gpu.emulator.engine import poison
from pallas_gpu.emulator.engine.poison import Poisoned
from pallas_gpu.emulator.gpu.gmem import of_each
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.devices import multimem

_EMULATE = registry.RuleKind.EMULATE

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@registry.register(multimem.multimem_store_p, _EMULATE)
def _store(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> None:
    for region in of_each(operands["dst"]):
        wg.write(region, operands["value"])


@registry.register(multimem.multimem_load_reduce_p, _EMULATE)
def _load_reduce(
    wg: Warpgroup, operands: dict[str, Any], reduction_op: str, **_: Any
) -> Any:
    values = [wg.read(region) for region in of_each(operands["src"])]
    combine = functools.partial(_combined, reduction_op)
    if any(isinstance(value, Poisoned) for value in values):
        return poison.apply(combine, values)
    return combine(*values)


def _combined(reduction: str, *values: Any) -> Any:
    dtype = np.asarray(values[0]).dtype
    # PTX ISA, multimem.ld_reduce: sums of narrow floats have a wider accumulator.
    narrow = reduction == "add" and dtype.kind not in "iu" and dtype.itemsize < 4
    parts = [np.asarray(x, np.float32) if narrow else np.asarray(x) for x in values]
    with np.errstate(all="ignore"):
        total = functools.reduce(_COMBINE[reduction], parts)
    return np.asarray(total).astype(dtype)[()]
