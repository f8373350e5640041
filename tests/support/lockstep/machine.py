# SPDX-License-Identifier: Apache-2.0
"""Runs emitted code on the CPU: a kernel's whole module, or the body of one kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallas_gpu.mosaic.gmem import GmemView
from pallas_gpu.mosaic.module import KernelBuilder, LaunchSpec
from tests.support.finished import finished
from tests.support.lockstep.launch import Host


def run(
    emit: Callable[..., None], operands: Sequence[np.ndarray], results, **spec
) -> list[np.ndarray]:
    """Runs a body; arguments and results are those of the `run_kernel` fixture."""
    types = [*operands, *results]
    builder = KernelBuilder(LaunchSpec("kernel", num_buffers=len(types), **spec))
    with builder as kb:
        views = [
            GmemView.whole(kb.buffers[i], i, t.shape, np.dtype(t.dtype))
            for i, t in enumerate(types)
        ]
        emit(kb, *views)
    return run_module(finished(builder), operands, results)


def run_module(
    module: ir.Module,
    operands: Sequence[np.ndarray],
    results: Sequence[Any],
    initial: Mapping[int, np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Runs a whole kernel's module.

    Args:
      module: as `pallas_gpu.lowering` gives it.
      operands: the arrays of the kernel.
      results: shapes and dtypes of what it returns.
      initial: contents of the results that are operands, too.

    Raises:
      NotModelled: it has an operation that the machine does not execute.
      KernelError: it breaks a rule of the PTX ISA.
    """
    outputs = [np.zeros(t.shape, t.dtype) for t in results]
    for i, contents in (initial or {}).items():
        outputs[i][...] = contents
    arrays = [*(np.array(x) for x in operands), *outputs]
    buffers = [x.reshape(-1).view(np.uint8) for x in arrays]
    with module.context:
        Host(buffers, len(operands)).run(module)
    return outputs
