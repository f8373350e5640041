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
Tutorial 5: the tensor core of Blackwell, from one tile to overlapping tiles

# Blackwell

Tutorial 2 multiplied matrices on Hopper, where a warpgroup starts a product and keeps
the result in its registers. On Blackwell the tensor core has a memory of its own for
results, **tensor memory** (TMEM), and a product belongs to nobody's registers:

- One thread starts it. Nobody waits for it by executing it.
- It arrives on a barrier when it is complete, as a TMA copy does.
- Whoever needs the result loads it from TMEM.

So copies, products and the work on results are three asynchronous machines, and a fast
kernel keeps all three busy. This tutorial gets there in four steps. Each step comes
with the mistakes that belong to it, and the emulator reports all of them.

You should know [tutorial 2](02_matmul.ipynb): tiles, stages, roles. The kernels are for
the target `sm_100a`. No GPU is needed.
"""

# %%
import os
from typing import Any

# The emulator requires only a CPU. On a machine with a Blackwell GPU, set this variable
# to "cuda" to run the kernels below on the GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu

BF16, F32 = jnp.bfloat16, jnp.float32
BLACKWELL = plgpu.CompilerParams(target="sm_100a")


def random(m, k, seed):
    numbers = np.random.default_rng(seed).standard_normal((m, k), np.float32)
    return jnp.asarray(numbers, BF16)


def check(kernel, a, b):
    """Compares a kernel with NumPy's product in float32."""
    exact = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    # bfloat16 has 8 bits of mantissa: rounding the result costs 2**-9 of it at most.
    np.testing.assert_allclose(
        np.asarray(kernel(a, b), np.float32), exact, rtol=2**-8, atol=1e-3
    )


def report(error, call, *arguments):
    """Runs a kernel with a mistake, and prints what the emulator says of it."""
    try:
        call(*arguments)
    except error as found:
        print(found)
    else:
        raise AssertionError("the mistake is not found")


# %% [markdown]
"""
## Step 1: one tile

          SMEM                     tensor core               TMEM
    A  128 x 64  bf16   ---+
                           +--->   acc += A @ B   --->   acc  128 x 128  float32
    B   64 x 128 bf16   ---+                                   |
                                                               v  async_load_tmem
                                                           registers

TMEM has 128 lanes, the rows, and 512 columns of 32 bits. `plgpu.TMEM((128, 128), F32)`
takes 128 of the columns. They hold nothing at first, so the product that comes first
overwrites them: `accumulate=False`.

`tcgen05_mma` names a barrier, and that arrival is called the **commit** of the product.
The barrier is declared with `orders_tensor_core=True`: a wait for it then also has a
fence for tensor memory, which other barriers do not need.

A load from TMEM is asynchronous, too. Its values can be used at once, the compiler
waits for the registers. The columns must not be overwritten before `wait_load_tmem()`;
here nobody does that.
"""

# %%
M, N, K = 128, 128, 64  # a tile of the result, and the K of one step


def tiles(*shape):
    """SMEM for tiles of bfloat16, in the tensor core's order."""
    order = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, BF16, transforms=order)


def store(values, buffer, out):
    """Stores a tile of the result through SMEM, by TMA."""
    buffer[...] = values.astype(BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, out)
    plgpu.wait_smem_to_gmem(0)


def one_tile(a, b, commits=True, orders=True, waits=True):
    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((M, N), BF16),
        compiler_params=BLACKWELL,
        scratch_types=[
            tiles(M, K),
            tiles(K, N),
            tiles(M, N),
            plgpu.TMEM((M, N), F32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(orders_tensor_core=orders),
        ],
    )
    def product(a, b, out, a_smem, b_smem, out_smem, acc, loaded, done):
        plgpu.copy_gmem_to_smem(a, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b, b_smem, loaded)
        plgpu.barrier_wait(loaded)

        commit = done if commits else None
        plgpu.tcgen05_mma(acc, a_smem, b_smem, commit, accumulate=False)
        if waits:
            plgpu.barrier_wait(done)

        store(plgpu.async_load_tmem(acc), out_smem, out)

    return product(a, b)


