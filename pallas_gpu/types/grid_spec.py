# SPDX-License-Identifier: Apache-2.0
"""Grid, block specs and scratch of a `pallas_call` as one object."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from pallas_gpu import expect

_CHECKED_LATER = dict.fromkeys(
    ("grid", "in_specs", "out_specs", "scratch_shapes"), expect.anything
)


@expect.arguments(**_CHECKED_LATER)
@dataclasses.dataclass(frozen=True)
class GridSpec:
    """Grid, block specs and scratch of a `pallas_call`, which checks them.

    Attributes:
      grid: sizes of the grid axes.
      in_specs: pytree of `BlockSpec` for the arguments; None: whole arrays, in GMEM if
        the grid has a parallel axis.
      out_specs: the same for the results.
      scratch_shapes: declarations of scratch references.
    """

    num_scalar_prefetch: ClassVar[int] = 0

    grid: int | Sequence[Any] = ()
    in_specs: Any = None
    out_specs: Any = None
    scratch_shapes: Any = ()


@expect.arguments(
    num_scalar_prefetch=expect.integer(0, unit="arguments"), **_CHECKED_LATER
)
@dataclasses.dataclass(frozen=True)
class PrefetchScalarGridSpec:
    """A `GridSpec` whose index maps read the first arguments of the call.

    These arguments are arrays of integers without block specs. Index maps get their
    references after the grid indices, `lambda i, j, rows: (rows[i], j)`, and the body
    as its first ones. They are in GMEM: a read costs as much as any other of GMEM,
    which the copies of a sequential axis hide.

    Attributes:
      num_scalar_prefetch: number of these arguments.
      grid: sizes of the grid axes.
      in_specs: pytree of `BlockSpec` for the other arguments; None: whole arrays, as
        in `GridSpec`.
      out_specs: the same for the results.
      scratch_shapes: declarations of scratch references.
    """

    num_scalar_prefetch: int
    grid: int | Sequence[Any] = ()
    in_specs: Any = None
    out_specs: Any = None
    scratch_shapes: Any = ()
