# SPDX-License-Identifier: Apache-2.0
"""What the kernels have in common: meshes, sizes of blocks of rows, padding."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import errors
from pallas_gpu import sparsecore as plsc
from pallas_gpu.arch import tpu
from pallas_gpu.sparsecore.check.budgets import words
from pallas_gpu.sparsecore.types import chips

# What the operations take.
ArrayLike = jax.Array | np.ndarray
CORE, SUBCORE = "core", "subcore"
BOTH = (CORE, SUBCORE)
# Offsets in HBM are multiples of 32 bytes, and tiles have 8 rows.
ALIGNMENT = 8
# A block of more rows hides nothing more, and one of few blocks has nothing to hide.
_MOST_ROWS = 128
_COUNTED_TOGETHER = 8
_BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
      target, interpret: as given.
      tiling: of its arrays. XLA copies none of one dimension to that of SparseCores,
        in which addresses in VMEM need no arithmetic.
    """

    target: str | None
    interpret: Any
    tiling: Literal["compact", "sparsecore"] = "sparsecore"

    @property
    def chip(self) -> tpu.TpuTarget:
        """The chip that it is traced for."""
        return chips.current() if self.target is None else tpu.target(self.target)

    def kernel(self, body: Any, out_type: Any, scratch: Any, **sizes: Any) -> Any:
        """Returns the kernel of a body."""
        return plsc.kernel(
            body,
            out_type,
            mesh=plsc.VectorSubcoreMesh(
                core_axis_name=CORE, subcore_axis_name=SUBCORE, **sizes
            ),
            scratch_types=scratch,
            compiler_params=plsc.CompilerParams(target=self.target, tiling=self.tiling),
            interpret=self.interpret,
        )

    def of_rows(self, width: int, dtype: Any, *, shared: bool = False) -> Launch:
        """Returns the launch whose tiling has rows of a width and a type.

        Under compact tiling streams move rows of multiples of 128 words only, of
        VMEM_SHARED of 128; under that of SparseCores XLA copies the table at each call.
        """
        fits = width == 128 if shared else width % 128 == 0
        whole = jnp.dtype(dtype).itemsize == 4 and fits
        tiling: Literal["compact", "sparsecore"]
        tiling = "compact" if whole else "sparsecore"
        return dataclasses.replace(self, tiling=tiling)

    def row_words(self, width: int, dtype: Any) -> int:
        """Returns the words of one of many rows in VMEM."""
        return words((ALIGNMENT, width), dtype, plsc.VMEM, self.tiling) // ALIGNMENT

    @property
    def workers(self) -> int:
        """The vector subcores of the chip."""
        return self.chip.cores * self.chip.subcores

    def rows_of_block(self, width: int, dtype: Any, share: int, needed: int) -> int:
        """Returns the rows of a block that fits a share of VMEM.

        Args:
          width, dtype: of a row.
          share: the blocks that have VMEM together.
          needed: the rows of a subcore, of which several blocks are made.

        Raises:
          UnsupportedError: 8 rows do not fit.
        """
        fit = self.chip.vmem_words // share // self.row_words(width, dtype)
        unit = max(ALIGNMENT, self.chip.lanes)
        of_subcore = rounded(-(-needed // _BLOCKS), unit)
        rows = min(_MOST_ROWS, fit // unit * unit, of_subcore)
        if rows:
            return rows
        raise errors.UnsupportedError(
            "rows are too wide for VMEM",
            expected=f"{unit} rows in {self.chip.vmem_words // share} words",
            got=f"rows of {jnp.dtype(dtype).name}[{width}]",
            hint="split the columns of the table",
        )


def within(value: Any, count: int) -> Any:
    """Returns which elements are at least 0 and less than a count."""
    return (value >= 0) & (value < count)


def count_values(part: Any, size: int, counts: Any, bins: int, lanes: int) -> None:
    """Adds to `counts` how often each value less than `bins` occurs in a part of VMEM.

    Several registers are loaded before the first one is counted: the compiler keeps the
    order of a store and of a load behind it.
    """
    together = math.gcd(size // lanes, _COUNTED_TOGETHER)
    ones = jnp.ones(lanes, jnp.int32)

    @plsc.loop(0, size, step=together * lanes)
    def _(i: Any) -> None:
        places = [plsc.ds(i + k * lanes, lanes) for k in range(together)]
        for value in [part[place] for place in places]:
            mask = within(value, bins)
            plsc.addupdate_scatter(counts, [value], ones, mask=mask)


def rounded(n: int, multiple: int) -> int:
    """Returns the next multiple."""
    return -(-n // multiple) * multiple


def padded(x: jax.Array, size: int, value: Any) -> jax.Array:
    """Returns an array with further rows, up to a size."""
    pad = [(0, size - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return x if size == x.shape[0] else jnp.pad(x, pad, constant_values=value)


def require_rows(rows: Any, who: str, what: str = "rows") -> jax.Array:
    """Returns indices as a vector of int32, or raises."""
    rows = jnp.asarray(rows)
    if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
        raise errors.ShapeError(
            f"{who}: {what} is not a vector of integers",
            expected="int32 of shape (n,)",
            got=f"{rows.dtype.name}{list(rows.shape)}",
            hint="reshape it to one dimension, and the result back",
        )
    return rows.astype(jnp.int32)


def require_matrix(x: Any, who: str, what: str, dtypes: Any) -> jax.Array:
    """Returns an array of two dimensions and one of some types, or raises."""
    x = jnp.asarray(x)
    if x.ndim != 2 or x.dtype not in [jnp.dtype(t) for t in dtypes] or 0 in x.shape:
        names = " or ".join(jnp.dtype(t).name for t in dtypes)
        raise errors.ShapeError(
            f"{who}: {what} is not a matrix that the kernel has",
            expected=f"{names} of shape (rows, columns)",
            got=f"{x.dtype.name}{list(x.shape)}",
            hint="reshape it, or convert it with .astype",
        )
    return x
