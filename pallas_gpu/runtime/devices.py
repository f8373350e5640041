# SPDX-License-Identifier: Apache-2.0
"""What XLA is told of a kernel that accesses the memory of other devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from pallas_gpu import _jax, errors
from pallas_gpu.entry.call import CallParams
from pallas_gpu.lowering.traits import multicasts
from pallas_gpu.program.build import region_of


def attributes(params: CallParams, replica_ids: Sequence[int]) -> dict[str, Any]:
    """Returns the attributes of the custom call that a kernel of one device lacks.

    Args:
      replica_ids: the devices of the mesh; empty if they are not known.
    """
    if params.devices is None or params.devices.size == 1:
        return {}
    found = {
        "skip_device_barrier": params.compiler_params.skip_device_barrier,
        "uses_xla_collective_metadata": True,
        "xla_replica_ids": _listed(replica_ids),
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


def replica_ids(ctx: Any, params: CallParams) -> tuple[int, ...]:
    """Returns the devices of the mesh around a kernel that JAX lowers.

    Empty for an `AbstractMesh`.

    Args:
      ctx: that of JAX's lowering rule.

    Raises:
      UnsupportedError: as `ids_in_order`.
    """
    mesh = _jax.mesh_of_lowering(ctx)
    if mesh is None or params.devices is None:
        return ()
    return ids_in_order(list(mesh.devices.flat), params)


def ids_in_order(devices: Sequence[jax.Device], params: CallParams) -> tuple[int, ...]:
    """Returns the ids of the devices of a mesh, in row-major order.

    Raises:
      UnsupportedError: they are not those of all devices in their order, or several
        processes have them and the kernel does not say so.
    """
    ids = tuple(device.id for device in devices)
    if ids != tuple(range(len(ids))):
        raise errors.UnsupportedError(
            f"kernel {params.name}: the mesh does not have all devices in row-major "
            "order",
            expected=f"devices 0 to {len(ids) - 1}, the last axis varying fastest",
            got=f"devices {ids}",
            hint="jax.sharding.Mesh(np.array(jax.devices()).reshape(sizes), names)",
            where=params.defined_at,
        )
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
    return ids
