# SPDX-License-Identifier: Apache-2.0
"""Scales of products with narrow operands."""

from __future__ import annotations

import numpy as np

from tests.support import host


def scales(*shape: int):
    """Random scales between 0.5 and 2."""
    rng = np.random.default_rng(sum(shape) + 1)
    return host.array(rng.uniform(0.5, 2, shape), np.float32)
