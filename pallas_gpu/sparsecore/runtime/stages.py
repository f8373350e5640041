# SPDX-License-Identifier: Apache-2.0
"""The stages after the complete module: serialization and offline compilation.

Importing this module adds them to the stages of SparseCores.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_gpu.lowering.machine import Build, add_passes
from pallas_gpu.sparsecore.lowering import machine
from pallas_gpu.sparsecore.runtime import offline_compiler
from pallas_gpu.sparsecore.runtime.custom_call import CustomCall, config_text
from pallas_gpu.sparsecore.runtime.serialize import serialize

# Compiler parameters that libtpu has under the same names.
_SWITCHES = ("skip_device_barrier", "disable_bounds_checks", "disable_semaphore_checks")


def serialize_module(build: Build) -> Build:
    """Serializes the module, which is not modified."""
    return build.replace(serialized=serialize(build.module))


def custom_call(build: Build) -> CustomCall:
    """Returns the call that runs a serialized build."""
    params = build.params
    options: Any = params.compiler_params
    config = config_text(
        build.serialized,
        cores=params.mesh.grid[0],
        tiling=options.tiling,
        opt_level=options.opt_level,
        **{name: getattr(options, name) for name in _SWITCHES},
    )
    inputs = tuple(range(params.num_inputs))
    return CustomCall(config, inputs, tuple(range(len(params.out_avals))))


def compile_offline(build: Build) -> Build:
    """Compiles the bytes to instruction bundles, without a TPU.

    Raises:
      OfflineUnavailableError: libtpu is missing.
      CompilationError: libtpu refuses the module, or ends its process.
    """
    types = [_type(var.aval) for var in build.params.jaxpr.invars]
    n = build.params.num_inputs
    compiled = offline_compiler.compile_kernel(
        [custom_call(build)],
        name=build.name,
        target=build.target,  # type: ignore[arg-type]
        operands=types[:n],
        results=types[n:],
    )
    return build.replace(compiled=compiled)


def _type(aval: Any) -> tuple[tuple[int, ...], str]:
    return tuple(int(n) for n in aval.shape), np.dtype(aval.dtype).name


add_passes(machine.MACHINE, serialize=serialize_module, compile=compile_offline)
