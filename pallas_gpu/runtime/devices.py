# SPDX-License-Identifier: Apache-2.0
"""What XLA is told of a kernel that accesses the memory of other devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from pallas_gpu import _jax, errors, types
from pallas_gpu.entry.call import CallParams
from pallas_gpu.lowering.traits import multicasts
from pallas_gpu.program.build import region_of
from pallas_gpu.runtime import cupti


def attributes(params: CallParams) -> dict[str, Any]:
    """Returns the attributes of the custom call that a kernel of one device lacks."""
    if params.devices is None or params.devices.size == 1:
        return {}
    # Arrays that are kept nowhere are new in each launch, of which the barrier tells.
    new = any(w.array.kept and not w.listed(params.devices) for w in params.workspace)
    skip = params.compiler_params.skip_device_barrier and not new
    found = {
        "skip_device_barrier": skip,
        "uses_xla_collective_metadata": True,
        # `entry/placement.py` refuses other meshes, and other orders.
        "xla_replica_ids": _listed(range(params.devices.size)),
    }
    symmetric = _symmetric(params)
    if any(symmetric):
        found["symmetric_memory_parameters"] = _listed(symmetric)
    return found


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(str(int(number)) for number in numbers)


def _symmetric(params: CallParams) -> list[bool]:
    """Returns which operands and results lie in symmetric memory.

    What is accessed through multimem addresses has to; so does every array where the
    devices belong to several processes.
    """
    jaxpr, n_in, n_work = params.jaxpr, params.num_inputs, len(params.work_operands)
    outputs = len(params.out_avals)
    added = len(params.workspace)
    if params.compiler_params.is_multi_process:
        return [True] * (n_in + n_work + outputs + added)
    inputs = region_of(jaxpr).inputs
    found = {site.origin(access.buffer) for site, access in multicasts(jaxpr)}
    own = [value in found for value in inputs]
    for operand, result in params.aliases:
        own[operand] = own[operand] or own[n_in + result]
    # Scratch of the kernel is behind operands and results.
    scratch = not found <= set(inputs)
    return [*own[:n_in], *[scratch] * n_work, *own[n_in:], *[scratch] * added]


def present(ctx: Any, devices: types.Devices | None) -> types.Devices | None:
    """Returns devices with their ids if a program is lowered for GPUs that are here.

    Args:
      ctx: that of JAX's lowering rule.
      devices: the mesh around a kernel.
    """
    mesh = _jax.mesh_of_lowering(ctx)
    if devices is None or mesh is None or _jax.is_export(ctx):
        return devices
    here = set(jax.local_devices()) if cupti.first_gpu() is not None else set()
    if not set(mesh.devices.flat) <= here:
        return devices
    return dataclasses.replace(devices, present=tuple(d.id for d in mesh.devices.flat))


def require_one_process(ctx: Any, params: CallParams) -> None:
    """Raises UnsupportedError for devices of processes that the kernel does not expect.

    Args:
      ctx: that of JAX's lowering rule.
    """
    mesh = _jax.mesh_of_lowering(ctx)
    if params.devices is not None and mesh is not None:
        check_processes(mesh.devices.flat, params)


def check_processes(devices: Iterable[Any], params: CallParams) -> None:
    """As `require_one_process`, of the devices of a mesh."""
    processes = {device.process_index for device in devices}
    if len(processes) > 1 and not params.compiler_params.is_multi_process:
        raise errors.UnsupportedError(
            f"kernel {params.name}: devices of several processes are in the mesh",
            expected="devices of one process",
            got=f"{len(processes)} processes",
            hint="pass CompilerParams(is_multi_process=True) if XLA can map the memory "
            "of the other processes' devices, or use the collectives of jax.lax",
            where=params.defined_at,
        )
