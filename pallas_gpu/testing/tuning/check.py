# SPDX-License-Identifier: Apache-2.0
"""Runs the candidates once, and compares their results with those of a reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gpu.testing.tuning.candidates import Candidate, Outcome
from pallas_gpu.testing.tuning.progress import Progress

Check = Callable[[Any, Any], Any]

# Results of 16 and fewer bits differ by their rounding; those of more by the order of
# sums and, on tensor cores, by tf32 operands (10 bits of mantissa).
_ROUNDINGS = 4
_WIDE_RTOL = 1e-3


def check_all(
    candidates: Sequence[Candidate],
    arrays: Sequence[Any],
    expected: Any,
    is_right: Check,
    progress: Progress,
) -> None:
    """Runs each candidate once, and takes those out whose results are wrong.

    Args:
      candidates: compiled, in the order of the configurations.
      arrays: what they are called with.
      expected: the right results; None: those of the first candidate that runs.
      is_right: compares results with the right ones; raises or returns False.
      progress: advances with every candidate.
    """
    left = [c for c in candidates if c.is_left]
    progress.begin("check", len(left))
    for candidate in left:
        try:
            results = jax.block_until_ready(candidate.run(*arrays))
            if expected is None:
                expected = results
            elif is_right(results, expected) is False:
                candidate.end(Outcome.FAILED, "the check of its results returned False")
        except Exception as error:
            candidate.fail(error)
        progress.advance()


def close(
    results: Any, expected: Any, *, rtol: float | None, atol: float | None
) -> None:
    """Raises ValueError unless results are close to the expected ones.

    Args:
      results: pytree of arrays.
      expected: the same.
      rtol: relative tolerance; default: four roundings of the type, 0.001 for types of
        more than 16 bits; integers are compared exactly.
      atol: absolute tolerance; default: `rtol` times the root mean square of what is
        expected.
    """
    if jax.tree.structure(results) != jax.tree.structure(expected):
        raise ValueError("its results are another tree than those of the reference")
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    for number, (x, y) in enumerate(pairs):
        x, y = jnp.asarray(x), jnp.asarray(y)
        if x.shape != y.shape:
            raise ValueError(f"result {number} has shape {x.shape}, not {y.shape}")
        relative = _default_rtol(x.dtype) if rtol is None else rtol
        excess, largest = _excess(x, y, relative, atol)
        if not float(excess) <= 0:
            raise ValueError(
                f"result {number} differs from the reference: the largest difference "
                f"is {float(largest):.3g}, with rtol={relative:.3g}"
            )


def _default_rtol(dtype: Any) -> float:
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    if jnp.dtype(dtype).itemsize > 2:
        return _WIDE_RTOL
    return _ROUNDINGS * float(jnp.finfo(dtype).eps)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _excess(x: Any, y: Any, rtol: float, atol: float | None) -> tuple[Any, Any]:
    """Returns by how much differences exceed the tolerances, and the largest one."""
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        x, y = x.astype(wide), y.astype(wide)
    same = (x == y) | (jnp.isnan(x) & jnp.isnan(y))
    difference = jnp.where(same, 0, jnp.abs(x - y))
    size = jnp.where(jnp.isfinite(y), jnp.abs(y), 0)
    if atol is None:
        bound = rtol * jnp.sqrt(jnp.mean(size**2)) if x.size else 0.0
    else:
        bound = atol
    if not x.size:
        return jnp.float32(0), jnp.float32(0)
    # A NaN on one side alone is a difference that exceeds every bound.
    excess = jnp.where(jnp.isnan(difference), jnp.inf, difference - rtol * size - bound)
    return jnp.max(excess), jnp.max(difference)
