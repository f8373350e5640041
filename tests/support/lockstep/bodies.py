# SPDX-License-Identifier: Apache-2.0
"""Bodies of kernels, written with emitters, whose modules run in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pallas_gpu.lockstep.machine import run_module
from tests.support.finished import emitted


def run(
    emit: Callable[..., None], operands: Sequence[np.ndarray], results, **spec
) -> list[np.ndarray]:
    """Runs a body; arguments and results are those of the `run_kernel` fixture."""
    module = emitted(emit, operands, results, **spec)
    return run_module(module, operands, results)
