# SPDX-License-Identifier: Apache-2.0
"""A kernel with its arguments and its reference in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

import pallas_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel of the twelve.

    Attributes:
      call: the function of arrays that calls `pl.pallas_call`.
      arguments: makes them from random numbers.
      reference: the same function of float64 arrays, in NumPy.
      tolerance: absolute and relative.
    """

    call: Callable[..., Any]
    arguments: Callable[[np.random.Generator], tuple[Any, ...]]
    reference: Callable[..., Any]
    tolerance: float = 0.0


def params(*kinds: str, **options: Any) -> plgpu.CompilerParams:
    """Our compiler parameters, with the kinds of the grid's axes if there are any."""
    return plgpu.CompilerParams(dimension_semantics=kinds or None, **options)
