# SPDX-License-Identifier: Apache-2.0
"""The online softmax: a running maximum and sum of exponentials for each query.

Exponentials are powers of two. What has been added up for an old maximum is scaled
where a new one is found.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Softmax:
    """That of tiles of scores.

    Attributes:
      axis: of a tile, along which the scores of a query are.
      factor: makes of scores exponents of two; None: they are.
      exponent: exponentials are multiplied by two to this power.
      slack: by how much scores may exceed a maximum that is kept.
      summed: returns what a tile's exponentials add to the sums: their sums, or partial
        ones, which only the end combines.
    """

    axis: int
    factor: Any = None
    exponent: int = 0
    slack: float = 0.0
    summed: Callable[[Any], Any] | None = None

    def begin(self, scores: Any) -> tuple[Any, Any, Any]:
        maxima = self._maxima(scores)
        wide = self._exponentials(scores, maxima)
        return maxima, self._sums(wide), wide

    def step(self, state: Any, scores: Any) -> tuple[Any, Any, Any, Any]:
        """Returns new maxima and sums, factors of earlier results, and exponentials."""
        maxima, sums = state
        new = lax.max(maxima, self._maxima(scores))
        if self.slack:
            new = jnp.where(new > maxima + self.slack, new, maxima)
        shrink = lax.exp2(lax.sub(maxima, new))
        wide = self._exponentials(scores, new)
        return new, self.scaled(sums, shrink) + self._sums(wide), shrink, wide

    def combined(self, parts: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Adds parts of a result: sums of products, maxima and sums of each."""
        maxima = functools.reduce(jnp.maximum, [m for _, m, _ in parts])
        weights = [jnp.exp2(m - maxima) for _, m, _ in parts]
        results, sums = (
            [self.scaled(part[i], w) for part, w in zip(parts, weights, strict=True)]
            for i in (0, 2)
        )
        return (
            *(functools.reduce(lax.add, results), maxima),
            functools.reduce(lax.add, sums),
        )

    def scaled(self, x: Any, factors: Any) -> Any:
        """Multiplies a tile, or a number for each query, by factors of the queries."""
        return x * (factors if x.ndim == 1 else self.of_queries(factors, x))

    def of_queries(self, x: Any, like: Any) -> Any:
        """Returns a number of each query for each element of a tile."""
        return lax.broadcast_in_dim(x, like.shape, (1 - self.axis,))

    def _maxima(self, scores: Any) -> Any:
        found = scores.max(axis=self.axis)
        return found if self.factor is None else found * self.factor

    def _exponentials(self, scores: Any, maxima: Any) -> Any:
        if self.exponent:
            maxima = maxima - self.exponent
        scaled = scores if self.factor is None else lax.mul(scores, self.factor)
        return lax.exp2(lax.sub(scaled, self.of_queries(maxima, scores)))

    def _sums(self, wide: Any) -> Any:
        return wide.sum(axis=self.axis) if self.summed is None else self.summed(wide)
