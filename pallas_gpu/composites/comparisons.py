# SPDX-License-Identifier: Apache-2.0
"""Comparisons of floats in their total order: -NaN, -inf, -0, +0, inf, NaN."""

from __future__ import annotations

from typing import Any

from pallas_gpu.composites.functions import by_bits
from pallas_gpu.entry.expand import Composite, composite


@composite("le_to")
def _le_to(composite: Composite, a: Any, b: Any) -> Any:
    return by_bits(a) <= by_bits(b)


@composite("lt_to")
def _lt_to(composite: Composite, a: Any, b: Any) -> Any:
    return by_bits(a) < by_bits(b)


@composite("eq_to")
def _eq_to(composite: Composite, a: Any, b: Any) -> Any:
    return by_bits(a) == by_bits(b)
