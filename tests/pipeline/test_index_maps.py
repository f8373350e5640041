# SPDX-License-Identifier: Apache-2.0
"""What a pipeline knows of the blocks of an index map before it runs."""

import jax.numpy as jnp
import pytest
from jax import lax

from pallas_gpu import _jax
from pallas_gpu.pipeline.index_maps import facts_along, loop_axis


@pytest.mark.parametrize(
    ("index", "slope"),
    [
        (lambda i, j: i, 1),
        (lambda i, j: j, 0),
        (lambda i, j: 3, 0),
        (lambda i, j: i * 4 + j, 4),
        (lambda i, j: 7 - 2 * i + i, -1),
        (lambda i, j: -(i + j), -1),
        (lambda i, j: i.astype(jnp.uint32) * 2, 2),
        (lambda i, j: i - i, 0),
        # By how much it grows is not the same everywhere, or not known.
        (lambda i, j: i * j, None),
        (lambda i, j: i // 2, None),
        (lambda i, j: i.astype(jnp.int16) * 2, None),
        (lambda i, j: lax.rem(i, 3), None),
        (lambda i, j: jnp.minimum(i, 5), None),
        (lambda i, j: i.astype(jnp.float32).astype(jnp.int32), None),
        (lambda i, j: lax.rem(j, 3), 0),
    ],
)
def test_an_index_grows_by_the_same_number_or_it_is_not_known(index, slope):
    scalars = [_jax.ShapedArray((), jnp.int32)] * 2
    jaxpr = _jax.trace(lambda i, j: (index(i, j),), scalars)[0].jaxpr
    assert [fact.factor(loop_axis(0)) for fact in facts_along(jaxpr)] == [slope]
