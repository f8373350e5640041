# SPDX-License-Identifier: Apache-2.0
"""What XLA is told of a kernel that accesses the memory of other devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
