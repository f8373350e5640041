# SPDX-License-Identifier: Apache-2.0
"""Linear attention with decay, chunk by chunk, with a ring between two warpgroups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from examples import Case, normal

CHUNK = 64
_TILES = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def chunked_scan(q: jax.Array, k: jax.Array, v: jax.Array, decay: float) -> jax.Array:
    """Returns o[t], the sum of decay ** (t - s) * (q[t] k[s]) * v[s] over s <= t.

    A chunk sees itself by a product with a mask, and all chunks before it by their
    state, a (d, d) matrix that decays.

    Args:
      q, k, v: (heads, length, d), d = 64, the length a multiple of 64.
      decay: from 0 to 1.
    """
    heads, length, d = q.shape
    chunks = length // CHUNK
    roles = plgpu.Roles(consumers=1)

    def tile(*slots):
        return plgpu.SMEM((*slots, CHUNK, d), q.dtype, transforms=_TILES)

    ring = plgpu.Ring.of((tile(2), tile(2), tile(2)))

    def body(q, k, v, o, ring, state, weighted, out):
        head = lax.axis_index("head")

        def produce():
            @plgpu.loop(0, chunks)
            def _(i):
                slot, rows = ring.fill(i), plgpu.ds(i * CHUNK, CHUNK)
                for source, buffer in zip((q, k, v), slot.buffers, strict=True):
                    plgpu.copy_gmem_to_smem(source.at[head, rows], buffer, slot.full)

        def consume():
            i = plgpu.broadcasted_iota(jnp.float32, (CHUNK, CHUNK), 0)
            j = plgpu.broadcasted_iota(jnp.float32, (CHUNK, CHUNK), 1)
            log = jnp.log(jnp.float32(decay))
            mask = jnp.where(i >= j, jnp.exp(log * (i - j)), 0.0)
            past, rest = jnp.exp(log * (i + 1)), jnp.exp(log * (CHUNK - 1 - i))
            store = plgpu.TileStore(out, 1)

            def chunk(n, s):
                q, k, v = ring.take(n).buffers
                state[...] = s.astype(state.dtype)
                weighted[...] = (v[...] * rest).astype(v.dtype)
                plgpu.commit_smem()
                scores = product(q, plgpu.transpose_ref(k, (1, 0))) * mask
                result = product(scores.astype(v.dtype), v) + product(q, state) * past
                s = s * decay**CHUNK + product(plgpu.transpose_ref(k, (1, 0)), weighted)
                ring.release(n)
                store.store(0, result, o.at[head, plgpu.ds(n * CHUNK, CHUNK)])
                return s

            lax.fori_loop(0, chunks, chunk, jnp.zeros((d, d), jnp.float32))
            plgpu.wait_smem_to_gmem(0)

        roles.run(lax.axis_index("wg"), produce, consume)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[ring, tile(), tile(), tile(1)],
        grid=(heads,),
        grid_names=("head",),
        num_threads=roles.num_threads,
        thread_name="wg",
    )(q, k, v)


def product(a, b):
    """The product of two tiles, by wgmma."""

    def multiply(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return plgpu.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1])))


def reference(q, k, v, decay):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    t = jnp.arange(q.shape[1])
    age = t[:, None] - t
    weights = jnp.where(age >= 0, decay ** jnp.maximum(age, 0).astype(jnp.float32), 0)
    scores = jnp.einsum("htd,hsd->hts", q, k) * weights
    return jnp.einsum("hts,hsd->htd", scores, v).astype(jnp.bfloat16)


_BF16 = jnp.bfloat16
CASES = [
    Case(
        lambda q, k, v: chunked_scan(q, k, v, 0.97),
        lambda q, k, v: reference(q, k, v, 0.97),
        tuple((normal(i, 2, 192, 64) / 4).astype(_BF16) for i in range(3)),
        3e-2,
    )
]
