# SPDX-License-Identifier: Apache-2.0
"""JAX's own operations on references: get, swap and addupdate."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu import _jax
from pallas_gpu.emulator.engine import poison
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.poison import Poisoned
from pallas_gpu.emulator.engine.waits import Run
from pallas_gpu.emulator.gpu.machine.cta import Warpgroup
from pallas_gpu.emulator.gpu.tensor_cores import tmem, wgmma
from pallas_gpu.primitives import _registry as registry

_EMULATE = registry.RuleKind.EMULATE


@registry.register(_jax.get_p, _EMULATE)
def _get(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> Any:
    region = operands["ref"]
    if _is_accumulator(region):
        return wgmma.load(wg, region, 0)
    if tmem.is_in_tmem(region):
        return tmem.read(wg, region)
    return wg.read(region)


@registry.register(_jax.swap_p, _EMULATE)
def _swap(
    wg: Warpgroup, operands: dict[str, Any], used: tuple[bool, ...], **_: Any
) -> Any:
    region = operands["ref"]
    if _is_accumulator(region):
        return _swap_accumulator(wg, region, operands["value"], used[0])
    if tmem.is_in_tmem(region):
        old = tmem.read(wg, region) if used[0] else None
        return _store_in_tmem(wg, region, operands["value"], old)
    # A plain store is a swap whose result is not read: it must not count as a read.
    old = wg.read(region) if used[0] else None
    wg.write(region, operands["value"])
    return old


def _is_accumulator(region: Region) -> bool:
    return isinstance(region.memory, wgmma.Accumulator)


def _store_in_tmem(wg: Warpgroup, region: Region, value: Any, old: Any) -> Run:
    yield from tmem.write(wg, region, value)
    return old


def _swap_accumulator(wg: Warpgroup, region: Region, value: Any, used: bool) -> Run:
    old = None
    if used:
        old = yield from wgmma.load(wg, region, 0)
    yield from wgmma.store(wg, region, value)
    return old


@registry.register(_jax.addupdate_p, _EMULATE)
def _addupdate(wg: Warpgroup, operands: dict[str, Any], **_: Any) -> Any:
    region = operands["ref"]
    if _is_accumulator(region):
        return _add_to_accumulator(wg, region, np.asarray(operands["value"]))
    in_tmem = tmem.is_in_tmem(region)
    old = tmem.read(wg, region) if in_tmem else wg.read(region)
    pair = (old, operands["value"])
    poisoned = any(isinstance(x, Poisoned) for x in pair)
    total = poison.apply(_sum, pair) if poisoned else _sum(*pair)
    if in_tmem:
        return _store_in_tmem(wg, region, total, None)
    wg.write(region, total)
    return None


def _sum(old: Any, value: Any) -> Any:
    return old + np.asarray(value)


def _add_to_accumulator(wg: Warpgroup, region: Region, value: Any) -> Run:
    old = yield from wgmma.load(wg, region, 0)
    yield from wgmma.store(wg, region, old + value)
