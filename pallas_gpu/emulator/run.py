# SPDX-License-Identifier: Apache-2.0
"""One launch in the emulator, and how JAX reaches it.

An eager call runs directly, so that its errors arrive as they are. Under `jit` the
launch is a callback; JAX then wraps errors and keeps their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallas_gpu import _jax, arch, errors, resources, types
from pallas_gpu.emulator.engine import evaluate, plan
from pallas_gpu.emulator.engine.memory import Memory
from pallas_gpu.emulator.gpu.machine import Machine
from pallas_gpu.entry import call


def run_kernel(params: call.CallParams, arrays: Sequence[Any]) -> list[np.ndarray]:
    """Runs a launch on the CPU.

    Args:
      params: parameters of the kernel primitive.
      arrays: operands, batch axes included.

    Returns:
      An array for each result. Elements that nobody wrote are poison.

    Raises:
      KernelError and its classes: a mistake that the run showed.
      OutOfResources: a block asks for more than the target has.
      NotModelledError: the emulator lacks an operation.
    """
    interpret = params.interpret
    if not isinstance(interpret, types.InterpretParams):
        interpret = types.InterpretParams()
    _require_resources(params)
    machine = Machine(interpret, params.mesh)
    body = plan.plan_of(params.jaxpr)
    launch = _Launch(params, machine, [np.asarray(x) for x in arrays])
    # Index arithmetic wraps as on the GPU, also where numpy would warn.
    with jax.default_device(_cpu()), np.errstate(all="ignore"):
        for ctas in machine.clusters([axis.size for axis in params.batch]):
            for cta in ctas:
                refs = launch.bind(cta.batch)
                for wg in cta.warpgroups:
                    wg.generator = evaluate.guarded(wg, evaluate.run(wg, body, refs))
            machine.run(ctas)
            launch.settle()
    return [memory.data for memory in launch.outputs]


def _require_resources(params: call.CallParams) -> None:
    compiler = params.compiler_params
    target = arch.target(compiler.target or arch.DEFAULT_TARGET)
    resources.plan(
        params.jaxpr,
        target,
        params.name,
        compiler.reduction_scratch_bytes,
        params.mesh.warpgroups,
    )


def _cpu() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise errors.UnsupportedError(
            "the emulator needs JAX's CPU platform",
            expected="a CPU device beside the GPU",
            got=str(error),
            hint="set JAX_PLATFORMS=cuda,cpu, or leave it unset",
        ) from error


class _Launch:
    """Operands and results of a launch, and the part of each that a CTA sees."""

    def __init__(self, params: call.CallParams, machine: Machine, arrays: list[Any]):
        self._batch = params.batch
        names = _names(params)
        zeros = machine.params.uninitialized_memory == "zero"
        self.inputs = [
            Memory(name, types.GMEM, array, None, read_only=True)
            for name, array in zip(names, arrays, strict=False)
        ]
        self.outputs = [
            Memory.fresh(
                name, types.GMEM, tuple(aval.shape), np.dtype(aval.dtype), zeros
            )
            for name, aval in zip(names[len(arrays) :], params.out_avals, strict=True)
        ]
        if machine.params.detect_races:
            for memory in self.outputs:
                memory.owners = np.full(memory.shape, -1, np.int32)
        self._views: dict[tuple[int, ...], list[Memory]] = {}

    def bind(self, batch: tuple[int, ...]) -> list[Memory]:
        """Returns a memory for each reference of the body."""
        if batch not in self._views:
            # Only one batch position runs at a time; its results are views.
            self._views.clear()
            self._views[batch] = [
                *(
                    self._input(i, memory, batch)
                    for i, memory in enumerate(self.inputs)
                ),
                *(self._output(memory, batch) for memory in self.outputs),
            ]
        return self._views[batch]

    def settle(self) -> None:
        """Forgets the accesses of a cluster that has ended."""
        for views in self._views.values():
            for memory in views:
                if memory.history.records:
                    memory.history.records.clear()

    def _input(self, i: int, memory: Memory, batch: tuple[int, ...]) -> Memory:
        index = tuple(
            position
            for position, axis in zip(batch, self._batch, strict=True)
            if axis.batched[i]
        )
        if not index:
            return memory
        return Memory(memory.name, types.GMEM, memory.data[index], None, True)

    def _output(self, memory: Memory, batch: tuple[int, ...]) -> Memory:
        if not batch:
            return memory
        # The ellipsis keeps a view also where all axes are indexed.
        index: Any = (*batch, ...)
        written = None if memory.written is None else memory.written[index]
        view = Memory(memory.name, types.GMEM, memory.data[index], written)
        if memory.owners is not None:
            view.owners = memory.owners[index]
        return view


def _names(params: call.CallParams) -> list[str]:
    n_in, names = params.num_inputs, []
    for i, var in enumerate(params.jaxpr.invars):
        which = f"input {i}" if i < n_in else f"output {i - n_in}"
        aval = var.aval
        names.append(f"{which} (GMEM {np.dtype(aval.dtype).name}{list(aval.shape)})")
    return names


# --- JAX ------------------------------------------------------------------------------


def _eager(params: call.CallParams, arrays: Sequence[Any]) -> list[jax.Array]:
    results = run_kernel(params, arrays)
    # Results go where the operands were put on purpose, else to the default device.
    placed = [x for x in arrays if isinstance(x, jax.Array) and x.committed]
    device = next(iter(placed[0].devices())) if placed else None
    return [jax.device_put(x, device) for x in results]


def _as_callback(*args: Any, **params: Any) -> list[jax.Array]:
    launch = call.CallParams(**params)

    def callback(*arrays: Any) -> list[np.ndarray]:
        return run_kernel(launch, arrays)

    results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in launch.out_avals]
    return jax.pure_callback(callback, results, *args)


_lower_callback = _jax.mlir.lower_fun(_as_callback, multiple_results=True)


def lowering_rule(ctx: Any, *args: Any, **params: Any) -> Any:
    """MLIR lowering of the kernel primitive to a callback into the emulator."""
    return _lower_callback(ctx, *args, **params)


def _cpu_rule(ctx: Any, *args: Any, **params: Any) -> Any:
    if params["interpret"] is False:
        raise call.no_gpu(params["name"])
    return lowering_rule(ctx, *args, **params)


call.register_eager_emulator(_eager)
call.register_emulator_lowering(lowering_rule)
_jax.mlir.register_lowering(call.kernel_p, _cpu_rule, platform="cpu")
