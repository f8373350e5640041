# SPDX-License-Identifier: Apache-2.0
"""The connection of JAX to the emulator.

An eager call runs directly, so that its errors are not wrapped. Under `jit` the
launch is a callback; JAX then wraps errors and keeps their text (`report.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from pallas_gpu import _jax, errors, types
from pallas_gpu.emulator import report
from pallas_gpu.emulator.gpu import inline
from pallas_gpu.emulator.gpu.machine.launch import run_devices
from pallas_gpu.emulator.launches import by_device
from pallas_gpu.emulator.rendezvous import Rendezvous, running
from pallas_gpu.entry import call, scope
from pallas_gpu.entry.interpret import Observed

Operands = Sequence[Sequence[Any]]
Run = Callable[[call.CallParams, Operands], list[list[np.ndarray]]]


def run(params: call.CallParams, arrays: Operands) -> list[list[np.ndarray]]:
    """Runs a launch, given the operands of each device that takes part in it.

    Returns:
      For each device, an array for each result.
    """
    return MACHINES[params.mesh.machine](params, arrays)


def _run_on_gpu(params: call.CallParams, arrays: Operands) -> list[list[np.ndarray]]:
    interpret = params.interpret
    if getattr(interpret, "emitted", False):
        return _run_code(params, arrays)
    unknown = inline.of_unknown_effect(params)
    if unknown is None:
        return run_devices(params, arrays)
    inline.require_schedules(params, unknown)
    try:
        return _run_code(params, arrays)
    except errors.NotModelledError as error:
        raise inline.not_modelled(unknown, error) from None


# What runs a kernel, by its mesh's machine.
MACHINES: dict[str, Run] = {"gpu": _run_on_gpu}


def _run_code(params: call.CallParams, arrays: Operands) -> list[list[np.ndarray]]:
    """Runs the code that a kernel is lowered to."""
    interpret = params.interpret
    if not isinstance(interpret, Observed):
        return call.ABOVE.emitted_code(params, arrays)

    def run(schedule: Any, *_: Any) -> tuple[list[np.ndarray], int]:
        once = dataclasses.replace(params, interpret=schedule)
        return [x for own in call.ABOVE.emitted_code(once, arrays) for x in own], 0

    results = interpret.recorder.launch(
        params, lambda: run, emitted=True, devices=len(arrays)
    )
    return by_device(results, len(arrays))


def _eager(params: call.CallParams, arrays: Sequence[Any]) -> list[jax.Array]:
    (results,) = run(params, [arrays])
    placed = [x.sharding for x in arrays if isinstance(x, jax.Array) and x.committed]
    place = _place_of_results(placed)
    return [jax.device_put(x, place) for x in results]


def _place_of_results(placed: Sequence[Any]) -> Any:
    """Returns where an eager call's results go, as `jax.jit` would place them.

    That is every device of the committed operands, which each of them has whole
    (`entry/placement.py`) and the first of which decides; or the default device.
    """
    if not placed:
        return None
    first = placed[0]
    if len(first.device_set) == 1:
        return next(iter(first.device_set))
    mesh = first.mesh if isinstance(first, jax.NamedSharding) else None
    if mesh is None:
        devices = sorted(first.device_set, key=lambda device: device.id)
        mesh = jax.sharding.Mesh(np.array(devices), ("devices",))
    return jax.NamedSharding(mesh, jax.P())


def _as_callback(*args: Any, **params: Any) -> list[jax.Array]:
    launch = call.CallParams(**params)
    callback = _alone(launch)
    if launch.devices is not None:
        args = (jax.lax.axis_index(launch.devices.names), *args)
        callback = _with_others(launch, launch.devices)
    results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in launch.out_avals]
    if launch.is_observable:
        return io_callback(callback, results, *args)
    return jax.pure_callback(callback, results, *args)


def _alone(launch: call.CallParams) -> Callable[..., list[np.ndarray]]:
    def callback(*arrays: Any) -> list[np.ndarray]:
        with running():
            (results,) = report.from_the_kernels_line(lambda: run(launch, [arrays]))
        return results

    return callback


def _with_others(
    launch: call.CallParams, devices: types.Devices
) -> Callable[..., list[np.ndarray]]:
    """Returns the callback of a kernel whose devices access each other's memory."""
    if jax.process_count() > 1:
        raise errors.UnsupportedError(
            f"kernel {launch.name}: the emulator runs the devices of one process",
            expected=f"the {devices.size} devices of the mesh in this process",
            got=f"{jax.process_count()} processes",
            hint="XLA_FLAGS=--xla_force_host_platform_device_count=N gives one process "
            "N devices",
            where=launch.defined_at,
        )
    meetings = Rendezvous(
        devices.size, lambda each: run(launch, each), launch.name, launch.defined_at
    )

    def callback(device: Any, *arrays: Any) -> list[np.ndarray]:
        return report.from_the_kernels_line(
            lambda: meetings.launch(int(device), arrays)
        )

    return callback


_lower_callback = _jax.mlir.lower_fun(_as_callback, multiple_results=True)


def lowering_rule(ctx: Any, *args: Any, **params: Any) -> Any:
    """MLIR lowering of the kernel primitive to a callback into the emulator."""
    if _jax.is_export(ctx):
        raise errors.UnsupportedError(
            f"kernel {params['name']}: the emulator cannot be exported",
            expected="a function that is exported for GPUs",
            got="jax.export with the CPU among its platforms, or interpret=True",
            hint='jax.export.export(f, platforms=["cuda"]), which needs no GPU',
            where=scope.called_at(),
        )
    return _lower_callback(ctx, *args, **params)


def _cpu_rule(ctx: Any, *args: Any, **params: Any) -> Any:
    if params["interpret"] is False:
        raise call.no_device(call.CallParams(**params))
    return lowering_rule(ctx, *args, **params)


call.ABOVE.eager_emulator = _eager
call.ABOVE.emulator_lowering = lowering_rule
call.ABOVE.cpu_lowering = _cpu_rule
