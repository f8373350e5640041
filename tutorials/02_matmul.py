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
Tutorial 2: a matrix product on the tensor cores, from one tile to a fast kernel

# A matrix product

Matrix products have the highest throughput of a GPU, but reaching it is difficult. This
tutorial starts with one tile and one tensor core instruction, and arrives in six steps
at a kernel with the speed of NVIDIA's own library. Each step is a complete kernel that
changes one thing. At the end is a table with the speed of each.

You should know [the first tutorial](01_first_kernel.ipynb): blocks, tiles, SMEM,
barriers, TMA. As there, no GPU is needed.
"""

# %%
import os
from typing import Any

# The emulator requires only a CPU. On a machine with a Hopper GPU, set this variable to
# "cuda" to run the kernels below on the GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu


def random(m, k, seed):
    numbers = np.random.default_rng(seed).standard_normal((m, k), np.float32)
    return jnp.asarray(numbers, jnp.bfloat16)


def check(kernel, a, b):
    """Compares a kernel with NumPy's product in float32."""
    exact = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    # bfloat16 has 8 bits of mantissa: rounding the result costs 2**-9 of it at most.
    np.testing.assert_allclose(
        np.asarray(kernel(a, b), np.float32), exact, rtol=2**-8, atol=1e-3
    )


# %% [markdown]
"""
## Step 1: one tile

The tensor core is a part of the SM that multiplies small matrices. On Hopper it reads
both factors from SMEM and adds the product to an **accumulator** in the registers of a
warpgroup:

          SMEM                     tensor core               registers
    A  128 x 64  bf16   ---+
                           +--->   acc += A @ B   --->   acc  128 x 128  float32
    B   64 x 128 bf16   ---+

`plgpu.ACC((128, 128))` declares one, initialized with zeros. `plgpu.wgmma(acc, a, b)`
is the product, named after the instruction. Like a TMA copy it is asynchronous: until
it has been waited for, the factors must not be overwritten. `acc[...]` waits for it and
returns the values.

SMEM has a different storage order here: the tensor core requires tiles of 8 rows of 128
bytes, with the 16-byte chunks of each row permuted by a fixed pattern, the **swizzle**,
so that it can read a column of chunks at once. TMA writes SMEM in this order if the
declaration specifies it. The rest of the kernel does not depend on it.
"""

# %%
M, N, K = 128, 128, 64  # a tile of the result, and the K of one step


def tiles(*shape):
    """SMEM for tiles of bfloat16, in the tensor core's order."""
    order = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=order)


@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
    scratch_types=[
        tiles(M, K),
        tiles(K, N),
        tiles(M, N),
        plgpu.ACC((M, N)),
        plgpu.Barrier(num_arrivals=2),
    ],
)
def one_tile(a, b, out, a_smem, b_smem, out_smem, acc, loaded):
    plgpu.copy_gmem_to_smem(a, a_smem, loaded)
    plgpu.copy_gmem_to_smem(b, b_smem, loaded)
    plgpu.barrier_wait(loaded)

    plgpu.wgmma(acc, a_smem, b_smem)

    out_smem[...] = acc[...].astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, out)
    plgpu.wait_smem_to_gmem(0)


check(one_tile, random(M, K, 0), random(K, N, 1))

# %% [markdown]
"""
The barrier has `num_arrivals=2` since two copies arrive on it.

## Step 2: all tiles

A larger result is split into tiles, one for each block. A block reads M rows of A and N
columns of B, in steps of K, and sums the products in the accumulator.

                        B   columns of this block
                           +---+
                           |   |  ki = 0
                           +---+
                           |   |  ki = 1
                           +---+
        A                  |   |  ...
       +---+---+---+       +---+
       | 0 | 1 |...|       |acc|     rows of this block
       +---+---+---+       +---+

A function of the shapes now creates the kernel. The tiles have to divide them.
"""


