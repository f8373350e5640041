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


def run(
    params: call.CallParams, arrays: Sequence[Sequence[Any]]
) -> list[list[np.ndarray]]:
    """Lowers a kernel for its target, runs the module and returns the results.

    Args:
      params: of the kernel primitive.
      arrays: the operands of each device, batch axes included.

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
    return _run(params, build.module, arrays, getattr(interpret, "seed", 0))


def run_module(
    params: call.CallParams, module: Any, arrays: Sequence[Any]
) -> list[np.ndarray]:
    """Runs the module of a kernel of one device; returns its results."""
    (results,) = _run(params, module, [arrays], 0)
    return results


def _run(
    params: call.CallParams, module: Any, arrays: Sequence[Sequence[Any]], seed: int
) -> list[list[np.ndarray]]:
    from pallas_gpu.lockstep import machine  # thirty files that few programs need

    operands = [[np.asarray(x) for x in own] for own in arrays]
    # What the launch adds: operands of given contents, and results that the kernel
    # writes in place, which are anything at first.
    filled = [np.full(a.shape, x, a.dtype) for a, x in params.work_operands]
    n_out = len(params.out_avals)
    added = {
        n_out + i: filled[i] if i < len(filled) else _anything(aval)
        for i, aval in enumerate(params.work_results)
    }
    initial = [{j: own[i] for i, j in params.aliases} | added for own in operands]
    results = [*params.out_avals, *params.work_results]
    kept = {n_out + i for i, work in enumerate(params.workspace) if work.array.kept}
    done = machine.run_on_devices(
        module, [[*own, *filled] for own in operands], results, initial, seed, kept
    )
    return [own[:n_out] for own in done]


def _anything(aval: Any) -> np.ndarray:
    """Returns an array of bytes that are no likely result."""
    data = np.empty(aval.shape, aval.dtype)
    data.reshape(-1).view(np.uint8)[...] = 0xA5
    return data


call.ABOVE.emitted_code = run
