# SPDX-License-Identifier: Apache-2.0
"""Kernels as emitted: their modules, interpreted, and their compilation by libtpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pallas_gpu import compiler
from pallas_gpu.arch import tpu
from pallas_gpu.entry.call import CallParams, kernel_p
from pallas_gpu.lowering.machine import Build
from pallas_gpu.sparsecore.runtime import stages as stages  # registers the machine
from pallas_gpu.sparsecore.runtime.offline_compiler import CompiledKernel
from pallas_gpu.sparsecore.types import chips
from tests.support.sparsecore import interpreter


def traced(function: Callable[..., Any], *args: Any, target: str) -> CallParams:
    """The parameters of the only kernel that a function calls, for a chip."""
    with chips.tracing_for(target):
        closed = jax.make_jaxpr(function)(*args)
    found = [eqn.params for eqn in closed.eqns if eqn.primitive is kernel_p]
    (params,) = found
    return CallParams(**params)


def lowered(function: Callable[..., Any], *args: Any, target: str = "tpu7x") -> Build:
    """The module of the only kernel that a function calls."""
    params = traced(function, *args, target=target)
    return compiler.lower(params, tpu.target(target))


def interpreted(
    function: Callable[..., Any], *args: Any, target: str = "tpu7x", seed: int = 0
) -> list[np.ndarray]:
    """What the emitted module computes."""
    build = lowered(function, *args, target=target)
    return interpreter.execute(build.module, *args, seed=seed)


def compiled(
    function: Callable[..., Any], *args: Any, target: str = "tpu7x"
) -> CompiledKernel:
    """The bundles that libtpu makes of the emitted module."""
    return finished(lowered(function, *args, target=target))


def finished(build: Build) -> CompiledKernel:
    """The bundles that libtpu makes of a module."""
    return compiler.run(build, after=compiler.LOWERED).compiled
