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
Tutorial 3: loops over blocks that copy and compute at the same time

# `pallas_call` and pipelines

Most of the lines of [the second tutorial](02_matmul.ipynb) are about one thing: while
the tensor core works on a block, TMA must already copy the next ones. There the
buffers, their barriers and the order of waits were written by hand. This tutorial lets
**pipelines** do it, in three forms: `pallas_call` with a sequential axis,
`emit_pipeline` inside a kernel, and `emit_pipeline_warp_specialized`.

As before, no GPU is needed.
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


a, b = random(256, 512, 0), random(512, 256, 1)

# %% [markdown]
"""
## A product with a sequential axis

The grid of a `pallas_call` has three axes here: rows of tiles of the result, columns of
tiles, and steps along K. Positions on the first two axes are independent; they are
**parallel** axes, and become blocks of threads. The last axis is **sequential**, in
JAX's words "arbitrary": one block of threads executes its steps one after another, as a
loop. `dimension_semantics` says which is which.

                              step 0   step 1   step 2   step 3
    block (i, j)     A:       (i, 0)   (i, 1)   (i, 2)   (i, 3)
                     B:       (0, j)   (1, j)   (2, j)   (3, j)
                     result:  (i, j)   (i, j)   (i, j)   (i, j)

The index maps say the same: the blocks of A and B move along the sequential axis, that
of the result stays. Three rules follow from it.

- A block of an input that moves is copied for each step, one that stays is copied once.
- A block of the result is copied back when the next step has another block, or after
  the last step. This one is written once.
- Scratch memory keeps its contents from step to step. `ACC` is an accumulator in
  registers, and starts as zeros.
"""

# %%
TILE = (
    plgpu.TilingTransform((8, 64)),
    plgpu.SwizzleTransform(128),
)  # for the tensor core


def matmul(a, b, steps_in_flight=2, delay=0, pending=0):
    (m, k), n = a.shape, b.shape[1]

    def product(a_tile, b_tile, o_tile, acc):
        plgpu.wgmma(acc, a_tile, b_tile)
        plgpu.wgmma_wait(pending)

        @plgpu.when(plgpu.program_id(2) == plgpu.num_programs(2) - 1)
        def _():
            o_tile[...] = acc[...].astype(o_tile.dtype)

    def spec(shape, index_map, delay=0):
        return plgpu.BlockSpec(shape, index_map, transforms=TILE, delay_release=delay)

    return plgpu.pallas_call(
        product,
        jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        grid=(m // 128, n // 128, k // 64),
        in_specs=[
            spec((128, 64), lambda i, j, ki: (i, ki), delay),
            spec((64, 128), lambda i, j, ki: (ki, j), delay),
        ],
        out_specs=spec((128, 128), lambda i, j, ki: (i, j)),
        scratch_shapes=[plgpu.ACC((128, 128))],
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            max_concurrent_steps=steps_in_flight,
        ),
    )(a, b)


check(matmul, a, b)

# %% [markdown]
"""
The parallel axes may not be left out by an index map of a result. Two blocks of threads
would copy the same block back at the same time, and the last one would win:
"""

# %%
try:
    plgpu.pallas_call(
        lambda x, o: o.__setitem__(..., x[...]),
        jax.ShapeDtypeStruct((64, 128), jnp.float32),
        grid=(4,),
        in_specs=[plgpu.BlockSpec((64, 128), lambda i: (i, 0))],
        out_specs=plgpu.BlockSpec((64, 128), lambda i: (0, 0)),
    )(jnp.zeros((256, 128)))
except plgpu.errors.PallasGpuError as error:
    print(error)
else:
    raise AssertionError("the blocks of threads write the same block")

