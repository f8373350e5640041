# SPDX-License-Identifier: Apache-2.0
"""How kernels compose with JAX: a program for each row of docs/composition.md.

A row has four cells: called eagerly and under `jax.jit`, by `kernel` and by
`pallas_call`. A cell passes, or is refused with a text and a reason. The tests run all
cells; `tools/composition_table.py` writes the table.
"""

from __future__ import annotations

from tests.support.composition import (
    batching,
    compiling,
    control_flow,
    derivatives,
    devices,
    mutable,
    settings,
)
from tests.support.composition.row import CELLS, Refused, Row, Way

GROUPS: dict[str, tuple[Row, ...]] = {
    "vmap": batching.ROWS,
    "Derivatives": derivatives.ROWS,
    "Control flow": control_flow.ROWS,
    "Mutable arguments": mutable.ROWS,
    "Several devices": devices.ROWS,
    "Compilation and export": compiling.ROWS,
    "Settings, state and errors": settings.ROWS,
}

ROWS = [row for rows in GROUPS.values() for row in rows]

__all__ = ["CELLS", "GROUPS", "ROWS", "Refused", "Row", "Way"]
