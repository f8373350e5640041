# SPDX-License-Identifier: Apache-2.0
"""One launch on the SparseCores of a chip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_gpu import errors, types
from pallas_gpu.arch import tpu
from pallas_gpu.emulator import launches, run
from pallas_gpu.emulator.engine import evaluate
from pallas_gpu.emulator.engine.execution import Execution, report
from pallas_gpu.emulator.engine.memory import fresh_elements
from pallas_gpu.emulator.engine.orders.choices import Directed
from pallas_gpu.emulator.engine.plan import Plan
from pallas_gpu.emulator.engine.scheduler import Pool
from pallas_gpu.entry import call, trial
from pallas_gpu.program.walk import last_line
from pallas_gpu.sparsecore.emulator.cores import Core, Device, Subcore
from pallas_gpu.sparsecore.emulator.memory import Array
from pallas_gpu.sparsecore.emulator.semaphores import SemaphoreArray
from pallas_gpu.sparsecore.lowering import machine
from pallas_gpu.sparsecore.types import HBM, MACHINE, SubcoreMeshes


class _SparseCores:
    """The SparseCores of a chip, as the emulator's launches see them."""

    def ready(self, params: call.CallParams) -> call.CallParams:
        """Returns the parameters as they are.

        Raises:
          UnsupportedError: the compiler has no code for an operation: what the
            emulator accepts, it accepts.
        """
        target = tpu.target(params.compiler_params.target or tpu.DEFAULT_TARGET)
        trial.require_code(params, target, lambda *_: True)
        return params

    def names(self, params: call.CallParams) -> list[str]:
        """Returns the names of the results."""
        return [_name(params, i) for i in _results(params)]

    def launch(
        self,
        params: call.CallParams,
        arrays: Sequence[Sequence[Any]],
        plan: Plan,
        schedule: types.InterpretParams,
        choices: Directed | None,
    ) -> Launch:
        """Returns the launch, on one device."""
        execution, (own,) = launches.execution_of(schedule, choices), arrays
        return Launch(params, own, plan, schedule, execution)


SPARSECORES = _SparseCores()


def _results(params: call.CallParams) -> range:
    return range(params.num_inputs, len(params.jaxpr.invars))


def _name(params: call.CallParams, i: int) -> str:
    count, aval = params.num_inputs, params.jaxpr.invars[i].aval
    which = f"input {i}" if i < count else f"output {i - count}"
    return f"{which} (HBM {np.dtype(aval.dtype).name}{list(aval.shape)})"


class Launch:
    """A kernel on SparseCores.

    Args:
      params: parameters of the kernel primitive.
      arrays: operands.
      plan: of the body.
      schedule: parameters of the emulator.
      execution: the run.

    Attributes:
      execution: the run.
    """

    def __init__(
        self,
        params: call.CallParams,
        arrays: Sequence[Any],
        plan: Plan,
        schedule: types.InterpretParams,
        execution: Execution,
    ):
        self.execution = execution
        execution.kind = "core"
        execution.default_line = lambda: last_line(params.jaxpr)
        self._params, self._plan = params, plan
        self._device = Device(execution, schedule)
        self._partial = schedule.partial_results or schedule.like_upstream
        self._refs = [
            Array(_name(params, i), np.asarray(x), None, HBM, i, read_only=True)
            for i, x in enumerate(arrays)
        ]
        self._refs += [
            self._result(i, aval)
            for i, aval in zip(_results(params), params.out_avals, strict=True)
        ]
        for operand, result in params.aliases:
            array = self._refs[params.num_inputs + result]
            array.data, array.written = np.array(arrays[operand]), None
        self._cores = self._make_cores()

    def _result(self, i: int, aval: Any) -> Array:
        data, written = fresh_elements(
            aval.shape, np.dtype(aval.dtype), self._device.zeros
        )
        array = Array(_name(self._params, i), data, written, HBM, i)
        array.admits_poison = self._partial and written is not None
        return array

    def _make_cores(self) -> list[Core]:
        device = self._device
        mesh = self._params.mesh
        (core_axis, count), *rest = mesh.axes
        for index in range(count):
            core = Core(device, index)
            at = {core_axis: index}
            if not rest or isinstance(mesh, SubcoreMeshes):
                core.add(at, None)
            for axis, subcores in rest:
                for subcore in range(subcores):
                    core.add(at | {axis: subcore}, subcore)
        return device.cores

    def pools(self) -> list[Pool]:
        """Returns the cores, which all run at once."""
        for core in self._cores:
            for thread in core.threads:
                body = evaluate.run(thread, self._plan, self._refs)
                thread.generator = evaluate.guarded(thread, body)
        count = len(self._cores)
        return [Pool(iter(self._cores), count, count, "cores", "all cores run at once")]

    def finish(self) -> None:
        """Reports late signals, and elements of results that nobody has stored."""
        left = self._device.like_upstream
        for thread in (t for core in self._cores for t in core.threads if not left):
            assert isinstance(thread, Subcore)
            for found in thread.own.values():
                if isinstance(found, SemaphoreArray):
                    found.require_zero()
        for array in self._refs[self._params.num_inputs :]:
            if array.written is None or array.admits_poison or array.written.all():
                continue
            first = np.unravel_index(int(np.argmin(array.written)), array.shape)
            missing = array.written.size - int(np.count_nonzero(array.written))
            error = errors.UnwrittenResultError(
                f"{array.name} has elements that no subcore has stored",
                expected="a copy to each element of a result",
                got=f"{missing} of {array.written.size} elements without a value, the "
                f"first at {[int(i) for i in first]}",
                hint="copy to the rest too; if it is meant to be undefined, run with "
                "interpret=plsc.InterpretParams(partial_results=True)",
                where=last_line(self._params.jaxpr),
            )
            elements = tuple((int(i), int(i) + 1) for i in first)
            report(error.about(buffer=array.name, elements=elements))

    def dissolve(self) -> None:
        """Drops what refers to its owner."""
        for core in self._cores:
            core.release()
        self._cores = []

    def results(self) -> list[np.ndarray]:
        """Returns the results."""
        return [array.data for array in self._refs[self._params.num_inputs :]]

    @property
    def started(self) -> int:
        """How many cores have started."""
        return self._params.mesh.axes[0][1]


def _run(
    params: call.CallParams, arrays: Sequence[Sequence[Any]]
) -> list[list[np.ndarray]]:
    if getattr(params.interpret, "emitted", False):
        raise errors.UnsupportedError(
            "the code of kernels for SparseCores is not run on the CPU",
            expected="interpret=None, True or InterpretParams(...)",
            got="emitted=True",
            hint="omit emitted",
        )
    return launches.run_devices(SPARSECORES, params, arrays)


def explore_kernel(
    params: call.CallParams, arrays: Sequence[Any], **limits: Any
) -> Any:
    """Runs a launch in each order; see `launches.explore_kernel`."""
    return launches.explore_kernel(SPARSECORES, params, arrays, **limits)


# The compiler of the same machine is asked first; see `ready`.
assert machine.MACHINE == MACHINE
run.MACHINES[MACHINE] = _run
