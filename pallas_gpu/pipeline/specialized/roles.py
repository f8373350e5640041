# SPDX-License-Identifier: Apache-2.0
"""Warpgroups of a block with different roles: one copies, the others compute."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from pallas_gpu import errors, expect
from pallas_gpu.entry import control, scope
from pallas_gpu.primitives.registers import set_max_registers


def _of_both(value: Any, what: str) -> tuple[int, ...]:
    found = expect.integers(24, 256)(value, what)
    if not expect.is_sequence(value) or len(found) != 2:
        raise expect.wrong_type(
            what, "two numbers", "those of the producer and of a consumer", value,
            "write registers=(40, 232)",
        )  # fmt: skip
    return found


@expect.arguments(consumers=expect.integer(1), registers=expect.optional(_of_both))
@dataclasses.dataclass(frozen=True)
class Roles:
    """The roles of a block's warpgroups: consumers, and a producer, the last one.

    The producer, which copies, needs few registers, and gives up those that the
    consumers take.

    PTX: setmaxnreg. Since: sm_90a.

    Attributes:
      consumers: number of warpgroups that compute.
      registers: per thread of the producer and of a consumer, multiples of 8 from 24 to
        256; of a block of 3 warpgroups (40, 232) are all that an SM has, of one of 4
        (24, 160). None: as at the launch.
      two_branches: one condition with two branches, instead of two conditions. Behind
        the first of two, ptxas may not know that addresses are uniform: it moves the
        operands of each product from registers of the threads then.

    Example:
      >>> roles = plgpu.Roles(consumers=2, registers=(40, 232))
      >>> roles.run(lax.axis_index("wg"), produce, consume)
    """

    consumers: int
    registers: tuple[int, int] | None = None
    two_branches: bool = False

    @property
    def num_threads(self) -> int:
        """The warpgroups of a block, for `plgpu.kernel`."""
        return self.consumers + 1

    @expect.arguments()
    def run(
        self,
        wg: int | jax.Array,
        produce: Callable[[], Any],
        consume: Callable[[], Any],
    ) -> None:
        """Runs `produce` in the last warpgroup, and `consume` in those before it.

        PTX: setmaxnreg, a branch. Since: sm_90a. Issued by all warpgroups of a block.

        Args:
          wg: index of the warpgroup.
          produce, consume: without arguments.

        Raises:
          ArgumentError: a block has fewer warpgroups than `num_threads`.
        """
        warpgroups = scope.current_mesh("Roles.run").warpgroups
        if warpgroups < self.num_threads:
            raise errors.ArgumentError(
                "Roles.run: a block has too few warpgroups",
                expected=f"num_threads={self.num_threads}: {self.consumers} that "
                "compute, and one that copies",
                got=f"num_threads={warpgroups}",
                hint="pass num_threads=roles.num_threads to plgpu.kernel",
            )
        own = self.registers or (None, None)
        fewer = functools.partial(in_role, own[0], "decrease", produce)
        more = functools.partial(in_role, own[1], "increase", consume)
        if self.two_branches:
            lax.cond(lax.eq(wg, np.int32(self.consumers)), fewer, more)
            return
        control.when(lax.eq(wg, np.int32(self.consumers)))(fewer)
        control.when(lax.lt(wg, np.int32(self.consumers)))(more)


def in_role(registers: int | None, action: str, run: Callable[[], Any]) -> None:
    """Runs what a warpgroup does, with so many registers per thread."""
    if registers is not None:
        set_max_registers(registers, action=action)
    run()
