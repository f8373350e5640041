# SPDX-License-Identifier: Apache-2.0
"""Operations that do what upstream's do where another choice was possible."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere

F32 = jnp.float32
X = np.arange(32 * 128, dtype=np.float32).reshape(32, 128)


@everywhere.gives(
    [X],
    np.stack([np.full_like(X, -1), X]),
    plgpu.SMEM((32, 128), F32),
    plgpu.Barrier(),
    grid={"i": 2},
)
def test_a_copy_that_a_predicate_skips_still_arrives(x, o, tile, barrier):
    i = lax.axis_index("i")
    tile[...] = jnp.full((32, 128), -1.0)
    plgpu.commit_smem()
    plgpu.copy_gmem_to_smem(x, tile, barrier, predicate=i > 0)
    plgpu.barrier_wait(barrier)
    o[i] = tile[...]


# The CTAs that each of the four CTAs of a 2 x 2 cluster hears from.
HEARD = {
    "x": [{0, 2}, {1, 3}, {0, 2}, {1, 3}],
    ("x", "y"): [{0, 1, 2}, {0, 1, 3}, {0, 2, 3}, {1, 2, 3}],
    (("x", "y"),): [{0, 1, 2, 3}] * 4,
}


@pytest.mark.parametrize("axes", HEARD)
def test_arrivals_reach_the_ctas_along_each_axis_or_group_of_axes(axes):
    # A CTA reads what the CTAs that it hears from have stored: a race for any other.
    listeners = [sum(1 << i for i in range(4) if j in HEARD[axes][i]) for j in range(4)]

    def body(given, read, barrier):
        cta = 2 * lax.axis_index("x") + lax.axis_index("y")
        given[cta] = cta + 1
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        for j, mask in enumerate(listeners):
            hears = (mask >> cta) & 1 == 1
            read[cta, j] = lax.cond(hears, lambda j=j: given[j], lambda: 0)

    read = [[j + 1 if j in heard else 0 for j in range(4)] for heard in HEARD[axes]]
    expected = [np.arange(1, 5, dtype=np.int32), np.array(read, np.int32)]
    barrier = plgpu.ClusterBarrier(collective_axes=axes)
    everywhere.run(body, [], expected, barrier, cluster={"x": 2, "y": 2})


@pytest.mark.parametrize("axes", HEARD)
def test_a_phase_needs_as_many_arrivals_as_upstreams(axes):
    entries = (axes,) if isinstance(axes, str) else axes
    theirs = 1 + sum(2 ** (1 if isinstance(x, str) else len(x)) - 1 for x in entries)
    mesh = plgpu.Mesh(cluster=(2, 2), cluster_names=("x", "y"))
    barrier = plgpu.ClusterBarrier(collective_axes=axes, num_arrivals=3)
    assert barrier.phase_arrivals(mesh) == 3 * theirs == 3 * len(HEARD[axes][0])


@everywhere.gives([np.int8([-3, 4] * 64)], np.int32([-3, 7] + [4, -3] * 63))
def test_a_store_of_other_integers_is_refused_but_numbers_are_converted(x, o):
    with pytest.raises(plgpu.errors.DTypeError, match=r"int32\[128\]"):
        o[...] = x[...]
    o[...] = plgpu.load(x, (1 - jnp.arange(128) % 2,)).astype(jnp.int32)
    o[0], o[1] = -3, 7


@pytest.mark.parametrize("captured", [False, True])
def test_a_number_is_weak_only_where_a_body_closes_over_it(captured):
    def body(factor, x, o):
        product = (0.5 if captured else factor[()]) * x[...]
        assert product.dtype == (x.dtype if captured else F32)
        o[...] = product.astype(x.dtype)

    x = X.astype(jnp.bfloat16)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    got = plgpu.pallas_call(body, out)(0.5, x)
    np.testing.assert_array_equal(got, x / 2)