# %% [markdown]
"""
## What the pipeline does

`max_concurrent_steps=n` gives each block that moves a ring of n buffers in SMEM. Step i
uses buffer i mod n. Before the first step, the copies of n steps are started; at the
end of step i, its buffer is free, and the copy of step i + n is started into it. With
n = 2:

    buffer 0   copy 0 | step 0 | copy 2 ........ | step 2 | copy 4 ...
    buffer 1   copy 1 ........ | step 1 | copy 3 ........ | step 3 |

    TMA        copies 0, 1      copy 2   copy 3   copy 4
    threads                     step 0   step 1   step 2   step 3

Each step first waits for the barrier of its buffer. The first one waits for the whole
latency of the memory; later ones find their blocks ready if n - 1 steps take longer
than a copy.

The results have rings as well. A step that writes a buffer waits until an earlier copy
from it has *read* the buffer, not until it is complete.
"""

# %% [markdown]
"""
## The tensor core works asynchronously, too

`wgmma` only starts a product. `wgmma_wait(0)` waits for it, and until the next step has
started another one, the tensor core idles. `wgmma_wait(1)` lets one product run on
while the next step begins. But then the products of step i still read their buffers
when step i ends. The pipeline has to know: `delay_release=1` keeps a block's buffer for
one more step, and the copy into it is started one step later.

    buffer 0   copy 0 | step 0 | product 0 runs on | copy 3 ...

So of n buffers only n - 1 are ever being filled, and one more is needed.
"""

# %%
check(lambda a, b: matmul(a, b, steps_in_flight=3, delay=1, pending=1), a, b)

# %% [markdown]
"""
What if `delay_release` is forgotten? On a GPU the result is then mostly right, as the
copy usually takes longer than the rest of the product. The emulator does not rely on
luck. It sees a copy that writes what a product may still read:
"""

# %%
try:
    matmul(a, b, steps_in_flight=3, delay=0, pending=1)
except plgpu.errors.RaceError as error:
    print(error)
else:
    raise AssertionError("the buffers are released too early")

# %% [markdown]
"""
The first row names the memory and who accesses it, `expected` the line of the product
that is not ordered before the copy. Here `delay_release=1` orders them; `wgmma_wait(0)`
would, too.
"""

# %% [markdown]
"""
## A pipeline inside a kernel

`pallas_call` is a kernel with one loop. `emit_pipeline` is such a loop as a function,
to be called inside a `kernel`: several times, with other code before and after it. Its
grid is a loop, all axes are sequential, and its index maps may use what the kernel
knows, such as its position.

As an example take a softmax over rows that are too long for SMEM. Each row is read
twice: once for its maximum and the sum of its exponentials, once for the result. The
first pipeline has a **carry**, values that go from step to step, and no results; the
second one has a result and no carry.
"""

# %%
ROWS, COLUMNS = 16, 128


def softmax(x, steps_in_flight=3):
    steps = x.shape[1] // COLUMNS

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // ROWS,),
        grid_names=("rows",),
    )
    def two_passes(x_gmem, o_gmem):
        mine = lax.axis_index("rows")
        block = plgpu.BlockSpec((ROWS, COLUMNS), lambda i: (mine, i))

        def statistics(_, x_block, carry):
            largest, total = carry
            values = x_block[...]
            new = jnp.maximum(largest, jnp.max(values, axis=1))
            scaled = jnp.exp(values - new[:, None])
            return new, total * jnp.exp(largest - new) + jnp.sum(scaled, axis=1)

        start = jnp.full((ROWS,), -jnp.inf), jnp.zeros((ROWS,))
        largest, total = plgpu.emit_pipeline(
            statistics,
            grid=(steps,),
            in_specs=[block],
            max_concurrent_steps=steps_in_flight,
            init_carry=start,
        )(x_gmem)

        def normalize(_, x_block, o_block):
            o_block[...] = jnp.exp(x_block[...] - largest[:, None]) / total[:, None]

        plgpu.emit_pipeline(
            normalize,
            grid=(steps,),
            in_specs=[block],
            out_specs=[block],
            max_concurrent_steps=steps_in_flight,
        )(x_gmem, o_gmem)

    return two_passes(x)


