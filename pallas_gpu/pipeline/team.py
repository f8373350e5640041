# SPDX-License-Identifier: Apache-2.0
"""The warpgroups of a block: those that compute, and one that copies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jax import lax

from pallas_gpu import arch, errors
from pallas_gpu.entry import control
from pallas_gpu.pipeline.specialized.roles import in_role
from pallas_gpu.types.mesh import WARPGROUP_THREADS

# PTX ISA, setmaxnreg: counts are multiples of 8 up to 256.
_REGISTER_UNIT, _MOST_REGISTERS = 8, 256


@dataclasses.dataclass(frozen=True)
class Team:
    """The warpgroups that run a pipeline together.

    The first that computes also stores the outputs, when all have written theirs.

    Attributes:
      compute: number of warpgroups that run the body.
      axis: name of the thread axis.
      memory: index of the memory warpgroup, which copies the inputs.
      registers: per thread of the memory warpgroup. None: there is none, and the first
        of the others copies; the pipeline has one step.
      separate_full: each input has its own `full` barriers, and the body waits.
      manual_release: the body releases the buffer of each input.
      last: whether nothing in the kernel reads the results. Then their copies have to
        have read the buffers, not more: a next kernel sees them.
      again: whether the pipeline runs again, with the same buffers.
    """

    compute: int
    axis: str
    memory: int
    registers: int | None
    separate_full: bool = False
    manual_release: bool = False
    last: bool = False
    again: bool = False

    @property
    def automatic(self) -> Team:
        return dataclasses.replace(self, separate_full=False, manual_release=False)

    @property
    def warpgroups(self) -> int:
        return self.compute + (self.registers is not None)

    def stores(self) -> Any:
        """Returns whether this warpgroup is the one that stores the outputs."""
        return lax.axis_index(self.axis) == (1 if self.memory == 0 else 0)

    def run(
        self,
        who: str,
        produce: Callable[[], None],
        copy_once: Callable[[], None],
        consume: Callable[[], None],
    ) -> None:
        wg = lax.axis_index(self.axis)
        if self.registers is None:
            control.when(wg == 0)(copy_once)
            consume()
            return
        more = compute_registers(who, self.compute, self.registers)
        fewer = functools.partial(in_role, self.registers, "decrease", produce)
        control.when(wg == self.memory)(fewer)
        control.when(wg != self.memory)(lambda: in_role(more, "increase", consume))


def compute_registers(who: str, compute_wgs: int, memory_registers: int) -> int:
    """Returns the registers per thread of a compute warpgroup.

    They share what the memory warpgroup leaves of the registers with which the block
    was launched: `setmaxnreg.inc` waits for ever for more.
    """
    warpgroups = compute_wgs + 1
    share = arch.SM_90A.registers_per_sm // (WARPGROUP_THREADS * warpgroups)
    launched = share // _REGISTER_UNIT * _REGISTER_UNIT
    if memory_registers > launched:
        raise errors.ArgumentError(
            f"{who}: memory_registers exceeds the share of a warpgroup",
            expected=f"at most {launched}, of a block of {warpgroups} warpgroups",
            got=memory_registers,
            hint="40 is sufficient for most",
        )
    left = launched * warpgroups - memory_registers
    most = left // compute_wgs // _REGISTER_UNIT * _REGISTER_UNIT
    return min(_MOST_REGISTERS, most)
