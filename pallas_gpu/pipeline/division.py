# SPDX-License-Identifier: Apache-2.0
"""The warpgroups of a block: those that compute, and one that copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from pallas_gpu import arch, errors
from pallas_gpu.entry import control
from pallas_gpu.pipeline.compute import Compute
from pallas_gpu.pipeline.producer import Producer, Releases
from pallas_gpu.pipeline.streams import Body, Streams
from pallas_gpu.primitives.registers import set_max_registers
from pallas_gpu.types.mesh import WARPGROUP_THREADS

# PTX ISA, setmaxnreg: counts are multiples of 8 up to 256.
_REGISTER_UNIT, _MOST_REGISTERS = 8, 256


@dataclasses.dataclass(frozen=True)
class Division:
    """What each warpgroup of a block does in a pipeline over given references.

    Attributes:
      producer: the memory warpgroup.
      compute: the others.
      memory_registers: registers per thread of the memory warpgroup. None: there is
        none, and the first of the others copies; the pipeline has one step.
      memory_wg: index of the memory warpgroup.
    """

    producer: Producer
    compute: Compute
    memory_registers: int | None
    memory_wg: int

    @classmethod
    def of(
        cls,
        body: Body,
        streams: Streams,
        grid: Sequence[Any],
        depth: int,
        *,
        compute_wgs: int,
        axis: str,
        memory_registers: int | None,
        memory_wg: int | None = None,
        manual_produced: bool = False,
        manual_consumed: bool = False,
        last: bool = False,
        again: bool = False,
    ) -> Division:
        """Returns the division of `compute_wgs` warpgroups and a memory warpgroup.

        The memory warpgroup is the last one, or that of index `memory_wg`.

        Raises:
          ArgumentError: `memory_registers` leaves no registers for the others.
        """
        if memory_registers is not None:
            compute_registers(body.who, compute_wgs, memory_registers)
        inputs, outputs = streams.over(grid, depth)
        releases = Releases.of(inputs, compute_wgs, manual_consumed)
        producer = Producer(inputs, releases, manual_produced)
        memory_wg = compute_wgs if memory_wg is None else memory_wg
        leader = 1 if memory_wg == 0 else 0
        compute = Compute(
            body, streams, producer, outputs, compute_wgs, axis, last, again, leader
        )
        return cls(producer, compute, memory_registers, memory_wg)

    def declarations(self) -> dict[str, Any]:
        """Returns the declarations of all buffers and barriers."""
        return {
            "inputs": self.producer.declarations(),
            "outputs": self.compute.declarations(),
        }

    def names(self) -> dict[str, Any]:
        """Returns the names of the declarations, for messages."""
        return {"inputs": self.producer.names(), "outputs": self.compute.names()}

    def run(
        self,
        memory: dict[str, Any],
        *,
        context: Callable[..., Any] | None,
        first: Any = None,
        last: Any = None,
    ) -> None:
        """Runs the pipeline; all warpgroups of the block call it.

        Args:
          memory: the buffers and barriers.
          context: of the compute warpgroups; see `Compute.run`.
          first, last: see `Producer.run`.
        """
        compute, wg = self.compute, lax.axis_index(self.compute.axis)
        registers = self.memory_registers
        if registers is None:
            control.when(wg == 0)(
                lambda: self.producer.inputs.copy_fixed(memory["inputs"])
            )
            compute.run(memory["inputs"], memory["outputs"], context)
            return
        theirs = compute_registers(compute.body.who, compute.warpgroups, registers)

        @control.when(wg == self.memory_wg)
        def _():
            set_max_registers(registers, action="decrease")
            self.producer.run(memory["inputs"], first=first, last=last)

        @control.when(wg != self.memory_wg)
        def _():
            set_max_registers(theirs, action="increase")
            compute.run(memory["inputs"], memory["outputs"], context)


def compute_registers(who: str, compute_wgs: int, memory_registers: int) -> int:
    """Returns the registers per thread of a compute warpgroup.

    They share what the memory warpgroup leaves of the registers with which the block
    was launched: `setmaxnreg.inc` waits for ever for more.

    Raises:
      ArgumentError: there is nothing to share.
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
