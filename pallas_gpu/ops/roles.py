# SPDX-License-Identifier: Apache-2.0
"""Warpgroups of a block with different roles: one produces, the others consume."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

import pallas_gpu as plgpu


def split(
    wg: Any,
    consumers: int,
    registers: tuple[int, int],
    produce: Callable[[], Any],
    consume: Callable[[], Any],
    *,
    two_branches: bool = False,
) -> None:
    """Runs `produce` in the last warpgroup, and `consume` in those before it.

    Args:
      wg: index of the warpgroup.
      consumers: number of warpgroups that consume.
      registers: per thread of the producer and of a consumer; the producer gives up
        what the consumers take.
      produce, consume: without arguments.
      two_branches: one condition with two branches, instead of two conditions. Behind
        the first of two, ptxas may not know that addresses are uniform: it moves the
        operands of each product from registers of the threads then.
    """
    if two_branches:
        lax.cond(
            lax.eq(wg, np.int32(consumers)),
            functools.partial(_in_role, registers[0], "decrease", produce),
            functools.partial(_in_role, registers[1], "increase", consume),
        )
        return

    @plgpu.when(lax.eq(wg, np.int32(consumers)))
    def _():
        _in_role(registers[0], "decrease", produce)

    @plgpu.when(lax.lt(wg, np.int32(consumers)))
    def _():
        _in_role(registers[1], "increase", consume)


def _in_role(registers: int, action: str, run: Callable[[], Any]) -> None:
    plgpu.set_max_registers(registers, action=action)
    run()
