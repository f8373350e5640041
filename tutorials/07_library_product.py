# ---
# jupyter:
#   jupytext:
#     cell_markers: '"""'
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
"""
Tutorial 7: a product like the library's, from a ring, roles, tiles and stores

# A product like the library's

[The second tutorial](02_matmul.ipynb) arrived at a fast product with every barrier
written out. The kernels of `pallas_gpu.ops` are not written like that: what they have
in common are a few values, which are public. With them the same kernel, for any sizes
and with an epilogue, has no barrier of its own.

- `Ring`: the slots of the buffers, when one may be filled, when it is full, and when
  the last product has read it;
- `Roles`: which warpgroup copies, which compute, and the registers of each;
- `TileSchedule`: which tiles a CTA computes, in which order;
- `TileStore`: through which buffers a tile is stored, and when one is free again.

They are Python: what is emitted are the barriers that you would write.
[docs/ring.md](../docs/ring.md) describes each.
"""

# %%
import os

# The emulator requires only a CPU. On a machine with a Hopper GPU, set this variable to
# "cuda" to run the kernels below on the GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu

# %% [markdown]
"""
## The kernel

A block has two consumers, which compute 64 rows each of a tile of 128 x 256, and a
producer. A ring has four slots for tiles of A and B, 64 deep.
"""

# %%
ROWS, N, K, PART = 64, 256, 64, 64
STAGES, CONSUMERS = 4, 2


def tiles(*shape, dtype=jnp.bfloat16):
    """SMEM in the form that TMA writes and the tensor core reads."""
    tiling = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=tiling)


def product(a, b, activation=lambda x: x, blocks=plgpu.arch.SM_90A.sm_count):
    """Returns activation(a @ b)."""
    (m, k), n = a.shape, b.shape[1]
    steps = plgpu.cdiv(k, K)
    schedule = plgpu.TileSchedule((m, n), (CONSUMERS * ROWS, N))
    roles = plgpu.Roles(CONSUMERS, registers=(40, 232))

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        grid=(schedule.clusters(blocks),),
        grid_names=("worker",),
        num_threads=roles.num_threads,
        thread_name="wg",
        scratch_types={
            "ring": plgpu.Ring.of(
                [tiles(STAGES, CONSUMERS * ROWS, K), tiles(STAGES, K, N)],
                consumers=CONSUMERS,
            ),
            "parts": tiles(CONSUMERS, 2, ROWS, PART),
        },
    )
    def kernel(a, b, out, *, ring, parts):
        wg = lax.axis_index("wg")

        def fill(batch, i, j, number):
            rows, columns = plgpu.ds(i * schedule.tile[0], 2 * ROWS), plgpu.ds(j * N, N)

            @plgpu.loop(0, steps)
            def every_step(ki):
                slot, depth = ring.fill(number * steps + ki), plgpu.ds(ki * K, K)
                left, right = slot.buffers
                plgpu.copy_gmem_to_smem(a.at[rows, depth], left, slot.full)
                plgpu.copy_gmem_to_smem(b.at[depth, columns], right, slot.full)

        def compute(batch, i, j, number):
            def accumulate(acc):
                def multiply(_, slot):
                    left, right = slot.buffers
                    plgpu.wgmma(acc, left.at[plgpu.ds(wg * ROWS, ROWS)], right)

                first = number * steps
                return ring.accumulate([acc], steps, multiply, first=first)[0]

            tile = plgpu.run_scoped(accumulate, plgpu.ACC((ROWS, N)))
            store = plgpu.TileStore(parts.at[wg], N // PART)
            row = i * schedule.tile[0] + wg * ROWS
            for part in range(store.parts):
                column, start = part * PART, j * N + part * PART
                store.store(
                    part,
                    activation(tile[:, column : column + PART]),
                    out.at[plgpu.ds(row, ROWS), plgpu.ds(start, PART)],
                    predicate=(row < m) & (start < n),
                )

        def consume():
            schedule.for_each(compute)
            plgpu.wait_smem_to_gmem(0)

        roles.run(wg, lambda: schedule.for_each(fill), consume)

    return kernel(a, b)


# %% [markdown]
"""
Nothing in it is peculiar to these sizes: TMA reads zeros and writes nothing outside of
the arrays, as long as their rows are multiples of 16 bytes.
"""


# %%
def random(m, k, seed):
    numbers = np.random.default_rng(seed).standard_normal((m, k), np.float32)
    return jnp.asarray(numbers, jnp.bfloat16)


def check(got, a, b, activation=lambda x: x):
    exact = activation(np.asarray(a, np.float32) @ np.asarray(b, np.float32))
    # bfloat16 has 8 bits of mantissa: rounding the result costs 2**-9 of it at most.
    got = np.asarray(got, np.float32)
    np.testing.assert_allclose(got, exact, rtol=2**-8, atol=1e-3)


a, b = random(200, 328, 0), random(328, 520, 1)
check(product(a, b, blocks=3), a, b)
check(product(a, b, jax.nn.relu, blocks=3), a, b, lambda x: np.maximum(x, 0))

# %% [markdown]
"""
## Speed

Measured by `python -m benchmarks.tutorial_library_product`, which runs the cells above
on a GPU: bfloat16, random normal inputs, one NVIDIA H200, jax 0.11.2; medians of kernel
times on the device, in microseconds, and the part of cuBLAS's speed.

| size | this kernel | `ops.matmul` | cuBLAS |
|---|---|---|---|
| 4096 x 4096 x 4096 | 178.4 (0.991) | 178.0 (0.993) | 176.8 |
| 8192 x 8192 x 8192 | 1380.9 (0.981) | 1371.2 (0.988) | 1354.3 |

`ops.matmul` chooses the tiles for the sizes, and at the larger one clusters of two: in
`TileSchedule`, `Ring.of` and the copy of A that is an argument each.

## Mistakes

What the ring owns cannot be forgotten. What is left to you is what the emulator
reports: a slot that is taken but not released stops the producer in the next round.
"""


# %%
def row_sums(release=True):
    """A kernel that adds the rows of x, one after the other."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        num_threads=2,
        thread_name="wg",
        scratch_types={"ring": plgpu.Ring.of(plgpu.SMEM((2, 128), jnp.float32))},
    )
    def kernel(x, out, *, ring):
        def fill():
            @plgpu.loop(0, x.shape[0])
            def _(i):
                slot = ring.fill(i)
                plgpu.copy_gmem_to_smem(x.at[i], slot.buffers, slot.full)

        def add():
            @plgpu.loop(0, x.shape[0], init_carry=jnp.zeros((128,), jnp.float32))
            def total(i, total):
                total = total + ring.take(i).buffers[...]
                if release:
                    ring.release(i)
                return total

            out[...] = total

        plgpu.Roles(consumers=1).run(lax.axis_index("wg"), fill, add)

    return kernel


x = jnp.ones((5, 128), jnp.float32)
np.testing.assert_array_equal(row_sums()(x), np.full(128, 5, np.float32))

# %%
if jax.default_backend() == "cpu":  # a GPU would wait for ever
    try:
        row_sums(release=False)(x)
    except plgpu.errors.PallasGpuError as error:
        print(error)
    else:
        raise AssertionError("the emulator has to report it")
