# SPDX-License-Identifier: Apache-2.0
"""`ops.dot_product_attention` beside JAX's own, for all combinations of arguments."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import ops
from tests.support import host
from tests.support.refusal import refused

CONFIG = ops.AttentionConfig(block_kv=32)
OURS = functools.partial(ops.dot_product_attention, config=CONFIG)
# 11 bits of probabilities and results, and of logarithms up to 8.
TOLERANCE = 2**-7


def theirs(*operands, **options):
    """JAX's own, in float32: its float16 is not supported on CPUs."""
    operands = (x.astype(jnp.float32) for x in operands)
    return jax.nn.dot_product_attention(*operands, **options)


def normal(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape).astype(np.float16)


def operands(q_len=24, kv_len=40):
    kv = 2, kv_len, 1, 16
    return normal(2, q_len, 2, 16), normal(*kv, seed=1), normal(*kv, seed=2)


MASK = normal(2, 1, 24, 40, seed=3) > -0.5
CHOICES = {
    "bias": (None, normal(1, 2, 24, 40, seed=4)),
    "mask": (None, MASK | (np.arange(40) == 0)),
    "is_causal": (False, True),
    "query_seq_lengths": (None, np.array([24, 9], np.int32)),
    "key_value_seq_lengths": (None, np.array([40, 13], np.int32)),
    "local_window_size": (None, (30, 4)),
}


def given(values):
    return [x for x in values if not (x is None or x is False)]


# Each argument alone, in pairs, and all together.
COMBINATIONS = [
    dict(zip(CHOICES, values, strict=True))
    for values in itertools.product(*CHOICES.values())
    if len(given(values)) in (0, 1, 2, len(CHOICES))
]


def case(options):
    given = [n for n, x in options.items() if not (x is None or x is False)]
    return pytest.param(options, id="-".join(given) or "none")


@pytest.mark.parametrize("options", [case(x) for x in COMBINATIONS])
def test_arguments_alone_in_pairs_and_together(options):
    # Not jitted: the combinations share their operations, which are compiled once.
    options = {**options, "return_residual": True}
    expected, got = (f(*operands(), **options) for f in (theirs, OURS))
    assert_close(got, expected, options["query_seq_lengths"])


def assert_close(got, expected, rows=None):
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == jnp.float16
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if rows is not None and a.ndim == 3:
            # JAX's residual of a row that does not exist is a large number.
            exists = np.arange(24)[None, :] < np.asarray(rows)[:, None]
            a, b = (np.where(exists[..., None], x, 0) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=TOLERANCE)


def test_without_a_batch_dimension():
    args, options = [x[0] for x in operands()], {"return_residual": True, "scale": 0.5}
    assert_close(OURS(*args, **options), theirs(*args, **options))


@pytest.mark.parametrize("shape", [(24, 40), (2, 24, 40), (1, 1, 1, 1), (2, 1, 1, 40)])
def test_shapes_of_a_bias(shape):
    bias = normal(*shape, seed=5)
    assert_close([OURS(*operands(), bias=bias)], [theirs(*operands(), bias=bias)])


def test_rows_that_see_nothing_are_zero():
    mask = host.ones((1, 1, 24, 40), bool).at[..., 3, :].set(False)
    got = OURS(*operands(), mask=mask)
    assert not np.asarray(got[:, 3]).any()
    assert np.asarray(got[:, 4]).all()


def test_blackwell_is_a_target():
    params = plgpu.CompilerParams(target="sm_100a", approx_math=True)
    args = normal(1, 16, 1, 64), normal(1, 16, 1, 64, seed=1), normal(1, 16, 1, 64)
    f = functools.partial(ops.dot_product_attention, compiler_params=params)
    interpret = plgpu.InterpretParams(seed=3)
    got = f(*args, is_causal=True, interpret=interpret)
    assert_close([got], [theirs(*args, is_causal=True)])


@pytest.mark.parametrize(
    "change",
    [
        {"implementation": "xla"},
        {"query": normal(24, 2, 16)},
        {"bias": normal(1, 1, 1, 1, 1)},
        {"mask": normal(24, 40)},
    ],
    ids=["implementation", "query", "bias", "mask"],
)
@refused
def test_what_does_not_fit(change):
    given = dict(zip(("query", "key", "value"), operands(), strict=True))
    OURS(**(given | change))
