# SPDX-License-Identifier: Apache-2.0
"""Attention's scores: which ones exist, which blocks hold them, how they are modified.

Rows are positions of Q, columns those of K and V. For products that are transposed, as
in a backward pass, `Mask.transposed` exchanges the two, with the lengths exchanged too.

Indices are Python integers, or int32 scalars where a length or a position is known only
at run time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops.folded import divide, less, maximum, minimum, minus, plus, where

# Neighbouring columns that are compared with one constant; see `Mask.hide`.
_GROUP = 8
# The exponents of a hidden score, scaled, and of the largest power of two in float32.
_HIDDEN_EXPONENT, _LARGEST_EXPONENT = 100, 127


class Lengths(NamedTuple):
    rows: Any
    columns: Any


class Blocks(NamedTuple):
    """Blocks of columns that a tile of rows sees: first to end, which is excluded.

    Those from `first_whole` to `end_whole` are seen by all of the tile's rows; the
    others have to be masked. first <= first_whole <= end_whole <= end.
    """

    first: Any
    first_whole: Any
    end_whole: Any
    end: Any

    @classmethod
    def loaded(cls, row: Any) -> Blocks:
        """Returns those that `segment_blocks` has found for a tile."""
        return cls(*(row[i] for i in range(len(cls._fields))))

    def within(self, other: Blocks) -> Blocks:
        """Returns the blocks that both have; they are whole where both are."""
        return _ordered(
            maximum(self.first, other.first),
            maximum(self.first_whole, other.first_whole),
            minimum(self.end_whole, other.end_whole),
            minimum(self.end, other.end),
        )

    def parts(self) -> list[tuple[Any, Any, bool]]:
        """Returns ranges of blocks from the first on, and whether they are masked."""
        ranges = (
            (self.first, self.first_whole, True),
            (self.first_whole, self.end_whole, False),
            (self.end_whole, self.end, True),
        )
        return [part for part in ranges if part[0] is not part[1]]

    def at_least_one(self) -> Blocks:
        """Returns a range that is not empty; a block that is added is not whole."""
        end = maximum(self.end, 1)
        first = minimum(self.first, plus(end, -1))
        whole = minimum(self.first_whole, self.end), minimum(self.end_whole, self.end)
        return _ordered(first, *whole, end)


def _ordered(first: Any, first_whole: Any, end_whole: Any, end: Any) -> Blocks:
    end = maximum(first, end)
    end_whole = minimum(maximum(end_whole, first), end)
    first_whole = minimum(maximum(first_whole, first), end_whole)
    return Blocks(first, first_whole, end_whole, end)


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which columns a row sees, apart from segments: those near its own position.

    Row i sees column j if -left <= j - (i + shift) <= right.

    Attributes:
      left, right: None is without a bound. A causal mask has right = 0.
      from_end: the shift is columns - rows, so that the last row is at the last column,
        else it is 0.
      segments: a row sees only columns with its own segment id.
      ragged: lengths are known only at run time, for each sequence.
    """

    left: int | None = None
    right: int | None = None
    from_end: bool = False
    segments: bool = False
    ragged: bool = False

    @property
    def transposed(self) -> Mask:
        return dataclasses.replace(self, left=self.right, right=self.left)

    def shift(self, lengths: Lengths) -> Any:
        return minus(lengths.columns, lengths.rows) if self.from_end else 0

    def may_see_nothing(self, lengths: Lengths) -> bool:
        """Whether there may be a row without columns. Static."""
        if self.ragged or self.segments or self.left is not None:
            return True
        return self.right is not None and self.from_end and not self._fits(lengths)

    def _fits(self, lengths: Lengths) -> bool:
        return lengths.rows <= lengths.columns + (self.right or 0)

    def blocks(
        self,
        lengths: Lengths,
        start: Any,
        size: int,
        block: int,
        *,
        only_inside: bool = False,
    ) -> Blocks:
        """Returns the blocks of `block` columns that rows [start, start + size) see.

        Args:
          only_inside: a tile that reaches beyond the last row has no whole blocks. The
            backward pass adds over rows, and masks those that do not exist.
        """
        last = plus(minimum(plus(start, size), lengths.rows), -1)
        shift = self.shift(lengths)
        low = whole_low = 0
        high = whole_high = lengths.columns
        if self.left is not None:
            low = maximum(plus(plus(start, shift), -self.left), 0)
            whole_low = maximum(plus(plus(last, shift), -self.left), 0)
        if self.right is not None:
            reach = plus(shift, self.right + 1)
            high = maximum(minimum(plus(last, reach), high), 0)
            whole_high = maximum(minimum(plus(start, reach), whole_high), 0)
        if self.ragged:
            high = where(less(start, lengths.rows), high, 0)
        if only_inside:
            inside = less(plus(start, size - 1), lengths.rows)
            whole_high = where(inside, whole_high, 0)
        return _ordered(
            divide(low, block),
            divide(plus(whole_low, block - 1), block),
            divide(whole_high, block),
            divide(plus(high, block - 1), block),
        )

    def hide(
        self,
        scores: jax.Array,
        hidden: float,
        lengths: Lengths,
        row: Any,
        column: Any,
        ids: tuple[jax.Array, jax.Array] | None = None,
        *,
        layout: Any = None,
        hides_rows: bool = False,
    ) -> jax.Array:
        """Replaces the scores that do not exist in a tile, by `hidden`.

        Columns are counted in groups of 8: a register's group is the same in every
        thread of the tensor core's layout, so it is compared as a constant and takes no
        register of its own.

        Args:
          scores: (rows, columns), columns a multiple of 8.
          row, column: position of the first score.
          ids: segment ids of the tile's rows and of its columns.
          layout: that of the scores, for the comparison of ids under Lane semantics.
          hides_rows: rows beyond the last one are hidden, too.
        """
        rows, columns = scores.shape
        groups = rows, columns // _GROUP, _GROUP
        position = plgpu.broadcasted_iota(jnp.int32, (rows, _GROUP), 0)
        within = plgpu.broadcasted_iota(jnp.int32, (rows, _GROUP), 1)
        group = plgpu.broadcasted_iota(jnp.int32, groups, 1)
        # Columns of the tile: the last one of the sequence, and that of row 0.
        last = minus(plus(lengths.columns, -1), column)
        own = minus(plus(row, self.shift(lengths)), column)
        if self.right is not None:
            last = jnp.minimum(position + plus(own, self.right), last)
        if hides_rows:
            last = jnp.where(position < minus(lengths.rows, row), last, -1)
        visible = group <= _of_groups((last - within) >> 3, groups)
        if self.left is not None:
            first = position + plus(own, _GROUP - 1 - self.left)
            visible &= group >= _of_groups((first - within) >> 3, groups)
        scores = jnp.where(visible, scores.reshape(groups), hidden)
        scores = scores.reshape(rows, columns)
        if ids is not None:
            of_rows, of_columns = ids
            of_rows = lax.broadcast_in_dim(of_rows, (rows, columns), (0,))
            of_columns = lax.broadcast_in_dim(of_columns, (rows, columns), (1,))
            if layout is not None:
                of_rows = plgpu.layout_cast(of_rows, layout)
            scores = jnp.where(of_rows == of_columns, scores, hidden)
        return scores


