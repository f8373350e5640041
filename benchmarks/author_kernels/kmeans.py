# SPDX-License-Identifier: Apache-2.0
"""The nearest centroid of each point: a product, with the minimum of each row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from benchmarks.author_kernels import normal

# Points and centroids of a block, stages.
CONFIGS = [(64, 64, 3), (64, 128, 2), (64, 128, 3), (128, 64, 2), (128, 128, 2)]


def nearest(x, centroids, norms, config=CONFIGS[0]):
    """Returns the index of the nearest centroid of each point, int32.

    Args:
      x: (n, d), bfloat16.
      centroids: (k, d), bfloat16.
      norms: (k,), float32: the squared lengths of the centroids.
    """
    n, k = len(x), len(centroids)
    points, block, stages = config

    def body(x_ref, c_ref, norm_ref, o_ref):
        rows = plgpu.ds(plgpu.program_id(0) * points, points)
        mine = x_ref[rows, :]
        start = jnp.full(points, jnp.inf), jnp.zeros(points, jnp.int32)

        @plgpu.loop(0, k // block, init_carry=start, num_stages=stages)
        def last(j, carry):
            best, index = carry
            part = plgpu.ds(j * block, block)
            dots = jnp.dot(mine, c_ref[part, :].T, preferred_element_type=jnp.float32)
            distance = norm_ref[part] - 2 * dots
            least, at = distance.min(1), distance.argmin(1).astype(jnp.int32)
            index = jnp.where(least < best, at + j * block, index)
            return jnp.minimum(least, best), index

        _, index = last
        o_ref[rows] = index

    return plgpu.pallas_call(
        body, out_shape=jax.ShapeDtypeStruct((n,), jnp.int32), grid=n // points
    )(x, centroids, norms)


def reference(x, centroids, norms):
    x, centroids = x.astype(jnp.float32), centroids.astype(jnp.float32)
    dots = jnp.dot(x, centroids.T, precision="highest")
    return jnp.argmin(norms - 2 * dots, axis=1).astype(jnp.int32)


SMALL, FULL = (256, 512, 64), (131072, 4096, 128)


def arrays(n, k, d):
    x, centroids = (normal(i, m, d) for i, m in enumerate((n, k)))
    return x, centroids, (centroids.astype(jnp.float32) ** 2).sum(1)


def comparable(args, index):
    """The distance of each point to its centroid: others may be as near."""
    x, centroids, norms = args
    dots = (x.astype(jnp.float32) * centroids[index].astype(jnp.float32)).sum(1)
    return [norms[index] - 2 * dots]


function = nearest
