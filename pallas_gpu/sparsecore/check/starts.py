# SPDX-License-Identifier: Apache-2.0
"""What is known of where parts of arrays start, before a kernel runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

from pallas_gpu import _jax
from pallas_gpu.layouts.window import Sum
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import Facts, facts_of
from pallas_gpu.program.nodes import Access


class Starts:
    """The starts of accesses of a body, on a mesh with axes of these sizes."""

    def __init__(self, jaxpr: _jax.Jaxpr, axes: Iterable[tuple[Any, int]]):
        self._jaxpr, self._axes = jaxpr, axes

    @functools.cached_property
    def _facts(self) -> Facts:
        return facts_of(region_of(self._jaxpr), self._axes)

    def divisors(self, access: Access) -> list[int]:
        """Returns a known divisor of the start on each axis; 0 for a start of 0."""
        return [self._divisor(start) for start in access.window.starts]

    def _divisor(self, start: Any) -> int:
        if isinstance(start, int):
            return abs(start)
        terms = start if isinstance(start, Sum) else Sum(0, (start,))
        known = (self._facts.of(term).divisor for term in terms.terms)
        return math.gcd(terms.constant, *known)