a, b = random(M, K, 0), random(K, N, 1)
check(one_tile, a, b)

# %% [markdown]
"""
Three mistakes. Without the commit nothing arrives on the barrier, and the warpgroup
waits forever:
"""

# %%
report(plgpu.errors.DeadlockError, lambda: one_tile(a, b, commits=False))

# %% [markdown]
"""
Without the wait the warpgroup loads columns that the tensor core is still writing. The
load would succeed, with old values:
"""

# %%
report(plgpu.errors.RaceError, lambda: one_tile(a, b, waits=False))

# %% [markdown]
"""
And a barrier without the fence is refused when the kernel is traced:
"""

# %%
report(plgpu.errors.ArgumentError, lambda: one_tile(a, b, orders=False))

# %% [markdown]
"""
## Step 2: a loop over K, with stages

A longer K is cut into steps, and TMA runs ahead of the tensor core in a ring of stages,
as in tutorial 2. On Hopper `wgmma_wait(1)` told when a stage could be overwritten. Here
each product commits to the barrier of its stage, `free`, and who wants to copy into the
stage waits for that:

    stage 0   copy 0 | mma 0 -> free | copy 3 ........ | mma 3
    stage 1   copy 1 ........ | mma 1 -> free | copy 4 ........ | mma 4
    stage 2   copy 2 ................ | mma 2 -> free | copy 5 ...

Products on the same accumulator are performed in the order in which they are started,
so nothing waits between them. After the last one `tcgen05_commit_arrive` commits all of
them to `done`.

`accumulate` may depend on the loop: the first step overwrites what is in the columns.
"""

# %%
STAGES = 3


def with_stages(a, b, frees=True, unroll=False):
    (_, k), _ = a.shape, b.shape
    steps = k // K

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((M, N), BF16),
        compiler_params=BLACKWELL,
        scratch_types=[
            tiles(STAGES, M, K),
            tiles(STAGES, K, N),
            tiles(M, N),
            plgpu.TMEM((M, N), F32),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES, orders_tensor_core=True),
            plgpu.Barrier(orders_tensor_core=True),
        ],
    )
    def product(a, b, out, a_smem, b_smem, out_smem, acc, loaded, free, done):
        def fetch(ki):
            stage = lax.rem(ki, STAGES)
            depth = plgpu.ds(ki * K, K)
            arrived = loaded.at[stage]
            plgpu.copy_gmem_to_smem(a.at[:, depth], a_smem.at[stage], arrived)
            plgpu.copy_gmem_to_smem(b.at[depth, :], b_smem.at[stage], arrived)

        plgpu.loop(0, min(STAGES, steps), unroll=unroll)(fetch)

        @plgpu.loop(0, steps, unroll=unroll)
        def _(ki):
            stage = lax.rem(ki, STAGES)
            plgpu.barrier_wait(loaded.at[stage])
            plgpu.tcgen05_mma(
                acc, a_smem.at[stage], b_smem.at[stage], free.at[stage],
                accumulate=ki > 0,
            )  # fmt: skip

            # While this product runs, the stage of the one before is filled again.
            @plgpu.when((ki > 0) & (ki - 1 + STAGES < steps))
            def _():
                if frees:
                    plgpu.barrier_wait(free.at[lax.rem(ki - 1, STAGES)])
                fetch(ki - 1 + STAGES)

        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        store(plgpu.async_load_tmem(acc), out_smem, out)

    return product(a, b)


a, b = random(M, 6 * K, 2), random(6 * K, N, 3)
check(with_stages, a, b)

# %% [markdown]
"""
A copy into a stage that has not been waited for overwrites what the tensor core reads:
"""

# %%
report(plgpu.errors.RaceError, lambda: with_stages(a, b, frees=False))