def _of_groups(values: Any, groups: tuple[int, ...]) -> Any:
    return lax.broadcast_in_dim(values, groups, (0, 2))


def segment_blocks(rows: Any, columns: Any, tile: int, block: int) -> jax.Array:
    """Returns the blocks of columns that have a segment in common with a tile of rows.

    It is computed on the host's side of a kernel, from bounds: it is exact for ids that
    are sorted, and correct for any.

    Args:
      rows, columns: (batch, length), int32: segment ids.
      tile, block: rows of a tile, and columns of a block.

    Returns:
      (batch, tiles, 4), int32: the fields of `Blocks`.
    """
    lowest, highest = (x[:, :, None] for x in _bounds(rows, tile))
    low, high = (x[:, None, :] for x in _bounds(columns, block))
    n = low.shape[2]
    position = lax.broadcasted_iota(jnp.int32, (1, 1, n), 2)
    some = (lowest <= high) & (low <= highest)
    whole = (lowest == highest) & (low == high) & (low == lowest)
    first = jnp.min(jnp.where(some, position, n), axis=2)
    end = jnp.max(jnp.where(some, position + 1, 0), axis=2)
    end_whole = jnp.max(jnp.where(whole, position + 1, 0), axis=2)
    gap = ~whole & (position < end_whole[:, :, None])
    first_whole = jnp.max(jnp.where(gap, position + 1, 0), axis=2)
    return jnp.stack(_ordered(first, first_whole, end_whole, end), axis=2)