# %%
def all_tiles(a, b):
    (m, k), n = a.shape, b.shape[1]

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        grid=(m // M, n // N),
        grid_names=("m", "n"),
        scratch_types=[
            tiles(M, K),
            tiles(K, N),
            tiles(M, N),
            plgpu.ACC((M, N)),
            plgpu.Barrier(num_arrivals=2),
        ],
    )
    def product(a, b, out, a_smem, b_smem, out_smem, acc, loaded):
        rows = plgpu.ds(lax.axis_index("m") * M, M)
        columns = plgpu.ds(lax.axis_index("n") * N, N)

        @plgpu.loop(0, k // K)
        def _(ki):
            depth = plgpu.ds(ki * K, K)
            plgpu.copy_gmem_to_smem(a.at[rows, depth], a_smem, loaded)
            plgpu.copy_gmem_to_smem(b.at[depth, columns], b_smem, loaded)
            plgpu.barrier_wait(loaded)
            plgpu.wgmma(acc, a_smem, b_smem)
            plgpu.wgmma_wait(0)  # the next copy overwrites the factors

        out_smem[...] = acc[...].astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)

    return product(a, b)


a, b = random(256, 512, 2), random(512, 256, 3)
check(all_tiles, a, b)

# %% [markdown]
"""
## Step 3: copies ahead of the tensor core

In step 2 a block either copies or multiplies, never both. To overlap them, a block has
several buffers, called **stages**. While the tensor core reads one, TMA fills the
others:

    stage 0   copy 0 | wgmma 0 | copy 4 ........ | wgmma 4 |
    stage 1   copy 1 ......... | wgmma 1 | copy 5 ........ | wgmma 5 |
    stage 2   copy 2 ................... | wgmma 2 | copy 6 ........
    stage 3   copy 3 ............................. | wgmma 3 | copy 7 ...

`tiles(STAGES, M, K)` declares them as one reference with one more dimension, and
`plgpu.Barrier(num_barriers=STAGES)` a barrier for each. `ref.at[stage]` selects one.

The tensor core should not idle either. `wgmma_wait(1)` leaves one product pending, the
one just started. After it the *preceding* product is done, and its buffers are free for
the next copy, which fetches the tiles of three steps later.
"""

# %%
STAGES = 4


def with_stages(a, b):
    (m, k), n = a.shape, b.shape[1]
    steps = k // K

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        grid=(m // M, n // N),
        grid_names=("m", "n"),
        scratch_types=[
            tiles(STAGES, M, K),
            tiles(STAGES, K, N),
            tiles(M, N),
            plgpu.ACC((M, N)),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ],
    )
    def product(a, b, out, a_smem, b_smem, out_smem, acc, loaded):
        rows = plgpu.ds(lax.axis_index("m") * M, M)
        columns = plgpu.ds(lax.axis_index("n") * N, N)

        def fetch(ki):
            stage = lax.rem(ki, STAGES)
            depth = plgpu.ds(ki * K, K)
            done = loaded.at[stage]
            plgpu.copy_gmem_to_smem(a.at[rows, depth], a_smem.at[stage], done)
            plgpu.copy_gmem_to_smem(b.at[depth, columns], b_smem.at[stage], done)

        plgpu.loop(0, min(STAGES, steps))(fetch)

        @plgpu.loop(0, steps)
        def _(ki):
            stage = lax.rem(ki, STAGES)
            plgpu.barrier_wait(loaded.at[stage])
            plgpu.wgmma(acc, a_smem.at[stage], b_smem.at[stage])
            plgpu.wgmma_wait(1)  # product ki - 1 is done

            @plgpu.when((ki > 0) & (ki - 1 + STAGES < steps))
            def _():
                fetch(ki - 1 + STAGES)  # into the buffers of ki - 1

        out_smem[...] = acc[...].astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)

    return product(a, b)


check(with_stages, a, b)

