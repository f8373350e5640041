# SPDX-License-Identifier: Apache-2.0
"""Warpgroups of a block with different roles: one produces, the others consume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pallas_gpu as plgpu


def split(
    wg: Any,
    consumers: int,
    registers: tuple[int, int],
    produce: Callable[[], Any],
    consume: Callable[[], Any],
) -> None:
    """Runs `produce` in the last warpgroup, and `consume` in those before it.

    Args:
      wg: index of the warpgroup.
      consumers: number of warpgroups that consume.
      registers: per thread of the producer and of a consumer; the producer gives up
        what the consumers take.
      produce, consume: without arguments.
    """

    @plgpu.when(wg == consumers)
    def _():
        plgpu.set_max_registers(registers[0], action="decrease")
        produce()

    @plgpu.when(wg < consumers)
    def _():
        plgpu.set_max_registers(registers[1], action="increase")
        consume()