def _bounds(ids: Any, size: int) -> tuple[Any, Any]:
    batch, length = ids.shape
    tiles = plgpu.cdiv(length, size)
    ids = jnp.pad(ids, ((0, 0), (0, tiles * size - length)), mode="edge")
    ids = ids.reshape(batch, tiles, size)
    return ids.min(axis=2), ids.max(axis=2)


# --- the scores themselves ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scores:
    """What happens to q @ k.T before the softmax. The order is that of the attributes.

    Attributes:
      sm_scale: a factor.
      soft_cap: c * tanh(scores / c).
      bias: an array is added.
      alibi: the distance of row and column times a slope of the head is subtracted.
    """

    sm_scale: float
    soft_cap: float | None = None
    bias: bool = False
    alibi: bool = False

    @property
    def factor(self) -> float:
        """Makes of modified scores exponents of two: exp(score) = 2 ** (factor * x).

        It is applied last, with the subtraction of the maximum, in one instruction.
        """
        unit = self.sm_scale if self.soft_cap is None else self.soft_cap
        return unit * math.log2(math.e)

    @property
    def hidden(self) -> float:
        """What a modified score becomes that a mask hides.

        It is finite, because a row may see nothing of the block that comes first, and
        infinity minus infinity is NaN; its first visible score then wipes out what the
        hidden ones added. A power of two stays exact when it is scaled; it follows the
        factor, or a small one would let hidden scores show and a large one overflow.
        """
        exponent = _HIDDEN_EXPONENT - round(math.log2(self.factor))
        return -(2.0 ** min(exponent, _LARGEST_EXPONENT))

    @property
    def lowest_maximum(self) -> float:
        """Rows whose scaled maximum is not above it have seen no column."""
        return self.hidden * self.factor / 2

    @property
    def modifies(self) -> bool:
        """Whether there is anything but a factor."""
        return self.soft_cap is not None or self.bias or self.alibi

    def modified(
        self,
        scores: jax.Array,
        distance: Any = 0,
        bias: jax.Array | None = None,
        slope: Any = None,
        *,
        keeps_capped: bool = False,
    ) -> Any:
        """Returns modified scores of a tile, in units of `factor`.

        Args:
          scores: (rows, columns) float32: q @ k.T.
          distance: the column that is at the first row, less the first column:
            row + shift - column.
          bias: of the same shape, or one that broadcasts to it.
          slope: of the head, a float32 scalar.
          keeps_capped: also returns tanh(scores / c), or None, for the derivative.
        """
        capped = None
        if self.soft_cap is not None:
            scores = capped = jnp.tanh(scores * (self.sm_scale / self.soft_cap))
        unit = math.log2(math.e) / self.factor
        if self.alibi:
            rows, columns = scores.shape
            row = plgpu.broadcasted_iota(jnp.int32, (rows, columns), 0)
            column = plgpu.broadcasted_iota(jnp.int32, (rows, columns), 1)
            away = jnp.abs((row - column + distance).astype(jnp.float32))
            scores = scores - away * (slope * unit)
        if bias is not None:
            # A bias of -inf hides a score as a mask does.
            bias = lax.broadcast_in_dim(bias, scores.shape, _trailing(bias, scores))
            scores = scores + bias.astype(jnp.float32) * unit
            scores = jnp.maximum(scores, self.hidden)
        return (scores, capped) if keeps_capped else scores


def _trailing(x: Any, like: Any) -> tuple[int, ...]:
    return tuple(range(like.ndim - x.ndim, like.ndim))
