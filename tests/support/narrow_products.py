# SPDX-License-Identifier: Apache-2.0
"""What tests of products with narrow operands share: scales, and refusals."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from tests.support import everywhere
from tests.support.semantics import Warpgroup


def scales(*shape: int):
    """Random scales between 0.5 and 2."""
    rng = np.random.default_rng(sum(shape) + 1)
    return rng.uniform(0.5, 2, shape).astype(np.float32)


@contextlib.contextmanager
def refuses(error, what, **rows):
    """Expects an error of exactly this class that says all it has to say."""
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    assert caught.value.what == what
    assert caught.value.expected and caught.value.hint
    for row, part in rows.items():
        assert part in str(getattr(caught.value, row)), str(caught.value)


def check(make, args, expected, executed=(), **tolerances):
    """As `everywhere.check`, which for the time of the suite lowers on a GPU alone.

    Args:
      executed: semantics whose module is executed on the CPU.
    """
    lowered = [Warpgroup] if everywhere.has_gpu() or executed else []
    everywhere.check(
        make, args, expected, semantics=lowered, executed=executed, **tolerances
    )