# %% [markdown]
"""
The emulator checks the buffers. With `wgmma_wait(2)`, or with `fetch(ki + STAGES)`, a
copy could overwrite data that a product is still reading. On a GPU such an error may
remain unnoticed; the emulator reports it with the lines of both.

## Step 4: a producer and two consumers

So far one warpgroup does everything: it waits for copies, starts products, waits for
products, starts copies. It often waits for one while it could start another. So the
work is divided among three warpgroups of one block, `num_threads=3`, which run
concurrently and execute different code (warp specialization):

- A **producer** starts the copies.
- Two **consumers** start the products. Each has M rows of A. Both use the same columns
  of B, so the block's tile is 2 M x N, and a byte of B is used twice as often.

They synchronize through barriers, two for each stage:

- `full`: the copies are complete; the consumers may read. Two copies arrive on it.
- `empty`: the consumers have read; the producer may copy again. Both consumers arrive
  on it with `barrier_arrive`.

        producer                              consumers (two of them)
        --------                              ---------
        wait empty[stage]   <------------+
        copy A, B --> full[stage] ---+   |
        next stage                   +-- | -> wait full[stage]
                                         |    wgmma
                                         |    wgmma_wait(1)
                                         +--  arrive empty[stage before]
                                              next stage

The first round through the stages needs no wait: they are initially empty.

An accumulator of 128 x 128 uses 128 registers of each thread. At the start of a kernel
all threads have the same number, 168 with three warpgroups. `set_max_registers` moves
some from the producer, which computes nothing, to the consumers. The sum
(2 * 232 + 40) * 128 = 64512 must not exceed the SM's 65536. The accumulator is now
allocated in the consumers' code, by `run_scoped`: the producer has none.

`fetch` and `multiply` below are the two columns of the picture, for one tile; `work`
divides the roles. The next steps use them again. For those, a block can have several
tiles, `first` is the number of steps of the tiles before, and `share` is for step 6.

The four stages leave 35 KiB of SMEM. The whole result does not fit, so each consumer
stores it in parts of 64 x 64, alternating between two buffers. Before a buffer is
reused, `wait_smem_to_gmem(1, wait_read_only=True)` ensures that the copy before the
last one has read it.
"""

# %%
CONSUMERS = 2
PRODUCER = 2  # the number of the producer; the consumers are 0 and 1
BLOCK_M = CONSUMERS * M
PART = 64  # rows and columns of a part of the result
WARPGROUPS: dict[str, Any] = {"num_threads": CONSUMERS + 1, "thread_name": "wg"}


def scratch(barrier=plgpu.Barrier, **more):
    return [
        tiles(STAGES, BLOCK_M, K),
        tiles(STAGES, K, N),
        tiles(CONSUMERS, 2, PART, PART),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),  # full
        barrier(num_arrivals=CONSUMERS, num_barriers=STAGES, **more),  # empty
    ]


def fetch(rows, columns, steps, a, b, a_smem, b_smem, full, empty, first, share):
    """The producer's part in one tile."""

    @plgpu.loop(0, steps)
    def _(ki):
        stage = lax.rem(first + ki, STAGES)

        @plgpu.when(first + ki >= STAGES)
        def _():
            plgpu.barrier_wait(empty.at[stage])

        depth = plgpu.ds(ki * K, K)
        plgpu.copy_gmem_to_smem(
            a.at[rows, depth], a_smem.at[stage], full.at[stage], collective_axes=share
        )
        plgpu.copy_gmem_to_smem(b.at[depth, columns], b_smem.at[stage], full.at[stage])


def multiply(wg, steps, a_smem, b_smem, full, empty, first):
    """A consumer's part in one tile."""
    mine = plgpu.ds(wg * M, M)  # of the block's rows

    def accumulate(acc):
        @plgpu.loop(0, steps)
        def _(ki):
            stage = lax.rem(first + ki, STAGES)
            plgpu.barrier_wait(full.at[stage])
            plgpu.wgmma(acc, a_smem.at[stage, mine], b_smem.at[stage])
            plgpu.wgmma_wait(1)

            @plgpu.when(ki > 0)
            def _():
                plgpu.barrier_arrive(empty.at[lax.rem(first + ki - 1, STAGES)])

        values = acc[...]
        plgpu.barrier_arrive(empty.at[lax.rem(first + steps - 1, STAGES)])
        return values.astype(jnp.bfloat16)

    return plgpu.run_scoped(accumulate, plgpu.ACC((M, N)))


def store(values, out, row, column, buffers):
    """Stores a consumer's tile part by part. The last two copies stay under way."""
    parts = [(i, j) for i in range(0, M, PART) for j in range(0, N, PART)]
    for number, (i, j) in enumerate(parts):
        buffer = buffers.at[number % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        buffer[...] = values[i : i + PART, j : j + PART]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            buffer, out.at[plgpu.ds(row + i, PART), plgpu.ds(column + j, PART)]
        )


