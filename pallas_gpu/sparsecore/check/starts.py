# SPDX-License-Identifier: Apache-2.0
"""What is known of where parts of arrays start, before a kernel runs."""

from __future__ import annotations

import functools
from typing import Any

from pallas_gpu import _jax
from pallas_gpu.program.build import region_of
from pallas_gpu.program.facts import Facts, all_facts_of
from pallas_gpu.program.nodes import Access


class Starts:
    """The starts of accesses of a body, on a mesh with axes of these sizes."""

    def __init__(self, jaxpr: _jax.Jaxpr, axes: tuple[tuple[Any, int], ...]):
        self._jaxpr, self._axes = jaxpr, axes

    @functools.cached_property
    def _facts(self) -> Facts:
        return all_facts_of(region_of(self._jaxpr), self._axes)

    def divisors(self, access: Access) -> list[int]:
        """Returns a known divisor of the start on each axis; 0 for a start of 0."""
        return [self._facts.start(start).divisor for start in access.window.starts]
