# SPDX-License-Identifier: Apache-2.0
"""Cluster launch control: clusters that take over the work of others.

The answer is opaque on hardware: here it is four words, the first whether there is
work, the second its position among the clusters of the grid.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from pallas_gpu import errors
from pallas_gpu.emulator.engine import ordering
from pallas_gpu.emulator.engine.execution import report
from pallas_gpu.emulator.engine.memory import Region
from pallas_gpu.emulator.engine.poison import Origin, Poisoned
from pallas_gpu.emulator.engine.tables import Key
from pallas_gpu.emulator.engine.waits import TURN, Run
from pallas_gpu.emulator.gpu import cluster
from pallas_gpu.emulator.gpu.machine.cta import Cluster, Cta, Warpgroup
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.grids import launch_control
from pallas_gpu.primitives.grids.launch_control import ANSWER_BYTES


@dataclasses.dataclass
class _Refused:
    """Whether a CTA has seen an answer without work, and where."""

    where: str | None = None
    seen: bool = False


_REFUSED: Key[Cta, _Refused] = Key("refused requests", lambda _: _Refused())


@dataclasses.dataclass(slots=True)
class _Request:
    """A request in flight.

    Attributes:
      asker: the cluster that makes it.
      targets: where the answer has not arrived.
    """

    asker: Cluster
    targets: list[cluster.Target]
    answer: np.ndarray | None = None

    def advance(self) -> bool:
        """Takes work over, then writes the answer to one CTA after the other."""
        if self.answer is None:
            block = self.asker.take_over()
            words = [0, 0, 0, 0] if block is None else [1, block, 0, 0]
            self.answer = np.array(words, np.int32)
        target = self.targets.pop(0)
        dst = target.dst
        target.dst.store(self.answer.view(dst.dtype).reshape(dst.shape))
        target.barrier.complete_bytes(ANSWER_BYTES)
        return not self.targets


@registry.register(launch_control.try_cluster_cancel_p, registry.RuleKind.EMULATE)
def _request(
    wg: Warpgroup, operands: dict[str, Any], collective_axes: tuple[str, ...], **_: Any
) -> Run:
    # Which cluster asks first is a choice of the schedule.
    yield TURN
    cta = wg.cta
    threads = [axis for axis in collective_axes if axis == cta.mesh.thread_name]
    batched = bool(cta.cluster.batch)
    arms = not batched and all(wg.axis_index(axis) == 0 for axis in threads)
    asks = arms and all(wg.axis_index(axis) == 0 for axis in collective_axes)
    result, operand = operands["result"], operands["barrier"]
    barrier = operand.memory.one(operand)
    if asks:
        _require_open(wg)
        targets = []
        for other in cta.cluster.ctas:
            memory = cluster.counterpart(wg, result.memory, other)
            dst = Region(memory, result.place)
            theirs = operand.memory.same_in(other).one(operand)
            targets.append(cluster.Target(dst, theirs))
            wg.access(
                dst,
                writes=True,
                what=f"the answer to try_cluster_cancel in {memory.name}",
                by=(theirs.actor, theirs.phase + 1),
                hint=cluster.WAIT,
            )
    barrier.arrive(wg.release(), wg.location, ANSWER_BYTES if arms else 0)
    if asks:
        wg.group.in_flight.submit(_Request(cta.cluster, targets))
    return []


def _require_open(wg: Warpgroup) -> None:
    refused = _REFUSED.of(wg.cta)
    if refused.seen:
        error = errors.KernelError(
            f"{wg.name} asks for work after an answer without any",
            expected="no request after query_cluster_cancel has returned False",
            got=f"False at {refused.where}",
            hint="leave the loop when there is no work: PTX does not define a second "
            "request",
        )
        report(error)


@registry.register(launch_control.query_cluster_cancel_p, registry.RuleKind.EMULATE)
def _decode(
    wg: Warpgroup, operands: dict[str, Any], grid_names: tuple[str, ...], **_: Any
) -> list[Any]:
    if wg.cta.cluster.batch:
        return [np.bool_(False), *[np.int32(0)] * len(grid_names)]
    answer = wg.read(operands["result"])
    wg.fence(ordering.Fence.SMEM_WRITES)
    if isinstance(answer, Poisoned):
        report(answer.origin.error())
        answer = np.zeros_like(answer.value)
    granted, block = np.ascontiguousarray(answer).reshape(-1).view(np.int32)[:2]
    where = wg.location.where if wg.location is not None else None
    mesh = wg.cta.mesh
    if granted:
        indices = np.unravel_index(int(block), mesh.grid)
        positions = dict(zip(mesh.grid_names, indices, strict=True))
        return [np.bool_(True), *(np.int32(positions[name]) for name in grid_names)]
    refused = _REFUSED.of(wg.cta)
    refused.seen, refused.where = True, where
    origin = Origin(
        "query_cluster_cancel: the position of work that there is none of",
        f"one of {math.prod(mesh.grid)} positions is used although the cluster has "
        "taken none over",
        "use the positions only where the second result is True",
        where,
    )
    nothing = Poisoned(np.int32(0), np.array(True), origin)
    return [np.bool_(False), *[nothing] * len(grid_names)]
