# SPDX-License-Identifier: Apache-2.0
"""Writes docs/sparsecore_operations.md: which operations libtpu compiles, by chip.

Every operation is compiled for every element type and chip, in kernels of many
operations, which are halved where libtpu refuses one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallas_gpu import errors
from tests.support.sparsecore import emitted, lax_operations
from tests.support.sparsecore.modules import CHIPS
from tools.source_tree import ROOT

PAGE = ROOT / "docs/sparsecore_operations.md"
SCALAR_DTYPES = ("float32", "int32")
_HEAD = """# Operations of lax on SparseCores

Written by `make sparsecore-table` from compiles by libtpu: do not edit. Each operation
is one of `tests/support/sparsecore/lax_operations.py`, where the tests compare what the
emitted module computes with JAX. `+` compiles for v5p, v6e and tpu7x; a chip's name:
libtpu refuses it for the others. None of it was run on a TPU.

Narrow elements are vectors in VMEM under `CompilerParams(tiling="sparsecore")`.
"""

Make = Callable[[Sequence[str], Any, str], Any]


def compiled(make: Make, names: Sequence[str], dtype: str, chip: str) -> set[str]:
    """Returns the operations that compile."""
    args: Sequence[np.ndarray] = lax_operations.values(dtype, chip)
    if make is lax_operations.scalar_kernel_of:
        args = [np.zeros(8, dtype)]
    try:
        emitted.compiled(make(names, dtype, chip), *args, target=chip)
        return set(names)
    except errors.PallasGpuError:
        if len(names) == 1:
            return set()
    middle = len(names) // 2
    halves = names[:middle], names[middle:]
    return set().union(*(compiled(make, half, dtype, chip) for half in halves))


def _rows(
    make: Make, names_of: Callable[[str], list[str]], dtypes: Sequence[str], all_: Any
) -> list[str]:
    @functools.cache
    def of(dtype: str, chip: str) -> set[str]:
        return compiled(make, names_of(dtype), dtype, chip)

    rows = [f"| operation | {' | '.join(dtypes)} |", "|---|" + "---|" * len(dtypes)]
    for name in all_:
        cells = []
        for dtype in dtypes:
            chips = [chip for chip in CHIPS if name in of(dtype, chip)]
            known = name in names_of(dtype)
            mark = "+" if len(chips) == len(CHIPS) else ", ".join(chips) or "-"
            cells.append(mark if known else "")
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return rows


def page() -> str:
    """The text of the page."""
    vectors = _rows(
        lax_operations.kernel_of,
        lax_operations.names,
        lax_operations.DTYPES,
        lax_operations.OPERATIONS,
    )
    scalars = _rows(
        lax_operations.scalar_kernel_of,
        lax_operations.scalar_names,
        SCALAR_DTYPES,
        lax_operations.SCALARS,
    )
    parts = [_HEAD, "## Vectors", "", *vectors, "", "## Scalars on a scalar subcore"]
    return "\n".join([*parts, "", *scalars, ""])


def operations_of(text: str) -> list[str]:
    """Returns the operations that a page lists."""
    return re.findall(r"^\| `(.*?)` \|", text, re.MULTILINE)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