# %% [markdown]
"""
## Step 3: roles

In step 2 one warpgroup does everything in turn: while it converts and stores a result,
it starts neither copies nor products. Both need only one thread, so each becomes the
job of a single **warp**. `warp_map` runs its function in each of the four warps of a
warpgroup, independently:

    warpgroup 0   warp 0   copies     waits for free[stage],   fills it -> loaded[stage]
                  warp 1   products   waits for loaded[stage], starts   -> free[stage]
                                      after the last step               -> done
    warpgroup 1            results    waits for done, loads from TMEM, stores

The parts of the warps are functions of their own, because step 4 uses them again.
`first` counts the steps before this tile.
"""

# %%
ROLES: dict[str, Any] = {"num_threads": 2, "thread_name": "role"}


def stage_barriers():
    return [
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),  # loaded
        plgpu.Barrier(num_barriers=STAGES, orders_tensor_core=True),  # free
    ]


def copies(rows, columns, steps, a, b, a_smem, b_smem, loaded, free, first, unroll):
    """Warp 0's part in one tile."""

    @plgpu.loop(0, steps, unroll=unroll)
    def _(ki):
        stage = lax.rem(first + ki, STAGES)

        @plgpu.when(first + ki >= STAGES)
        def _():
            plgpu.barrier_wait(free.at[stage])

        depth, arrived = plgpu.ds(ki * K, K), loaded.at[stage]
        plgpu.copy_gmem_to_smem(a.at[rows, depth], a_smem.at[stage], arrived)
        plgpu.copy_gmem_to_smem(b.at[depth, columns], b_smem.at[stage], arrived)


def products(acc, steps, a_smem, b_smem, loaded, free, done, first, unroll):
    """Warp 1's part in one tile."""

    @plgpu.loop(0, steps, unroll=unroll)
    def _(ki):
        stage = lax.rem(first + ki, STAGES)
        plgpu.barrier_wait(loaded.at[stage])
        plgpu.tcgen05_mma(
            acc, a_smem.at[stage], b_smem.at[stage], free.at[stage], accumulate=ki > 0
        )

    plgpu.tcgen05_commit_arrive(done)


def with_roles(a, b, unroll=False):
    steps = a.shape[1] // K

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((M, N), BF16),
        compiler_params=BLACKWELL,
        **ROLES,
        scratch_types=[
            tiles(STAGES, M, K),
            tiles(STAGES, K, N),
            tiles(M, N),
            plgpu.TMEM((M, N), F32),
            *stage_barriers(),
            plgpu.Barrier(orders_tensor_core=True),
        ],
    )
    def product(a, b, out, a_smem, b_smem, out_smem, acc, loaded, free, done):
        @plgpu.when(lax.axis_index("role") == 0)
        def _():
            @plgpu.warp_map
            def _(warp):
                ring = a_smem, b_smem, loaded, free

                @plgpu.when(warp == 0)
                def _():
                    rows, columns = plgpu.ds(0, M), plgpu.ds(0, N)
                    copies(rows, columns, steps, a, b, *ring, 0, unroll)

                @plgpu.when(warp == 1)
                def _():
                    products(acc, steps, *ring, done, 0, unroll)

        @plgpu.when(lax.axis_index("role") == 1)
        def _():
            plgpu.barrier_wait(done)
            store(plgpu.async_load_tmem(acc), out_smem, out)

    return product(a, b)


check(with_roles, a, b)

# %% [markdown]
"""
## Step 4: two accumulators

With one tile the roles gain nothing: results come after products. With many tiles per
CTA they could overlap, but for one thing: the products of the next tile must not
overwrite the columns that warpgroup 1 is still loading. TMEM has room for more than one
accumulator. With two of them the tensor core fills one while the other is stored:

    products   | tile 0 -> acc 0 | tile 1 -> acc 1 | tile 2 -> acc 0 | ...
    results                      | acc 0 stored    | acc 1 stored    | ...

An accumulator is handed over like a stage: `done[i]` says that it is complete,
`empty[i]` that it may be overwritten. Warpgroup 1 arrives on `empty` when it has loaded
the values, before it stores them. It has to wait for its loads first:
`wait_load_tmem()`. Since this arrival, too, orders accesses to TMEM, `empty` is
declared with `orders_tensor_core=True`.
"""

