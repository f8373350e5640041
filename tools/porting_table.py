# SPDX-License-Identifier: Apache-2.0
"""Writes docs/porting.md, the names of upstream's Pallas: `make porting-table`."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tools.porting_arguments import ARGUMENTS
from tools.porting_mosaic import MOSAIC, TCGEN05
from tools.porting_names import OLDER, PL, PLGPU, TRITON, Row
from tools.source_tree import ROOT

PATH = ROOT / "docs" / "porting.md"
_HEAD = """\
# Porting kernels from JAX's Pallas

Written by `make porting-table` from `tools/porting_names.py`, which the tests compare
with jax 0.11 and 0.12. Do not edit it by hand.

A kernel for Mosaic GPU changes its import lines. This package has the names of both of
upstream's modules:

```python
# from jax.experimental import pallas as pl
import pallas_gpu as pl

# from jax.experimental.pallas import mosaic_gpu as plgpu
import pallas_gpu as plgpu
```

`tests/porting/` has kernels that run with this change alone. differences.md lists what
behaves differently on purpose, and why. A mistake raises what it raises upstream: most
are a `ValueError`; a wrong type of an argument is a `TypeError`, too, and what is not
supported a `NotImplementedError`.
"""

_TRITON = """\
A kernel for Triton changes its import lines as well. Its blocks stay in GMEM, and a
block of threads is one warpgroup. With JAX's own `pl.pallas_call` only the parameters
change, `compiler_params=pallas_gpu.triton.CompilerParams()`, see received.md:

```python
# from jax.experimental import pallas as pl
import pallas_gpu as pl

# from jax.experimental.pallas import triton as plgpu
from pallas_gpu import triton as plgpu
```

`num_warps` does not divide a block: choose blocks that the registers of four warps
hold, such as 64 rows of attention. With the 128 rows of its default, `attention.mha`
spills 656 bytes per thread on sm_90a for heads of 64 elements.
"""

_MOSAIC = """\
Bodies that emit MLIR themselves change one line:

```python
# import jax.experimental.mosaic.gpu as mgpu
from pallas_gpu import mosaic as mgpu
```

References are memrefs, as upstream's, so operations of `jaxlib.mlir.dialects` mix with
these. Errors are this package's, with the line of the kernel.
"""

_ARGUMENTS = """\
All other arguments have the names, the positions and the defaults of upstream's; a test
compares the signatures with the installed ones.
"""


def table() -> str:
    """The text of docs/porting.md."""
    lines = [_HEAD, "## jax.experimental.pallas.mosaic_gpu", "", *_rows(PLGPU)]
    lines += ["", "## jax.experimental.pallas", "", *_rows(PL)]
    lines += ["", "## jax.experimental.pallas.triton", "", _TRITON, *_rows(TRITON)]
    lines += ["", "## jax.experimental.mosaic.gpu", "", _MOSAIC, *_rows(MOSAIC)]
    lines += ["", "Its module `tcgen05`:", "", *_rows(TCGEN05)]
    lines += ["", "## Older spellings", "", *_rows(OLDER)]
    lines += ["", "## Arguments that differ", "", _ARGUMENTS]
    lines += ["| names | arguments | here | why |", "|---|---|---|---|", *_arguments()]
    return "\n".join([*lines, ""])


def _arguments() -> list[str]:
    """Rows of arguments, one for what differs for one reason."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, reasons in sorted(ARGUMENTS.items(), key=lambda item: item[0].lower()):
        for change, reason in dict.fromkeys(reasons.values()):
            same = [f"`{a}`" for a, why in reasons.items() if why == (change, reason)]
            row = ", ".join(same), change.value, reason
            rows.setdefault(row, []).append(f"`{name}`")
    return [
        f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()
    ]


def _rows(names: Mapping[str, Row]) -> list[str]:
    """A table of names, in alphabetical order."""
    lines = ["| upstream | here | |", "|---|---|---|"]
    for name, row in sorted(names.items(), key=lambda item: item[0].lower()):
        note = "; ".join(filter(None, (row.ours, row.note)))
        lines.append(f"| `{name}` | {row.status.value} | {note} |")
    return lines


def main() -> int:
    PATH.write_text(table(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
