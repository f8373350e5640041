# SPDX-License-Identifier: Apache-2.0
"""One launch: a kernel's clusters, and the operands of each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from pallas_gpu import arch, resources, types
from pallas_gpu.arch.residency import Residency
from pallas_gpu.checks import references
from pallas_gpu.emulator import launches
from pallas_gpu.emulator.engine import evaluate
from pallas_gpu.emulator.engine.execution import Execution, report
from pallas_gpu.emulator.engine.orders.choices import Directed
from pallas_gpu.emulator.engine.orders.explore import Explored
from pallas_gpu.emulator.engine.plan import Plan
from pallas_gpu.emulator.engine.scheduler import Pool
from pallas_gpu.emulator.gpu.gmem import GlobalArray
from pallas_gpu.emulator.gpu.machine.cta import Cluster, Cta
from pallas_gpu.emulator.gpu.machine.device import Device, Machine
from pallas_gpu.emulator.gpu.machine.races import ClusterViewer
from pallas_gpu.entry import call, expand, trial
from pallas_gpu.memory import fences
from pallas_gpu.memory.sharing import inferred_members
from pallas_gpu.memory.workspace import WorkArray
from pallas_gpu.primitives.grids import griddepcontrol, launch_control
from pallas_gpu.program.build import region_of
from pallas_gpu.program.walk import last_line, uses


def run_devices(
    params: call.CallParams,
    arrays: Sequence[Sequence[Any]],
    choices: Directed | None = None,
) -> list[list[np.ndarray]]:
    """Runs a launch on all devices that take part; see `launches.run_devices`."""
    return launches.run_devices(_Gpu(), params, arrays, choices)


def run_kernel(
    params: call.CallParams, arrays: Sequence[Any], choices: Directed | None = None
) -> list[np.ndarray]:
    """Runs a launch on one device."""
    (results,) = run_devices(params, [arrays], choices)
    return results


def explore_kernel(
    params: call.CallParams, arrays: Sequence[Any], **limits: Any
) -> Explored[list[np.ndarray]]:
    """Runs a launch in each order; see `launches.explore_kernel`."""
    return launches.explore_kernel(_Gpu(), params, arrays, **limits)


class _Gpu:
    """A GPU, as the emulator's launches see it."""

    def ready(self, params: call.CallParams) -> call.CallParams:
        """Returns a launch with the fences that the compiler inserts.

        Raises:
          LayoutError: the compiler has no code for the kernel.
        """
        trial.require_code(params, _target(params))
        return params.with_body(
            fences.with_fences(params.jaxpr, params.mesh, params.compiler_params)
        )

    def names(self, params: call.CallParams) -> list[str]:
        """Returns the names of the results of a device."""
        return _names(params)[params.num_inputs :]

    def launch(
        self,
        params: call.CallParams,
        arrays: Sequence[Sequence[Any]],
        plan: Plan,
        schedule: types.InterpretParams,
        choices: Directed | None,
    ) -> _OnDevices:
        """Returns the launch on each of the devices."""
        devices = params.devices or 1
        machine = Machine(schedule, _target(params), devices, choices)
        each = zip(machine.devices, arrays, strict=True)
        return _OnDevices(machine, [Launch(params, d, own, plan) for d, own in each])


@dataclasses.dataclass
class _OnDevices:
    """A kernel on all devices of a machine."""

    machine: Machine
    launches: Sequence[Launch]

    @property
    def execution(self) -> Execution:
        return self.machine.execution

    def pools(self) -> list[Pool]:
        return [launch.pool() for launch in self.launches]

    def finish(self) -> None:
        for launch in self.launches:
            launch.finish()

    def dissolve(self) -> None:
        self.machine.dissolve()

    def results(self) -> list[np.ndarray]:
        return [array.data for launch in self.launches for array in launch.outputs]

    @property
    def started(self) -> int:
        return sum(launch.ctas for launch in self.launches)


def _target(params: call.CallParams) -> Any:
    return arch.target(params.compiler_params.target or arch.DEFAULT_TARGET)


