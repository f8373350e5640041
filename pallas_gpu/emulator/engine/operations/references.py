# SPDX-License-Identifier: Apache-2.0
"""JAX's own operations on references: get, swap and addupdate.

Each memory says how threads read and write it, at once or by a generator.
"""

from __future__ import annotations

import types as python_types
from typing import Any

import numpy as np

from pallas_gpu import _jax
from pallas_gpu.emulator.engine import poison
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.poison import Poisoned
from pallas_gpu.emulator.engine.threads import Thread
from pallas_gpu.emulator.engine.waits import Run
from pallas_gpu.primitives import _registry as registry

_EMULATE = registry.RuleKind.EMULATE


@registry.register(_jax.get_p, _EMULATE)
def _get(thread: Thread, operands: dict[str, Any], **_: Any) -> Any:
    region = operands["ref"]
    return region.memory.read(thread, region)


@registry.register(_jax.swap_p, _EMULATE)
def _swap(
    thread: Thread, operands: dict[str, Any], used: tuple[bool, ...], **_: Any
) -> Any:
    region, value = operands["ref"], operands["value"]
    # A plain store is a swap whose result is not read: it must not count as a read.
    if not used[0]:
        return region.memory.write(thread, region, value)
    return _exchanged(thread, region, lambda old: value)


def _exchanged(thread: Thread, region: Region, new: Any) -> Run:
    old = yield from _result(region.memory.read(thread, region))
    yield from _result(region.memory.write(thread, region, new(old)))
    return old


def _result(result: Any) -> Run:
    if isinstance(result, python_types.GeneratorType):
        result = yield from result
    return result


@registry.register(_jax.addupdate_p, _EMULATE)
def _addupdate(thread: Thread, operands: dict[str, Any], **_: Any) -> Run:
    yield from _exchanged(
        thread, operands["ref"], lambda old: _sum(old, operands["value"])
    )


def _sum(old: Any, value: Any) -> Any:
    pair = (old, value)
    poisoned = any(isinstance(x, Poisoned) for x in pair)
    return poison.apply(_add, pair) if poisoned else _add(*pair)


def _add(old: Any, value: Any) -> Any:
    return old + np.asarray(value)