x = jax.random.normal(jax.random.key(0), (64, 1024))
np.testing.assert_allclose(softmax(x), jax.nn.softmax(x, axis=1), rtol=1e-4)

# %% [markdown]
"""
The sizes of the grid may also be scalars of the kernel, read from an argument for
instance: then the number of steps is known only when the kernel runs.

## Warpgroups with different jobs

One warpgroup that copies, waits, multiplies and copies again has gaps: while it does
one thing it does not start the others. In step 4 of the second tutorial one warpgroup
only copied, and two multiplied. `emit_pipeline_warp_specialized` is that division:

                       memory warpgroup            compute warpgroups
    for each step:     wait until buffer is free   wait until buffer is full
                       start the copies            body(indices, blocks, carry)
                                                   release a buffer

The block has `num_compute_wgs + 1` warpgroups, the last of which copies. It needs few
registers: `memory_registers=40` keeps 40 for each of its threads, and the others divide
the rest.

All compute warpgroups get the same blocks, and each works on its own part. The carry is
a value of each; `compute_context` surrounds the loop with the code that they execute
before and after it. Here that is the declaration of the accumulator, and the store of
the result.
"""

# %%
BLOCK_M, BLOCK_N = 128, 128  # of the result; each compute warpgroup has half the rows


def specialized_matmul(a, b, steps_in_flight=4):
    (m, k), n = a.shape, b.shape[1]

    def body(a_gmem, b_gmem, o_gmem, o_smem):
        i, j, wg = (lax.axis_index(name) for name in ("i", "j", "wg"))
        my_rows = plgpu.ds(wg * 64, 64)

        def step(_, a_tile, b_tile, acc):
            plgpu.wgmma(acc, a_tile.at[my_rows], b_tile)
            plgpu.wgmma_wait(1)
            return acc

        def context(pipeline):
            def with_accumulator(acc):
                pipeline(acc)
                o_smem[wg] = acc[...].astype(o_smem.dtype)

            plgpu.run_scoped(with_accumulator, plgpu.ACC((64, BLOCK_N)))
            plgpu.commit_smem()
            rows = plgpu.ds(i * BLOCK_M + wg * 64, 64)
            columns = plgpu.ds(j * BLOCK_N, BLOCK_N)
            plgpu.copy_smem_to_gmem(o_smem.at[wg], o_gmem.at[rows, columns])
            plgpu.wait_smem_to_gmem(0)

        def spec(shape, index_map):
            return plgpu.BlockSpec(shape, index_map, transforms=TILE, delay_release=1)

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(k // 64,),
            in_specs=[
                spec((BLOCK_M, 64), lambda ki: (i, ki)),
                spec((64, BLOCK_N), lambda ki: (ki, j)),
            ],
            max_concurrent_steps=steps_in_flight,
            wg_axis="wg",
            num_compute_wgs=2,
            memory_registers=40,
            compute_context=context,
        )(a_gmem, b_gmem)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        grid=(m // BLOCK_M, n // BLOCK_N),
        grid_names=("i", "j"),
        num_threads=3,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((2, 64, BLOCK_N), jnp.bfloat16, transforms=TILE)],
    )(a, b)


check(specialized_matmul, a, b)

# %% [markdown]
"""
The pipeline waits for the last products by itself before `pipeline(acc)` returns, and
for the last buffers. Options that this kernel does not need: `collective_axes` of a
block spec multicasts its blocks in a cluster; `manual_consumed_barriers` lets the body
release buffers earlier; `get_allocations` lets several pipelines share their buffers,
so that the copies of the next tile start before this one's result is stored.
[benchmarks/pipelines.py](../benchmarks/pipelines.py) has such a persistent kernel.

## Tiles for whoever is free

If the tiles of a kernel take different times, blocks with a fixed list of tiles end at
different times. `dynamic_scheduling_loop` is the loop over tiles for this case. The
grid is that of all tiles, and the launch starts as many blocks as the GPU holds. Each
begins with its own position, and then claims the next one that nobody has.

Below, row i of the result is the sum of the first i + 1 rows.
`InterpretParams(seed=...)` makes the emulator choose another order in which the blocks
run, and another number of them. The result is the same in each.
"""


