# SPDX-License-Identifier: Apache-2.0
"""What tests of products with narrow operands share: scales, and how they run."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tests.support import everywhere, host
from tests.support.semantics import Warpgroup


def scales(*shape: int):
    """Random scales between 0.5 and 2."""
    rng = np.random.default_rng(sum(shape) + 1)
    return host.array(rng.uniform(0.5, 2, shape), jnp.float32)


def check(make, args, expected, executed=(), **tolerances):
    """As `everywhere.check`, which for the time of the suite lowers on a GPU alone.

    Args:
      executed: semantics whose module is executed on the CPU.
    """
    lowered = [Warpgroup] if everywhere.has_gpu() or executed else []
    everywhere.check(
        make, args, expected, semantics=lowered, executed=executed, **tolerances
    )