class Launch:
    """A kernel on a device.

    Args:
      params: parameters of the kernel primitive.
      device: the device that runs it.
      arrays: operands, batch axes included.
      plan: of the body, that of its jaxpr or an observed copy.

    Attributes:
      outputs: the results, in the device's global memory.

    Raises:
      OutOfResources: a block exceeds the target's SMEM.
    """

    def __init__(
        self,
        params: call.CallParams,
        device: Device,
        arrays: Sequence[Any],
        plan: Plan | None = None,
    ):
        self._params = params
        self._plan = plan or launches.planned(params)
        self._device = device
        self._residency = _residency(params, device.target)
        device.execution.default_line = functools.cache(lambda: last_line(params.jaxpr))
        if uses(params.jaxpr, griddepcontrol.wait_p):
            device.start_early()
        elif device.everywhere and params.compiler_params.skip_device_barrier:
            device.start_alone()
        names = _names(params)
        stored = references.written(params.jaxpr) if device.like_upstream else ()
        self._inputs = [
            device.place(name, np.array(x), read_only=False)
            if ref in stored
            else device.place(name, np.asarray(x))
            for name, x, ref in zip(names, arrays, params.jaxpr.invars, strict=False)
        ]
        initial = {result: arrays[operand] for operand, result in params.aliases}
        self.outputs = [
            device.place(name, np.array(initial[i]), read_only=False)
            if i in initial
            else device.allocate(name, tuple(aval.shape), np.dtype(aval.dtype))
            for i, (name, aval) in enumerate(
                zip(names[len(arrays) :], params.out_avals, strict=True)
            )
        ]

        self._work = {
            work.key: self._placed(work, shape.shape)
            for work, shape in zip(params.workspace, params.work_results, strict=True)
        }

    def _placed(self, work: WorkArray, shape: tuple[int, ...]) -> GlobalArray:
        """Returns an array that the launch adds, with the axes in front of it."""
        array = work.array
        of = f" ({work.name})" if work.name else ""
        name = f"scratch GMEM {np.dtype(array.dtype).name}{list(array.shape)}{of}"
        dtype = np.dtype(array.dtype)
        if array.initial is None:
            return self._device.allocate(name, shape, dtype)
        filled = np.full(shape, array.initial, dtype)
        placed = self._device.place(name, filled, read_only=False)
        if array.kept:
            placed.earlier = None
            self._device.kept.add(placed)
        return placed

    def pool(self) -> Pool:
        """Returns the clusters, to be started as SMs become free."""
        params, residency = self._params, self._residency
        positions = math.prod(params.mesh.grid)
        launched = self._launched(positions)
        capacity = residency.clusters
        if uses(params.jaxpr, launch_control.try_cluster_cancel_p):
            # Any number: the device may have other work too.
            most = min(positions, capacity)
            capacity = self._device.execution.choices.randint(1, most)
        self._pool = Pool(
            self._clusters(launched, iter(range(launched, positions))),
            total=launched * math.prod(axis.size for axis in params.batch),
            capacity=capacity,
            what="CTAs" if residency.ctas_per_cluster == 1 else "clusters",
            limit=f"{residency}{self._device.suffix}",
        )
        return self._pool

    @property
    def ctas(self) -> int:
        """How many CTAs have started."""
        return self._pool.started * self._residency.ctas_per_cluster

    def _take_over(self) -> int | None:
        """Takes the next cluster out of the launch, and returns its position."""
        group = self._pool.cancel()
        if group is None:
            return None
        assert isinstance(group, Cluster)
        return int(np.ravel_multi_index(group.block, self._params.mesh.grid))

    def finish(self) -> None:
        """Checks what the launch leaves, once all CTAs have ended.

        Raises:
          RaceError: another device may access an array afterwards.
          SemaphoreError: a semaphore is not zero.
          UnwrittenResultError: a result has elements that nobody has stored.
        """
        self._device.require_unused()
        for require in self._device.at_end:
            require()
        results = region_of(self._params.jaxpr).inputs[self._params.num_inputs :]
        for array, ref in zip(self.outputs, results, strict=True):
            if not array.is_complete:
                report(array.incomplete(last_line(self._params.jaxpr, ref)))

    def _launched(self, positions: int) -> int:
        """Returns how many clusters of a grid are launched.

        Under dynamic scheduling these are as many as the device holds: any number, when
        it has other work too.
        """
        if not self._params.is_dynamic or self._params.batch:
            return positions
        most = min(positions, self._residency.clusters)
        return self._device.execution.choices.randint(1, most)

    def _clusters(self, launched: int, rest: Iterator[int]) -> Iterator[Cluster]:
        """Yields the first clusters in row-major order, each ready to run.

        Args:
          launched: how many of each grid.
          rest: the other positions, for those that claim them.
        """
        params = self._params
        rest = itertools.chain(rest, itertools.repeat(math.prod(params.mesh.grid)))
        mesh, body = params.mesh, self._plan
        lasting = _lasting(params.jaxpr)
        semantics = params.compiler_params.lowering_semantics
        inferred = inferred_members(params.jaxpr, semantics)
        for batch in itertools.product(*(range(axis.size) for axis in params.batch)):
            arrays = self._bind(batch)
            work = self._work_of(batch)
            around = {
                axis.name: int(arrays[axis.operand].data[0])
                for axis in params.enclosing
            }
            grid = itertools.product(*(range(n) for n in mesh.grid))
            for block in itertools.islice(grid, launched):
                cluster = Cluster(self._device, mesh, batch, block, rest)
                cluster.around |= around
                cluster.take_over = self._take_over
                cluster.lasting = lasting
                cluster.inferred_members = inferred
                viewer = ClusterViewer(cluster.name)
                refs = [array.seen_by(viewer) for array in arrays]
                seen = {key: array.seen_by(viewer) for key, array in work.items()}
                for cta in cluster.ctas:
                    own = self._own_work(batch, block, cta)
                    cta.work = seen | own
                    for wg in cta.warpgroups:
                        run = evaluate.run(wg, body, refs)
                        wg.generator = evaluate.guarded(wg, run)
                yield cluster

    def _bind(self, batch: tuple[int, ...]) -> list[GlobalArray]:
        """Returns an array for each reference of the body at a batch position."""
        axes = self._params.batch
        inputs = [
            array.at(
                tuple(
                    position
                    for position, axis in zip(batch, axes, strict=True)
                    if axis.batched[i]
                )
            )
            for i, array in enumerate(self._inputs)
        ]
        return inputs + [array.at(batch) for array in self.outputs]

    def _work_of(self, batch: tuple[int, ...]) -> dict[Hashable, GlobalArray]:
        """Returns the arrays that the launch adds and all CTAs of an instance share."""
        return {
            work.key: self._work[work.key].at(
                batch if work.array.sharing is types.Sharing.INSTANCE else ()
            )
            for work in self._params.workspace
            if work.array.sharing is not types.Sharing.CTA
        }

    def _own_work(
        self, batch: tuple[int, ...], block: tuple[int, ...], cta: Cta
    ) -> dict[Hashable, GlobalArray]:
        """Returns the arrays that the launch adds for one CTA."""
        return {
            work.key: self._work[work.key].at((*batch, *block, *cta.rank))
            for work in self._params.workspace
            if work.array.sharing is types.Sharing.CTA
        }


def _residency(params: call.CallParams, target: arch.GpuTarget) -> Residency:
    plan = expand.planned(params, target)
    return resources.residency(plan, target, params.mesh)


def _lasting(jaxpr: Any) -> Any:
    """Returns the body of the scope whose memory a kernel never uses otherwise.

    It is one around all other scopes, such as the one that scratch_types declares.
    """
    scopes = resources.scopes(jaxpr)
    if not scopes or scopes[0].enclosing:
        return None
    inside = all(scopes[0] in site.enclosing for site in scopes[1:])
    return scopes[0].eqn.params["jaxpr"] if inside else None


def _names(params: call.CallParams) -> list[str]:
    n_in, names = params.num_inputs, []
    operands = {n_in + result: operand for operand, result in params.aliases}
    for i, var in enumerate(params.jaxpr.invars):
        number = operands.get(i, i)
        which = f"input {number}" if number < n_in else f"output {number - n_in}"
        aval = var.aval
        names.append(f"{which} (GMEM {np.dtype(aval.dtype).name}{list(aval.shape)})")
    return names
