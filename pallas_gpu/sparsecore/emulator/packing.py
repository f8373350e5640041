# SPDX-License-Identifier: Apache-2.0
"""Registers of narrow elements, and bits as another type."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu.emulator.engine import poison
from pallas_gpu.emulator.engine.poison import Poisoned
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.sparsecore.emulator.cores import Subcore
from pallas_gpu.sparsecore.primitives import packing
from pallas_gpu.sparsecore.types import MACHINE

_EMULATE = registry.RuleKind.EMULATE


def _evaluated(function: Any, *operands: Any) -> Any:
    if any(isinstance(x, Poisoned) for x in operands):
        return poison.apply(function, operands)
    return function(*operands)


@registry.register(packing.pack_p, _EMULATE, MACHINE)
def _pack(
    _: Subcore, operands: list[Any], format: str, dtype: Any, **__: Any
) -> list[Any]:
    def pack(a: Any, b: Any) -> Any:
        pairs = np.stack([np.asarray(a), np.asarray(b)], axis=1).astype(dtype)
        return pairs.reshape(-1) if format == "interleaved" else pairs

    return [_evaluated(pack, *operands)]


@registry.register(packing.unpack_p, _EMULATE, MACHINE)
def _unpack(
    _: Subcore, operands: list[Any], format: str, dtype: Any, **__: Any
) -> list[Any]:
    def part(i: int) -> Any:
        return _evaluated(
            lambda x: np.asarray(x).reshape(-1, 2)[:, i].astype(dtype), operands[0]
        )

    return [part(0), part(1)]


@registry.register(packing.bitcast_p, _EMULATE, MACHINE)
def _bitcast(_: Subcore, operands: list[Any], dtype: Any, **__: Any) -> list[Any]:
    def bits(x: Any) -> Any:
        result = np.ascontiguousarray(x).view(dtype)
        return result.reshape(np.shape(x))[()] if np.ndim(x) == 0 else result

    return [_evaluated(bits, operands[0])]
