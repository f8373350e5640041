# SPDX-License-Identifier: Apache-2.0
"""What tests of products with narrow operands share: scales, and refusals."""

from __future__ import annotations

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import host


def scales(*shape: int):
    """Random scales between 0.5 and 2."""
    rng = np.random.default_rng(sum(shape) + 1)
    return host.array(rng.uniform(0.5, 2, shape), jnp.float32)


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