# %%
def row_sums(x, interpret=None):
    @plgpu.kernel(
        out_type=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((len(x),), jnp.int32),
        ],
        grid=(len(x),),
        grid_names=("row",),
        interpret=interpret,
    )
    def sums(x_gmem, o_gmem, who_gmem):
        me = lax.axis_index("row")

        @plgpu.dynamic_scheduling_loop("row")
        def _(info):
            (row,) = info.index

            @plgpu.loop(0, row + 1, init_carry=jnp.zeros(128))
            def total(i, carry):
                return carry + x_gmem[i]

            o_gmem[row] = total
            who_gmem[row] = me

    return sums(x)


x = jnp.ones((8, 128))
for seed in range(3):
    result, who = row_sums(x, plgpu.InterpretParams(seed=seed))
    np.testing.assert_array_equal(result[:, 0], np.arange(1, 9))
    print(f"seed {seed}: the rows were summed by blocks", who)

# %% [markdown]
"""
## How many steps in flight

More buffers hide more latency, and take more SMEM. A block of threads may have 227 KiB
of it, and an SM holds as many blocks as fit. `offline.compile` reports both without a
GPU (without NVIDIA's compiler this part is skipped).
"""

# %%
large = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)


def report(steps):
    def kernel(a, b):
        return specialized_matmul(a, b, steps_in_flight=steps)

    (found,) = plgpu.offline.compile(kernel, large, large, target="sm_90a")
    return found.resources


try:
    for steps in (2, 4, 6):
        resources = str(report(steps)).splitlines()
        print(f"{steps} steps in flight")
        print("\n".join(line for line in resources if line.startswith(("SMEM", "bl"))))
    print("\nall figures of the last one:\n", report(6), sep="")
except plgpu.errors.OfflineUnavailableError as error:
    print("skipped:", error)

# %% [markdown]
"""
A step of this kernel has 128 x 64 and 64 x 128 elements of 2 bytes, 32 KiB. How many
are enough follows from the time that a copy takes:

- **Where arithmetic is the limit**, the steps in flight must take longer than a copy.
  At the 800 TFLOP/s that products reach on an H200, an SM multiplies 128 x 128 x 64 in
  0.35 microseconds: 4 such steps cover copies of 1.4 microseconds. More than that do no
  harm here, since another block of this kernel would not find registers on the same SM
  in any case (168 for each of 384 threads are all of them).
- **Where memory is the limit**, the bytes in flight must be those that the SM could get
  in the time of a copy. An SM's part of the H200's 4.8 TB/s is 36 KB per microsecond,
  in all its blocks together: two blocks with three steps of 16 KiB in flight are
  enough.
- **A delay counts.** With `delay_release=d` only `max_concurrent_steps - d` copies are
  in flight.
- **Too many is an error** when the kernel is called, with the sizes of all arrays:
"""

# %%
try:
    specialized_matmul(a, b, steps_in_flight=8)
except plgpu.errors.OutOfResources as error:
    print(error)
else:
    raise AssertionError("8 steps of 32 KiB exceed SMEM")

# %% [markdown]
"""
## Which one

| written with | the copies are started by |
|---|---|
| `pallas_call`, parallel axes only | the block's warpgroup, around the body |
| `pallas_call`, a sequential axis | the same, between the steps |
| `emit_pipeline` | the warpgroup that calls it, between the steps |
| `emit_pipeline_warp_specialized` | a warpgroup of its own |

The first two are the shortest. `emit_pipeline` allows several loops in a kernel, and
code around them. The last one is for work that must not wait: products, attention.

`python -m benchmarks.pipelines` measures them on a GPU;
[docs/performance.md](../docs/performance.md) has the numbers.
"""
