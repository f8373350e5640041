# SPDX-License-Identifier: Apache-2.0
"""The nearest centroid of each point: a product, with the minimum of each row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from benchmarks.author_kernels import normal

# Points and centroids of a block, warpgroups, blocks of centroids in flight.
CONFIGS = [(128, 128, 2, 2), (128, 256, 2, 2), (192, 128, 3, 2), (64, 128, 1, 2)]


def nearest(x, centroids, norms, config=CONFIGS[0]):
    """Returns the index of the nearest centroid of each point, int32.

    Args:
      x: (n, d), bfloat16.
      centroids: (k, d), bfloat16.
      norms: (k,), float32: the squared lengths of the centroids.
    """
    (n, d), k = x.shape, len(centroids)
    points, block, warpgroups, stages = config

    def body(x_ref, c_ref, norm_ref, o_ref, least_ref, index_ref):
        rows = plgpu.ds(jax.lax.axis_index("wg") * 64, 64)
        step = plgpu.program_id(1)

        @plgpu.when(step == 0)
        def _():
            least_ref[rows] = jnp.full(64, jnp.inf)
            index_ref[rows] = jnp.zeros(64, jnp.int32)

        dots = jnp.dot(x_ref[rows], c_ref[...].T, preferred_element_type=jnp.float32)
        distance = norm_ref[...] - 2 * dots
        least = distance.min(1)
        index = distance.argmin(1).astype(jnp.int32) + step * block
        is_less = least < least_ref[rows]
        index_ref[rows] = jnp.where(is_less, index, index_ref[rows])
        least_ref[rows] = jnp.where(is_less, least, least_ref[rows])

        @plgpu.when(step == plgpu.num_programs(1) - 1)
        def _():
            o_ref[rows] = index_ref[rows]

    return plgpu.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((n,), jnp.int32),
        grid=(plgpu.cdiv(n, points), k // block),
        in_specs=[
            plgpu.BlockSpec((points, d), lambda i, j: (i, 0)),
            plgpu.BlockSpec((block, d), lambda i, j: (j, 0)),
            plgpu.BlockSpec((block,), lambda i, j: (j,)),
        ],
        out_specs=plgpu.BlockSpec((points,), lambda i, j: (i,)),
        scratch_shapes=[
            plgpu.SMEM((points,), jnp.float32),
            plgpu.SMEM((points,), jnp.int32),
        ],
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            max_concurrent_steps=stages,
        ),
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
