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
Tutorial 1: a first kernel, for readers who know JAX but not CUDA

# A first kernel

Here a GPU kernel is a Python function that you write, not one that XLA chooses for
you. This tutorial writes one kernel twice. It multiplies a matrix by a number, the
simplest arithmetic, so that it shows the essentials of a kernel: how work is
distributed, and how data is moved to and from the processors.

No GPU is needed. Everything runs in an emulator, a model of the GPU in Python. It is
slow and strict: it computes the same results as a GPU, and rejects programs that would
be correct on a GPU only by chance.
"""

# %%
import os

# The emulator requires only a CPU. On a machine with a Hopper GPU, remove this line to
# run the kernels below on the GPU.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu

x = jax.random.normal(jax.random.key(0), (256, 128), jnp.float32)

# %% [markdown]
"""
## The machine, in brief

An H200 has 132 processors, called SMs. A kernel is launched as many independent
**blocks** (the hardware's term is CTA). The GPU schedules blocks on SMs as these become
free, in an unspecified order, until all blocks are done. So a block must not depend on
the results of another block of the same kernel.

Data is stored in one of three places:

         GPU
        +----------------------------------------------------------+
        |  GMEM   global memory: 141 GB, off-chip, stores all      |
        |         arrays of JAX                                    |
        +-----------+---------------------------+------------------+
                    |                           |
             SM 0   |                    SM 1   |            ... 132 of them
            +-------+--------+          +-------+--------+
            |  SMEM  227 KiB |          |  SMEM          |
            |  shared memory:|          |                |
            |  near, and one |          |                |
            |  part for each |          |                |
            |  block         |          |                |
            +-------+--------+          +-------+--------+
            |   registers    |          |   registers    |
            |   arithmetic   |          |   arithmetic   |
            +----------------+          +----------------+

Arithmetic operates on **registers**. A kernel therefore copies a part of an array from
GMEM to SMEM, loads it into registers, computes, and copies the result back the same
way. Such a part is called a **tile**. (Pallas also calls it a block of the array, hence
the name `BlockSpec` below. In this text a block is always a block of threads.)

A block is executed by threads. In this package you do not program single threads: the
unit is the **warpgroup**, 128 threads that cooperate, and each block here has one. In a
kernel, an array such as `x + 1` is distributed over the registers of a warpgroup, and
you use it like any array of JAX.
"""

# %% [markdown]
"""
## The kernel with `pallas_call`

The arguments of a kernel are not arrays but **references** to memory. Reading
`x_ref[...]` loads the whole reference into registers; assigning to `o_ref[...]` stores.
A kernel does not return values: its results are the stored data.
"""

# %%
SCALE = 3.0


def scale_body(x_ref, o_ref):
    o_ref[...] = SCALE * x_ref[...]


# %% [markdown]
"""
The body defines the computation on one tile. The arguments of `pallas_call` define the
tiles and their number:

- `grid=(4, 2)` launches 4 x 2 = 8 blocks. Each has a position `(i, j)` on that grid.
- `BlockSpec((64, 64), index_map)` splits an array into tiles of 64 x 64. The index map
  maps the position of a block on the grid to the index of its tile, in units of tiles.

With `lambda i, j: (i, j)` the block at position `(i, j)` works on tile `(i, j)`:

            j = 0       j = 1
         +-----------+-----------+
    i=0  |  (0, 0)   |  (0, 1)   |   64 rows
         +-----------+-----------+
    i=1  |  (1, 0)   |  (1, 1)   |
         +-----------+-----------+       x is 256 x 128
    i=2  |  (2, 0)   |  (2, 1)   |
         +-----------+-----------+
    i=3  |  (3, 0)   |  (3, 1)   |
         +-----------+-----------+
           64 columns

The second argument of `pallas_call` describes the result.
"""

# %%
tile = plgpu.BlockSpec((64, 64), lambda i, j: (i, j))

scale = plgpu.pallas_call(
    scale_body,
    jax.ShapeDtypeStruct(x.shape, x.dtype),
    grid=(4, 2),
    in_specs=[tile],
    out_specs=tile,
)

np.testing.assert_array_equal(scale(x), SCALE * np.asarray(x))

# %% [markdown]
"""
`scale` is a function from arrays to arrays. `pallas_call` does the copying: before the
body runs, the tile is copied from GMEM to SMEM, and `x_ref` refers to that tile in
SMEM. After the body, the tile of `o_ref` is copied back to GMEM.

Tiles need not divide the array. The last ones may exceed its bounds: out-of-bounds
elements are read as zeros and are not stored.
"""

# %%
odd = x[:200, :100]  # needs 3.1 x 1.6 tiles

scale_odd = plgpu.pallas_call(
    scale_body,
    jax.ShapeDtypeStruct(odd.shape, odd.dtype),
    grid=(plgpu.cdiv(200, 64), plgpu.cdiv(100, 64)),  # division, rounded up: (4, 2)
    in_specs=[tile],
    out_specs=tile,
)

np.testing.assert_array_equal(scale_odd(odd), SCALE * np.asarray(odd))

# %% [markdown]
"""
## The same with explicit copies

Now the copies are explicit. `plgpu.kernel` calls a body with references to the whole
arrays in GMEM and copies nothing implicitly. There are three new concepts.

**Position.** `kernel` names the axes of its grid, and the body queries its position
with `jax.lax.axis_index(name)`. `plgpu.ds(start, size)` is a range of that size, and
`ref.at[...]` refers to a part of a reference without reading it.

**Scratch memory.** `scratch_types` declares what a block needs besides arguments and
results: here a tile in SMEM, and a barrier. They are passed as additional arguments.

**Asynchronous copies.** The hardware has a unit for copies of tiles between GMEM and
SMEM, TMA. The program only *starts* a copy. TMA then executes it asynchronously, and
the program has to wait for its completion. The two directions differ:

- *In*, GMEM to SMEM: the copy signals a **barrier**, an object in SMEM that counts the
  expected bytes. `barrier_wait` blocks the warpgroup until all of them have arrived.
- *Out*, SMEM to GMEM: there is no barrier. The warpgroup tracks the copies that it
  started, and `wait_smem_to_gmem(n)` blocks it until at most `n` of them are pending.

A copy out requires one more call. Stores of threads to SMEM are not immediately visible
to TMA. `commit_smem` makes them visible, and synchronizes all 128 threads.

    warpgroup                                  TMA
    ---------                                  ---
    copy_gmem_to_smem(x, tile, barrier)  --->  GMEM to SMEM ...
    barrier_wait(barrier)                                ...
        :  (waits)                       <---  all bytes are there
    v = tile[...]          SMEM to registers
    v = SCALE * v          in registers
    tile[...] = v          registers to SMEM
    commit_smem()          TMA may see it
    copy_smem_to_gmem(tile, o)           --->  SMEM to GMEM ...
    wait_smem_to_gmem(0)                                 ...
        :  (waits)                       <---  done
    end of the block
"""

# %%
ROWS = 64  # rows of a tile


@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
    grid=(256 // ROWS,),
    grid_names=("rows",),
    scratch_types=[plgpu.SMEM((ROWS, 128), jnp.float32), plgpu.Barrier()],
)
def scale_by_hand(x_gmem, o_gmem, tile_smem, loaded):
    mine = plgpu.ds(jax.lax.axis_index("rows") * ROWS, ROWS)

    plgpu.copy_gmem_to_smem(x_gmem.at[mine], tile_smem, loaded)
    plgpu.barrier_wait(loaded)

    tile_smem[...] = SCALE * tile_smem[...]

    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile_smem, o_gmem.at[mine])
    plgpu.wait_smem_to_gmem(0)


np.testing.assert_array_equal(scale_by_hand(x), SCALE * np.asarray(x))

# %% [markdown]
"""
The wait at the end is required too: when a block exits, its SMEM is reused by the next
block, and a copy that is still reading it would read other data.

One tile of SMEM suffices here, since the result overwrites the input.
`pallas_call` uses two, one for each of `x_ref` and `o_ref`.

### Which thread has which element

`tile_smem[...]` distributes the tile over the registers of the 128 threads. How it does
that is its **register layout**. `draw` draws one, here a part of a small array in which
each thread holds 4 adjacent elements. A cell reads `warp:lane`, register and position
in the register. A notebook shows the drawing itself in colours,
[docs/layouts.md](../docs/layouts.md) has more of them.
"""

# %%
strided = plgpu.Layout.WG_STRIDED((8, 64), vec_size=4)
drawing = strided.draw(part=(slice(0, 8), slice(0, 8)))
print(drawing)

# %% [markdown]
"""
The compiler chooses layouts; they matter for operations that combine elements of
several threads, such as a sum over a row. [docs/semantics.md](../docs/semantics.md)
explains how.

## In a JAX program

A kernel is an operation of JAX like any other. It can be used in `jax.jit` together
with other operations:
"""


# %%
@jax.jit
def standardized(x):
    centred = x - jnp.mean(x)  # XLA's
    return scale_by_hand(centred) / jnp.std(x)  # ours, then XLA's again


expected = SCALE * (np.asarray(x) - np.mean(x)) / np.std(x)
np.testing.assert_allclose(standardized(x), expected, atol=1e-5)

# %% [markdown]
"""
`jax.vmap` adds an axis to the grid: a batch of 5 matrices becomes 5 x 4 blocks of one
launch. The body does not change.
"""

# %%
batch = jax.random.normal(jax.random.key(1), (5, 256, 128))

scaled_batch = jax.vmap(scale_by_hand)(batch)

np.testing.assert_array_equal(scaled_batch, SCALE * np.asarray(batch))

# %% [markdown]
"""
A kernel does not have a derivative: JAX cannot differentiate its body. `jax.grad`
raises an error, which suggests `jax.custom_vjp` to define one.
"""

# %%
try:
    jax.grad(lambda x: scale_by_hand(x).sum())(x)
except plgpu.errors.DifferentiationError as error:
    print(error)
else:
    raise AssertionError("a kernel has no derivative of its own")

# %% [markdown]
"""
## The generated code

A kernel can be compiled without a GPU. That requires NVIDIA's compiler, which the extra
`offline` installs on Linux; without it this part is skipped.

`sm_90a` is the target, Hopper. The result is one report for each kernel in the
function.
"""

# %%
try:
    reports = plgpu.offline.compile(scale_by_hand, x, target="sm_90a")
except plgpu.errors.OfflineUnavailableError as error:
    reports = []
    print("skipped:", error)

for report in reports:
    print(report)

# %% [markdown]
"""
The report has these figures:

- A thread can have up to 255 **registers** of 32 bits. A tile of 64 x 128 numbers over
  128 threads is 64 registers per thread; some more are used for addresses.
- **Spills** are values that were moved from registers to memory. There should be none.
- **SMEM** is the tile, 64 x 128 x 4 bytes, and 8 bytes for the barrier.
- **Blocks per SM** is the number of blocks that are resident on an SM at once. While
  one waits for its copy, another can compute.

`report.ptx` is the kernel as text, in NVIDIA's portable assembly language PTX. The
two TMA copies and the wait are easy to find:
"""

# %%
for report in reports:
    for line in report.ptx.splitlines():
        if "cp.async.bulk.tensor" in line or "mbarrier.try_wait" in line:
            print(line.strip())
    assert report.instruction_counts["cp.async.bulk.tensor"] == 2
    assert report.resources.spill_store_bytes == 0
    assert report.resources.smem_bytes >= ROWS * 128 * 4

# %% [markdown]
"""
## Two mistakes

On a GPU both of these kernels would run, and might even compute the right result. The
emulator detects the mistakes and reports the line. `interpret=True` selects the
emulator on any machine.

### A missing wait

This is `scale_by_hand` without `barrier_wait`. It reads the tile while TMA may still
be writing it. If the copy happens to be fast, the result is correct. The emulator
tracks which copies have been waited for, so it detects the mistake in every run.
"""


# %%
@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
    grid=(256 // ROWS,),
    grid_names=("rows",),
    scratch_types=[plgpu.SMEM((ROWS, 128), jnp.float32), plgpu.Barrier()],
    interpret=True,
)
def reads_too_early(x_gmem, o_gmem, tile_smem, loaded):
    mine = plgpu.ds(jax.lax.axis_index("rows") * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(x_gmem.at[mine], tile_smem, loaded)
    tile_smem[...] = SCALE * tile_smem[...]  # the tile may not be there yet
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile_smem, o_gmem.at[mine])
    plgpu.wait_smem_to_gmem(0)


try:
    reads_too_early(x)
except plgpu.errors.RaceError as error:
    print(error)
    assert "call barrier_wait on the copy's barrier first" in str(error)
else:
    raise AssertionError("the emulator should have found the missing wait")

# %% [markdown]
"""
All messages have the same parts: the error, what was expected and what was found, a
hint, and the location.

### An index out of bounds

In JAX, `x[8]` of an array with 8 rows is not an error: the index is clamped to the last
row. In a kernel indices are not clamped. On a GPU the read returns arbitrary memory
after the array.

Here every block copies the row below its own, which does not exist for the last block.
An array in GMEM can be read and written directly, without TMA, which suffices for a
row.
"""

# %%
small = x[:8]


@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct(small.shape, small.dtype),
    grid=(8,),
    grid_names=("row",),
    interpret=True,
)
def row_below(x_gmem, o_gmem):
    i = jax.lax.axis_index("row")
    o_gmem[i] = x_gmem[i + 1]


try:
    row_below(small)
except plgpu.errors.OutOfBoundsError as error:
    print(error)
    assert "CTA (row=7)" in str(error)
else:
    raise AssertionError("the emulator should have found the index")

# %% [markdown]
"""
The last line names the failing block. The kernel must define the last row explicitly,
for example as itself:
"""


# %%
@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct(small.shape, small.dtype),
    grid=(8,),
    grid_names=("row",),
)
def row_below_or_last(x_gmem, o_gmem):
    i = jax.lax.axis_index("row")
    o_gmem[i] = x_gmem[jnp.minimum(i + 1, 7)]


below = np.minimum(np.arange(8) + 1, 7)
np.testing.assert_array_equal(row_below_or_last(small), np.asarray(small)[below])

# %% [markdown]
"""
### A race

Blocks run in any order, also at the same time. If each adds to the same
result, one may read it before another has written it. Here the blocks happen to run one
after the other, so the sum would even be right, but on a GPU it would not. The emulator
compares the accesses of all blocks, warpgroups and copies, and reports two of which one
is a store if nothing orders them:
"""


# %%
@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
    grid=(4,),
    grid_names=("rows",),
    interpret=True,
)
def sum_of_rows(x_gmem, total_gmem):
    i = jax.lax.axis_index("rows")

    @plgpu.when(i == 0)
    def _():
        total_gmem[...] = jnp.zeros(128, jnp.float32)

    total_gmem[...] += jnp.sum(x_gmem[plgpu.ds(i * ROWS, ROWS)], axis=0)


try:
    sum_of_rows(x)
except plgpu.errors.RaceError as error:
    print(error)
    assert "read by one CTA and written by another" in str(error)
else:
    raise AssertionError("the emulator should have found the race")

# %% [markdown]
"""
Each block has to write a separate part of the result, and something that runs later
combines the parts, here XLA. The emulator can also run a kernel several times, with
other orders of blocks and copies: a failure names the parameters that repeat it.
"""


# %%
@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct((4, 128), jnp.float32),
    grid=(4,),
    grid_names=("rows",),
    interpret=plgpu.InterpretParams(schedules=4),
)
def sums_of_rows(x_gmem, sums_gmem):
    i = jax.lax.axis_index("rows")
    sums_gmem[i] = jnp.sum(x_gmem[plgpu.ds(i * ROWS, ROWS)], axis=0)


total = jnp.sum(sums_of_rows(x), axis=0)
np.testing.assert_allclose(total, jnp.sum(x, axis=0), atol=1e-4)

# %% [markdown]
"""
Under `jax.jit` the same messages are at the end of a long error of JAX. To debug, call
the kernel without `jit`.

## Summary

| term | meaning |
|---|---|
| block, CTA | one of the many independent instances of a kernel |
| grid | the number of blocks, and their positions |
| warpgroup | the 128 threads that execute a block here |
| GMEM | off-chip memory, which stores all arrays |
| SMEM | on-chip memory, a part for each block |
| registers | the operands of arithmetic |
| reference | refers to memory: `ref[...]` reads, `ref[...] = v` writes |
| `ref.at[...]` | refers to a part of it |
| TMA | the unit that copies tiles asynchronously |
| barrier | signals the completion of a copy in to a waiting warpgroup |
| `commit_smem` | makes stores to SMEM visible to TMA |
| `wait_smem_to_gmem` | waits for copies out |

[demo/kernels.py](../demo/kernels.py) has the next step: a kernel that reduces over
rows, with swizzled SMEM.
"""
