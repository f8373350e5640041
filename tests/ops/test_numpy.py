# SPDX-License-Identifier: Apache-2.0
"""Ready kernels take NumPy's arrays as `jax.numpy` does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gpu import errors, ops
from tests.support.refusal import refused

ROWS = np.random.default_rng(0).standard_normal((4, 16))


@pytest.mark.parametrize(
    "operation",
    [
        ops.softmax,
        lambda x: ops.matmul(x, x.T),
        lambda x: ops.rms_norm(x, np.ones(16)),
        lambda x: ops.top_k(x, 3),
        lambda x: ops.linear_cross_entropy(
            *(y.astype("f2") for y in (x, x.T)), np.arange(4)
        ),
        lambda x: ops.quantize(x, jnp.int8),
    ],
)
def test_64_bits_are_narrowed(operation):
    got, wanted = operation(ROWS), operation(jnp.asarray(ROWS))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert all(x.dtype.itemsize <= 4 for x in jax.tree.leaves(got))


def test_a_factor_is_a_scalar_of_numpy():
    x = jnp.ones((1, 8, 1, 16), jnp.float8_e4m3fn)
    options = {"q_scale": 2.0, "k_scale": 1.0, "v_scale": 3.0}
    wanted = ops.attention(x, x, x, **options)
    given = {name: np.float64(scale) for name, scale in options.items()}
    np.testing.assert_array_equal(ops.attention(x, x, x, **given), wanted)


def test_64_bits_stay_where_jax_has_them():
    with jax.enable_x64(True), pytest.raises(errors.DTypeError, match="float64"):
        ops.softmax(ROWS)


@pytest.mark.parametrize(
    "value",
    [
        *(np.array(["1"]), np.str_("1"), np.array([None])),
        *(np.ones(3, "datetime64[s]"), np.ones(3, np.longdouble), np.ndarray),
        *([[1.0, 2.0]], jax.ShapeDtypeStruct((2, 8), jnp.float32)),
    ],
)
@refused
def test_other_values_are_refused(value):
    ops.softmax(value)