def work(do_tiles, steps, a, b, out, a_smem, b_smem, out_smem, full, empty, *, share):
    """What the three warpgroups do with each tile of the block."""
    wg = lax.axis_index("wg")

    @plgpu.when(wg == PRODUCER)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        @do_tiles
        def _(row, column, first):
            rows, columns = plgpu.ds(row, BLOCK_M), plgpu.ds(column, N)
            refs = a, b, a_smem, b_smem, full, empty
            fetch(rows, columns, steps, *refs, first, share)

    @plgpu.when(wg < CONSUMERS)
    def _():
        plgpu.set_max_registers(232, action="increase")

        @do_tiles
        def _(row, column, first):
            values = multiply(wg, steps, a_smem, b_smem, full, empty, first)
            store(values, out, row + wg * M, column, out_smem.at[wg])

        plgpu.wait_smem_to_gmem(0)


def specialised(a, b):
    (m, k), n = a.shape, b.shape[1]

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        grid=(m // BLOCK_M, n // N),
        grid_names=("m", "n"),
        **WARPGROUPS,
        scratch_types=scratch(),
    )
    def product(*refs):
        def one_tile(do):
            do(lax.axis_index("m") * BLOCK_M, lax.axis_index("n") * N, 0)

        work(one_tile, k // K, *refs, share=None)

    return product(a, b)


check(specialised, a, b)

# %% [markdown]
"""
## Step 5: persistent blocks

A block of step 4 starts with empty buffers and ends with a tile to store. During both
the tensor core is idle, and the next block starts only after this one has exited.

So launch only as many blocks as the GPU has SMs, and let each compute several tiles.
Such a kernel is called **persistent**. Producer and consumers each run a loop over the
block's tiles, and do not wait for each other between them: while the consumers store a
tile, the producer already fills the buffers for the next, and the copies of `store` go
on during the next tile's products. In the program a loop over tiles takes the place of
the one tile; everything else is that of step 4.

- `nd_loop((number,), collective_axes="block")` distributes the steps of a loop over the
  blocks: block i of n executes the steps i, i + n, i + 2 n and so on. `info.index` is
  the step, `info.local_index` counts those of this block.
- `planar_snake` converts that number to a position in the result. The order is not row
  by row, but by strips 8 tiles wide, so that the tiles computed at the same time are
  adjacent. Adjacent tiles read the same rows of A and columns of B, which are then in
  the L2, the cache between GMEM and the SMs.

The stages are used cyclically across tiles: `first + ki` counts the steps of all tiles,
and determines the stage.

`multiply` also arrives for the last step of a tile, after `acc[...]` has waited for it.
In step 4 that arrival was not waited for; here the producer does, for the next tile.
Without it, the emulator reports a deadlock: 3 of 3 warpgroups wait, with the line and
the barrier of each.
"""

# %%
SMS = plgpu.arch.SM_90A.sm_count  # 132
STRIP = 8


def persistent(a, b, blocks=SMS):
    (m, k), n = a.shape, b.shape[1]
    steps = k // K
    plane = (m // BLOCK_M, n // N)
    number = plane[0] * plane[1]

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        grid=(min(blocks, number),),
        grid_names=("block",),
        **WARPGROUPS,
        scratch_types=scratch(),
    )
    def product(*refs):
        def tile_after_tile(do):
            @plgpu.nd_loop((number,), collective_axes="block")
            def _(info):
                mi, ni = plgpu.planar_snake(info.index[0], plane, 1, STRIP)
                do(mi * BLOCK_M, ni * N, info.local_index * steps)

        work(tile_after_tile, steps, *refs, share=None)

    return product(a, b)


a, b = random(512, 384, 4), random(384, 512, 5)
check(lambda a, b: persistent(a, b, blocks=3), a, b)  # 8 tiles for 3 blocks

# %% [markdown]
"""
## Step 6: clusters of two

Two blocks that are adjacent in a row of the result read the same rows of A, and both
fetch them. A **cluster** is a group of blocks that run at the same time on nearby SMs,
and can access each other's SMEM. In a cluster of two each block fetches half of A's
tile, and TMA writes it to the SMEM of both, a **multicast**. Every byte of A is fetched
once instead of twice.

                 A (half) ---+---> block 0, SMEM: all of A   its own B
                 A (half) ---+---> block 1, SMEM: all of A   its own B

Little changes in the program:

- `cluster=(2,)` and its name, "pair". The grid now counts clusters.
- Of two adjacent tiles each block computes one, by `lax.axis_index("pair")`.
- `share="pair"` is the `collective_axes` of the copy of A in `fetch`: both blocks
  request the whole tile, and each receives it. Their `full` barriers count the bytes of
  both halves.
- A copy now also writes into the *other* block's SMEM. So a stage is empty only when
  the consumers of both blocks have read it. `ClusterBarrier` is a barrier for that: an
  arrival counts in both blocks. With a plain `Barrier` one block would overwrite data
  that the other is still reading, which the emulator reports.
"""


# %%
def clustered(a, b, blocks=SMS):
    (m, k), n = a.shape, b.shape[1]
    steps = k // K
    plane = (m // BLOCK_M, n // (2 * N))  # of pairs
    number = plane[0] * plane[1]

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        grid=(min(blocks // 2, number),),
        grid_names=("cluster",),
        cluster=(2,),
        cluster_names=("pair",),
        **WARPGROUPS,
        scratch_types=scratch(plgpu.ClusterBarrier, collective_axes="pair"),
    )
    def product(*refs):
        def tile_after_tile(do):
            @plgpu.nd_loop((number,), collective_axes="cluster")
            def _(info):
                mi, ni = plgpu.planar_snake(info.index[0], plane, 1, STRIP)
                ni = 2 * ni + lax.axis_index("pair")
                do(mi * BLOCK_M, ni * N, info.local_index * steps)

        work(tile_after_tile, steps, *refs, share="pair")

    return product(a, b)


check(lambda a, b: clustered(a, b, blocks=6), a, b)  # 4 pairs of tiles, 3 clusters

# %%
STEPS = {
    "1 one tile": one_tile,
    "2 all tiles": all_tiles,
    "3 stages": with_stages,
    "4 producer, consumers": specialised,
    "5 persistent": persistent,
    "6 clusters of two": clustered,
}

# %% [markdown]
"""
## Performance

Measured by `python -m benchmarks.tutorial_matmul`, which runs the cells above on a GPU:
4096 x 4096 x 4096, bfloat16, random normal inputs, one NVIDIA H200, jax 0.11.2, jaxlib
0.11.2. A product has 2 * 4096**3 operations. Step 1 computes a single tile
on one of 132 SMs. `jnp.matmul` calls cuBLAS.

![Bars: the speed of each step, and of cuBLAS](02_matmul_speed.svg)

| step | µs | TFLOP/s | of cuBLAS |
|---|---|---|---|
| 1 one tile | 2.3 | 0.9 |  |
| 2 all tiles | 240.2 | 572 | 0.72 |
| 3 stages | 199.2 | 690 | 0.87 |
| 4 producer, consumers | 177.5 | 774 | 0.98 |
| 5 persistent | 173.3 | 793 | 1.00 |
| 6 clusters of two | 174.0 | 790 | 1.00 |
| cuBLAS through JAX | 173.1 | 794 | 1.00 |

The times are kernel times on the device, measured by CUPTI, without launches; the
candidates are interleaved in a shuffled order with pauses between the rounds. At this
size clusters have no measurable effect. At 8192 x 8192 x 8192 they do: step 6 reaches
0.99 of cuBLAS, step 5 0.97 ([docs/performance.md](../docs/performance.md)), since each
CTA reads fewer bytes from the L2. The inputs matter, too: a card lowers its clock if it
draws too much power, and data that toggles many bits draws more.

## The library kernel

`pallas_gpu.ops.matmul` is the kernel of step 6 with its sizes as parameters, for
float16 and bfloat16, and with checks. [Its source](../pallas_gpu/ops/gemm/hopper.py)
is written with the same public names.
"""
