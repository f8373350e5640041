# SPDX-License-Identifier: Apache-2.0
"""Runs a plan on a device: the part of a call that every call pays for."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from pallas_gpu import arch, types
from pallas_gpu.bridge.torch import tensors
from pallas_gpu.bridge.torch.code import Code, code_for
from pallas_gpu.bridge.torch.plan import Plan, Step, on_cpu
from pallas_gpu.entry import call

# All arrays of a call: arguments, constants, then what the steps make.
Values = list[Any]
Run = Callable[[Values], None]


class Program:
    """A plan with its code and its constants on one device.

    Attributes:
      codes: of its kernels; none on a CPU.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.codes: list[Code] = []
        self._device, self._target = device, target_of(device)
        self._at = {x: i for i, x in enumerate(plan.arguments)}
        self._constants = self._place_constants(plan)
        made = [x for step in plan.steps for x in step.makes]
        self._at.update({x: len(self._at) + i for i, x in enumerate(made)})
        self._blank = [None] * len(made)
        self._steps = [self._step(step) for step in plan.steps]
        self._results = [self._at[x] for x in plan.results]
        self._updated = plan.updated

    def __call__(self, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs it; arguments that are updated are so afterwards."""
        gpu = self._device.index
        if self._target is None:
            return self._run(arguments)
        if not hasattr(_THREAD, "has_context"):
            # Only the CUDA runtime makes a context current in a new thread.
            torch.cuda.Event().record()
            _THREAD.has_context = True
        if is_capturing():
            # A graph has the addresses of constants and of code.
            _CAPTURED.add(self)
        if gpu == current_device():
            return self._run(arguments)
        with torch.cuda.device(gpu):
            return self._run(arguments)

    def _run(self, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        values: Values = [*arguments, *self._constants, *self._blank]
        for step in self._steps:
            step(values)
        for i in self._updated:  # so that autograd knows of it
            torch.autograd.graph.increment_version(arguments[i])
        return [values[i] for i in self._results]

    def _place_constants(self, plan: Plan) -> list[torch.Tensor]:
        read = dict.fromkeys(x for step in plan.steps for x in step.reads)
        constants = [x for x in read if x.constant is not None]
        self._at.update({x: len(self._at) + i for i, x in enumerate(constants)})
        return [tensors.from_numpy(x.constant, self._device) for x in constants]

    def _step(self, step: Step) -> Run:
        if isinstance(step.does, call.CallParams):
            return self._launch(step, step.does)
        function, (result,) = step.does.run, (self._at[x] for x in step.makes)
        reads = [self._at[x] for x in step.reads]

        def run(values: Values) -> None:
            values[result] = function(*[values[i] for i in reads])

        return run

    def _launch(self, step: Step, params: call.CallParams) -> Run:
        device = self._device
        operands = [self._at[x] for x in step.reads]
        results = [self._at[x] for x in step.makes]
        shared = []
        for i, j in step.in_place.items():
            shared.append((results[j], operands[i], i in step.copied))
            operands[i] = results[j]
        fresh = [
            (index, x.shape, tensors.strides(x.shape), tensors.torch_dtype(x.dtype))
            for j, (index, x) in enumerate(zip(results, step.makes, strict=True))
            if j not in step.in_place.values()
        ]
        emulated = isinstance(params.interpret, types.InterpretParams)
        if self._target is None or emulated:
            start = _emulation(params, operands, results)
        else:
            code = code_for(params, self._target, device.index)
            self.codes.append(code)
            start = _launch(code, params, operands, results, device)
        empty = torch.empty_strided  # takes two thirds of the time of torch.empty

        def run(values: Values) -> None:
            for result, operand, is_copied in shared:
                x = values[operand]
                values[result] = x.clone() if is_copied else x
            for index, shape, strides, dtype in fresh:
                values[index] = empty(shape, strides, dtype=dtype, device=device)
            start(values)

        return run


def _launch(
    code: Code,
    params: call.CallParams,
    operands: Sequence[int],
    results: Sequence[int],
    device: torch.device,
) -> Run:
    index = device.index
    buffers = (*operands, *results)
    tables: list[Any] = []  # of calls that are over; several threads may call
    make_table = ctypes.c_uint64 * (
        len(buffers) + len(params.work_operands) + len(params.work_results)
    )
    work = _workspace(params, device)
    n_in = len(operands)

    def run(values: Values) -> None:
        addresses = [values[i].data_ptr() for i in buffers]
        if work is not None:
            filled, made = work()
            addresses[n_in:n_in] = [x.data_ptr() for x in filled]
            addresses += [x.data_ptr() for x in made]
        table = tables.pop() if tables else make_table()
        table[:] = addresses
        code(current_stream(index), table)
        tables.append(table)

    return run


def _workspace(params: call.CallParams, device: torch.device) -> Any:
    """Returns what makes the arrays that a launch adds; None if there are none.

    It returns those with initial contents, which are operands, too, and all.
    """
    filled = [float(value) for _, value in params.work_operands]
    types = [
        (aval.shape, tensors.torch_dtype(aval.dtype)) for aval in params.work_results
    ]
    if not types:
        return None

    def make() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        made = [torch.empty(s, dtype=dtype, device=device) for s, dtype in types]
        first = [x.fill_(value) for x, value in zip(made, filled, strict=False)]
        return first, made

    return make


def _emulation(
    params: call.CallParams, operands: Sequence[int], results: Sequence[int]
) -> Run:
    """Returns what runs a kernel in the emulator, with tensors of any device."""
    named = params.as_dict()
    wide = any(x.dtype.itemsize == 8 for x in params.out_avals) or None

    def run(values: Values) -> None:
        arrays = [tensors.to_numpy(values[i]) for i in operands]
        with on_cpu(), jax.enable_x64(wide or jax.config.jax_enable_x64):
            made = call.kernel_p.bind(*map(jax.numpy.asarray, arrays), **named)
        with torch.no_grad():
            for i, array in zip(results, made, strict=True):
                values[i].copy_(tensors.from_numpy(array, torch.device("cpu")))

    return run


_THREAD = threading.local()
_CAPTURED: set[Program] = set()

# What torch's own compiler calls: public functions take many times as long.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_stream: Callable[[int], int] = _raw_stream or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
is_capturing = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


def target_of(device: torch.device) -> arch.GpuTarget | None:
    """Returns the target of a GPU of torch; None for a CPU.

    Raises:
      TargetError: the GPU is not supported.
    """
    if device.type != "cuda":
        return None
    return arch.target_of_capability(*torch.cuda.get_device_capability(device))
