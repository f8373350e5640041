# SPDX-License-Identifier: Apache-2.0
"""The target that a ready kernel is written for, where there is one for each."""

from __future__ import annotations

import functools

import jax

import pallas_gpu as plgpu
from pallas_gpu import arch, errors


def chosen(compiler_params: plgpu.CompilerParams | None) -> arch.GpuTarget:
    """Returns the target of the parameters, else that of an offline compilation.

    Elsewhere it is that of the attached GPU; without a supported GPU it is the default
    of all kernels.
    """
    if compiler_params is not None and compiler_params.target is not None:
        return arch.target(compiler_params.target)
    if (offline := plgpu.offline.current_target()) is not None:
        return arch.target(offline)
    return _attached()


@functools.cache
def _attached() -> arch.GpuTarget:
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return arch.DEFAULT_TARGET
    major, minor = map(int, str(device.compute_capability).split("."))
    try:
        return arch.target_of_capability(major, minor)
    except errors.TargetError:
        # The emulator runs anywhere; a launch on this GPU is refused by the runtime.
        return arch.DEFAULT_TARGET
