# SPDX-License-Identifier: Apache-2.0
"""The door: a kernel of a JAX program runs as the code that it is lowered to.

It is the one file of this room that knows the package: what the machine does is written
from the PTX ISA, so that it can find a mistake of the lowering.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_gpu import compiler
from pallas_gpu.entry import assumed_target, call


def run(params: call.CallParams, arrays: Sequence[Any]) -> list[np.ndarray]:
    """Lowers a kernel for its target, runs the module and returns the results.

    Args:
      params: of the kernel primitive.
      arrays: operands, batch axes included.

    Raises:
      NotModelledError: it has an operation that the machine does not execute.
      PtxError, DeadlockError: the code breaks a rule of the PTX ISA.
      Errors of the lowering.
    """
    interpret = params.interpret
    # Each operation then has the kernel's line.
    options = dataclasses.replace(params.compiler_params, line_info=True)
    target = assumed_target.target_of(options.target)
    build = compiler.lower(dataclasses.replace(params, compiler_params=options), target)
    return run_module(params, build.module, arrays, getattr(interpret, "seed", 0))


def run_module(
    params: call.CallParams, module: Any, arrays: Sequence[Any], seed: int = 0
) -> list[np.ndarray]:
    """Runs the module of a kernel; returns its results."""
    from pallas_gpu.lockstep import machine  # thirty files that few programs need

    operands = [np.asarray(x) for x in arrays]
    # What the launch adds: operands of given contents, and results that the kernel
    # writes in place, which are anything at first.
    filled = [np.full(a.shape, x, a.dtype) for a, x in params.work_operands]
    n_out = len(params.out_avals)
    initial = {j: operands[i] for i, j in params.aliases}
    initial |= {
        n_out + i: filled[i] if i < len(filled) else _anything(aval)
        for i, aval in enumerate(params.work_results)
    }
    results = [*params.out_avals, *params.work_results]
    done = machine.run_module(module, [*operands, *filled], results, initial, seed)
    return done[:n_out]


def _anything(aval: Any) -> np.ndarray:
    """Returns an array of bytes that are no likely result."""
    data = np.empty(aval.shape, aval.dtype)
    data.reshape(-1).view(np.uint8)[...] = 0xA5
    return data


call.register_emitted_code(run)
