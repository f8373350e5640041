# SPDX-License-Identifier: Apache-2.0
"""Why no choice of layouts satisfies a kernel."""

from __future__ import annotations

from pallas_gpu import errors
from pallas_gpu.lowering.inference import solver
from pallas_gpu.lowering.inference.assembly import Assembly


def check_domains(problem: Assembly) -> None:
    pass


def conflict(problem: Assembly) -> errors.LayoutError:
    found = solver.find_conflict(problem.problem())
    return errors.LayoutError("conflict", got=found)