# %%
ACCUMULATORS = 2


def overlapping(
    a, b, blocks=2, accumulators=ACCUMULATORS, orders=True, waits=True, unroll=False
):
    (m, k), n = a.shape, b.shape[1]
    steps, plane = k // K, (m // M, n // N)
    number = plane[0] * plane[1]

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((m, n), BF16),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=BLACKWELL,
        **ROLES,
        scratch_types=[
            tiles(STAGES, M, K),
            tiles(STAGES, K, N),
            tiles(M, N),
            plgpu.TMEM((accumulators, M, N), F32),
            *stage_barriers(),
            plgpu.Barrier(num_barriers=ACCUMULATORS, orders_tensor_core=True),
            plgpu.Barrier(num_barriers=ACCUMULATORS, orders_tensor_core=orders),
        ],
    )
    def product(a, b, out, a_smem, b_smem, out_smem, acc, loaded, free, done, empty):
        block = lax.axis_index("block")

        def tile_after_tile(do):
            """Calls `do(rows, columns, number of the tile in this block)`."""

            @plgpu.loop(0, number // blocks, unroll=unroll)
            def _(local):
                tile = local * blocks + block
                mi, ni = lax.div(tile, plane[1]), lax.rem(tile, plane[1])
                do(plgpu.ds(mi * M, M), plgpu.ds(ni * N, N), local)

        @plgpu.when(lax.axis_index("role") == 0)
        def _():
            @plgpu.warp_map
            def _(warp):
                ring = a_smem, b_smem, loaded, free

                @plgpu.when(warp == 0)
                def _():
                    @tile_after_tile
                    def _(rows, columns, local):
                        first = local * steps
                        copies(rows, columns, steps, a, b, *ring, first, unroll)

                @plgpu.when(warp == 1)
                def _():
                    @tile_after_tile
                    def _(rows, columns, local):
                        i = lax.rem(local, ACCUMULATORS)

                        @plgpu.when(local >= ACCUMULATORS)
                        def _():
                            plgpu.barrier_wait(empty.at[i])

                        mine = acc.at[lax.rem(i, accumulators)]
                        products(mine, steps, *ring, done.at[i], local * steps, unroll)

        @plgpu.when(lax.axis_index("role") == 1)
        def _():
            @tile_after_tile
            def _(rows, columns, local):
                i = lax.rem(local, ACCUMULATORS)
                plgpu.barrier_wait(done.at[i])
                values = plgpu.async_load_tmem(acc.at[lax.rem(i, accumulators)])
                if waits:
                    plgpu.wait_load_tmem()
                plgpu.barrier_arrive(empty.at[i])
                store(values, out_smem, out.at[rows, columns])

    return product(a, b)


a, b = random(2 * M, 2 * K, 4), random(2 * K, 4 * N, 5)
check(overlapping, a, b)  # 8 tiles for 2 blocks

# %% [markdown]
"""
The handover has three mistakes of its own. An arrival before the loads are complete:
"""

# %%
report(plgpu.errors.RaceError, lambda: overlapping(a, b, waits=False))

# %% [markdown]
"""
A barrier that does not order the tensor core. The arrival and the wait are there, the
fences are not, so the products may overtake the loads:
"""

# %%
report(plgpu.errors.RaceError, lambda: overlapping(a, b, orders=False))

# %% [markdown]
"""
And two accumulators that are in fact one: both tiles use the same columns, and the
barriers of the one say nothing of the other:
"""

# %%
report(plgpu.errors.RaceError, lambda: overlapping(a, b, accumulators=1))

# %% [markdown]
"""
## What each step changes

The kernels compile without a GPU. That requires NVIDIA's compiler, which the extra
`offline` installs on Linux; without it this part is skipped.

All loops are unrolled here, so each instruction in the PTX is executed once; only waits
may be repeated. K is six steps except for the first kernel. The last one computes two
tiles in its block, and its numbers are divided by two.
"""

# %%
COUNTED = {
    "copies": "cp.async.bulk.tensor",
    "products": "tcgen05.mma",
    "commits": "tcgen05.commit",
    "loads": "tcgen05.ld",
    "load waits": "tcgen05.wait::ld",
    "fences": "tcgen05.fence",
    "waits": "mbarrier.try_wait",
    "bar.sync": "bar.sync",
}


def arrays(m, k, n):
    return jax.ShapeDtypeStruct((m, k), BF16), jax.ShapeDtypeStruct((k, n), BF16)


DEEP = 6 * K
COMPILED = [  # name, kernel, its operands, tiles that a block computes
    ("one tile, one step", one_tile, arrays(M, K, N), 1),
    ("stages", lambda a, b: with_stages(a, b, unroll=True), arrays(M, DEEP, N), 1),
    ("roles", lambda a, b: with_roles(a, b, unroll=True), arrays(M, DEEP, N), 1),
    (
        "two accumulators",
        lambda a, b: overlapping(a, b, blocks=1, unroll=True),
        arrays(2 * M, DEEP, N),
        2,
    ),
]


def instructions_per_tile():
    """Returns the counts of each kernel."""
    counts = {}
    for name, kernel, operands, tiles_of_block in COMPILED:
        (compiled,) = plgpu.offline.compile(kernel, *operands, target="sm_100a")
        counts[name] = {
            title: compiled.ptx.count(instruction) / tiles_of_block
            for title, instruction in COUNTED.items()
        }
    return counts


try:
    per_tile = instructions_per_tile()
except plgpu.errors.OfflineUnavailableError as error:
    per_tile = {}
    print("skipped:", error)

print(" " * 18, *(f"{title:>10}" for title in COUNTED))
for name, counts in per_tile.items():
    print(f"{name:18}", *(f"{number:10g}" for number in counts.values()))

# %% [markdown]
"""
The work of a tile stays the same from the second kernel on: 13 copies, two for each
step and one of the result; 24 products, since a step of K = 64 is four instructions of
K = 16; 7 commits. All of these are executed by one thread. What changes is who waits
for whom:

- **Roles** remove ten of 17 `bar.sync`, at which the 128 threads of a warpgroup meet.
  Where a warpgroup starts a copy or a product, its four warps first meet; a single warp
  needs only itself.
- **Two accumulators** add the handover: waits for the loads and for barriers, and
  fences for tensor memory before arrivals and after waits. In the second tile every
  stage has been used before, so all of its copies wait for `free`.

So the later kernels execute no fewer instructions. They are written so that none of the
three machines waits for another that could have run before.

With `a_scale` and `b_scale`, which `async_copy_scales_to_tmem` copies to tensor memory
in order with the products, the tensor core scales blocks of 8- or 4-bit floats. With
`collective_axis` two CTAs, each with 128 rows of A and half of the columns of B, share
a product, scaled or not: the first one issues it, and each has the scales of its rows
and of all of B. An accumulator (tiles, 128, N) takes several tiles of rows. See
`ops.block_scaled_matmul`, and its counts in docs/performance.md.

## The rules on one page

| What | who starts it | complete when |
|---|---|---|
| `tcgen05_mma` | a warp, or a warpgroup | its commit's barrier is waited for |
| `tcgen05_commit_arrive` | who started the products | arrives when they are complete |
| `async_copy_scales_to_tmem` | a warp, or a warpgroup | as `tcgen05_mma` |
| `async_load_tmem` | a warpgroup | values: at once; columns: `wait_load_tmem` |
| `async_store_tmem` | a warpgroup | `commit_tmem` |
| `barrier_arrive` | a warpgroup, or a warp | at once |

Barriers that hand over columns of TMEM, in either direction, are declared with
`orders_tensor_core=True`. An accumulator has no value before a product with
`accumulate=False`, or a store. Columns are overwritten only after their loads have been
waited for, by everyone who has loaded them.
"""
