# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: a kernel that starts before the one before has ended.

A kernel that waits for its prerequisites is launched as soon as each CTA of the kernel
before it has allowed that, or has ended. What both kernels do not exchange overlaps:
the launch itself, barriers, tensor maps, positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_gpu import errors
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry

__all__ = ["griddepcontrol_launch_dependents", "griddepcontrol_wait"]

wait_p = registry.define("griddepcontrol_wait", "griddepcontrol", waits=True)
launch_dependents_p = registry.define(
    "griddepcontrol_launch_dependents", "griddepcontrol"
)


def griddepcontrol_wait() -> None:
    """Waits until the kernels before this one have ended and their results are visible.

    PTX: griddepcontrol.wait. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp. A kernel that contains it is
    launched early (programmatic dependent launch): it may start while the kernel before
    it in the stream still runs, once that one has called
    `griddepcontrol_launch_dependents` in every CTA. Each warpgroup calls it, or is
    ordered after one that has, before it accesses GMEM: arguments may not be there yet,
    and the memory of results may still be in use. Setting up barriers and computing
    indices may come before.

    Kernels in XLA's command buffers do not overlap: each is a CUDA graph of its own
    there. `jax.jit(f, compiler_options={"xla_gpu_enable_command_buffer": ""})` launches
    without them.

    Raises:
      KernelError: called outside a kernel.

    Example:
      >>> plgpu.griddepcontrol_wait()
      >>> o_ref[...] = x_ref[...] + 1
    """
    ops.bind(wait_p, {})


def griddepcontrol_launch_dependents() -> None:
    """Allows the kernel after this one to start, if it waits for its prerequisites.

    PTX: griddepcontrol.launch_dependents. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp; a CTA counts from its first
    call, or from its end. It promises nothing of this kernel's memory: the next one
    sees it after `griddepcontrol_wait`, which still waits until this kernel has ended.
    Without such a kernel behind it, it does nothing.

    Raises:
      KernelError: called outside a kernel.
    """
    ops.bind(launch_dependents_p, {})


def check_dependencies(sites: Any, enclosing: Sequence[str]) -> None:
    """Raises UnsupportedError for a wait in a kernel that loads its own position.

    The launch passes a position on an axis around it, such as that of `jax.shard_map`,
    in GMEM. The kernel loads it when it starts, before it can wait.
    """
    if not enclosing:
        return
    for site in sites:
        if site.op.primitive is wait_p:
            raise errors.UnsupportedError(
                "griddepcontrol_wait in a kernel that asks for its position on an axis "
                "around the launch is not supported",
                expected="positions on the kernel's own axes",
                got=f"a position on {', '.join(map(repr, enclosing))}",
                hint="pass the position as an argument, and load it after the wait",
                where=site.where,
            )
