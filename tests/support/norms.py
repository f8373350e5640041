# SPDX-License-Identifier: Apache-2.0
"""Arrays compared by the norm of their difference."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def assert_close(got: Iterable[Any], wanted: Iterable[Any], bound: float) -> None:
    """Compares each array with the wanted one; the bound is relative to its norm."""
    for a, b in zip(got, wanted, strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert a.shape == b.shape
        assert np.isfinite(a).all()
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b) + 1e-6
