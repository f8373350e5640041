# SPDX-License-Identifier: Apache-2.0
"""The target that a ready kernel is written for, where there is one for each."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax

import pallas_gpu as plgpu
from pallas_gpu import arch, errors

# What the kernels for a target need, which later ones may not have.
_FEATURES = {
    arch.SM_90A: arch.Feature.WGMMA,
    arch.SM_100A: arch.Feature.TCGEN05,
}


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


def require(
    who: str,
    config: Any,
    compiler_params: plgpu.CompilerParams | None,
    kinds: Iterable[Any],
) -> None:
    """Checks that a configuration, one of some types, is for the parameters' target.

    The types say what `feature` their kernels need.
    """
    given = None if compiler_params is None else compiler_params.target
    if given is None or arch.target(given).has(config.feature):
        return
    names = {
        target.name: [f"{k.__name__}(...)" for k in kinds if k.feature is feature]
        for target, feature in _FEATURES.items()
    }
    raise errors.ArgumentError(
        f"{who}: the configuration is for another target",
        expected=", ".join(f"{' or '.join(x)} for {name}" for name, x in names.items()),
        got=f"{type(config).__name__} and target={given!r}",
        hint="omit config or target",
    )


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
