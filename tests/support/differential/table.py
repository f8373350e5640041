# SPDX-License-Identifier: Apache-2.0
"""Prints the counts as a table: ours / upstream's.

JAX_PLATFORMS=cpu python -m tests.support.differential.table [Lane | Warpgroup ...]
"""

from __future__ import annotations

import sys

from tests.support.differential.counts import compare
from tests.support.differential.kernels import KERNELS, SEMANTICS
from tests.support.differential.sides import COLUMNS


def main(chosen: list[str]) -> None:
    """Prints one table for each semantics."""
    for semantics in chosen or SEMANTICS:
        print(f"{semantics} semantics, ours / upstream's\n")
        print(_line(["kernel", *COLUMNS]))
        print(_line(["---"] * (1 + len(COLUMNS))))
        for kernel, entry in KERNELS.items():
            if semantics not in entry.semantics:
                continue
            pairs = compare(kernel, semantics)
            row = [str(pairs[name]) for name in COLUMNS]
            print(_line([kernel, *row]), flush=True)
        print()


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(sys.argv[1:])
