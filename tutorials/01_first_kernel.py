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
Tutorial 1: a first kernel, for those who know JAX and no CUDA yet

# A first kernel

Here a GPU kernel is a Python function that you write, not one that XLA chooses for
you. This tutorial writes one kernel twice. It multiplies a matrix by a number, which
is as little arithmetic as possible, so that what remains is what a kernel is about:
who works on what, and how data comes to it and leaves again.

No GPU is needed. Everything runs in an emulator, a model of the GPU in Python. It is
slow, and strict: it computes what the GPU would compute, and it refuses programs that
would be right on a GPU only by luck.
"""

# %%
import os

# The emulator needs nothing but the CPU. On a machine with a Hopper GPU, remove this
# line and the kernels below run on the GPU.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

import pallas_gpu as plgpu

x = jax.random.normal(jax.random.key(0), (256, 128), jnp.float32)

# %% [markdown]
"""
## The machine, as far as we need it

An H200 has 132 processors, called SMs. A kernel is started as many independent
**blocks** (the hardware's word is CTA). The GPU hands blocks to SMs as these become
free, in no particular order, until all blocks are done. So a block must not depend on
what another block of the same kernel has done.

Data lives in one of three places:

         GPU
        +----------------------------------------------------------+
        |  GMEM   global memory: 141 GB, far away, all arrays of   |
        |         JAX live here                                    |
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

Arithmetic happens in **registers**. A kernel therefore brings a piece of an array
from GMEM to SMEM, loads it into registers, computes, and sends the result back the
same way. Such a piece is called a **tile**. (Pallas also calls it a block of the array,
hence the name `BlockSpec` below. In this text a block is always a block of threads.)

A block is executed by threads. In this package you do not write for single threads:
the unit is the **warpgroup**, 128 threads that work together, and each block here
has one. Inside a kernel, an array such as `x + 1` is spread over the registers of a
warpgroup, and you write with it as you would with any array of JAX.
"""

# %% [markdown]
"""
## The kernel with `pallas_call`

A kernel does not get arrays. It gets **references** to memory. Reading `x_ref[...]`
loads all that the reference names into registers; assigning to `o_ref[...]` stores.
A kernel returns nothing: its results are what it has stored.
"""

# %%
SCALE = 3.0


def scale_body(x_ref, o_ref):
    o_ref[...] = SCALE * x_ref[...]


# %% [markdown]
"""
The body says what happens to one tile. Which tile that is, and how many there are, is
said beside it:

- `grid=(4, 2)` starts 4 x 2 = 8 blocks. Each has a position `(i, j)` on that grid.
- `BlockSpec((64, 64), index_map)` cuts an array into tiles of 64 x 64. The index map
  takes the position of a block of the grid and returns the tile that it sees, counted
  in tiles.

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
`scale` is a function from arrays to arrays. `pallas_call` did the copying: before the
body runs, the tile is brought from GMEM to SMEM, and `x_ref` names that tile in SMEM.
After the body, the tile of `o_ref` is copied back to GMEM.

Tiles need not fit. The last ones may reach over the edge of the array: there they
hold zeros, and of the result only what lies inside of the array is stored.
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
## The same by hand

Now the copying, step by step. `plgpu.kernel` calls a body with references to the
whole arrays in GMEM and does nothing by itself. Three things are new.

**Position.** `kernel` names the axes of its grid, and the body asks for its position
with `jax.lax.axis_index(name)`. `plgpu.ds(start, size)` is a range of that size, and
`ref.at[...]` names a part of a reference without reading it.

**Scratch memory.** `scratch_types` declares what a block needs beside arguments and
results: here a tile in SMEM, and a barrier. They arrive as further arguments.

**Copies that take their time.** The hardware has a unit for copies of tiles between
GMEM and SMEM, TMA. A copy is only *started* by the program. TMA then works beside it,
and the program has to find out when the copy is done. The two directions differ:

- *In*, GMEM to SMEM: the copy reports to a **barrier**, a small object in SMEM. The
  barrier knows how many bytes to expect. `barrier_wait` stops the warpgroup until they
  are all there.
- *Out*, SMEM to GMEM: there is no barrier. The warpgroup remembers the copies that it
  started, and `wait_smem_to_gmem(n)` stops it until at most `n` of them are under way.

Before the way out one more call is due. TMA does not see at once what threads have
stored to SMEM. `commit_smem` makes it visible, and waits until all 128 threads have
come so far.

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
The wait at the end is needed too: when a block ends its SMEM goes to the next block,
and a copy that still reads it would read something else.

One tile of SMEM is enough here, since the result takes the place of the input.
`pallas_call` uses two, one for each of `x_ref` and `o_ref`.

## In a JAX program

A kernel is an operation of JAX like any other. It goes into `jax.jit` together with
what stands around it:
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
launch. The body does not change, and does not know.
"""

# %%
batch = jax.random.normal(jax.random.key(1), (5, 256, 128))

scaled_batch = jax.vmap(scale_by_hand)(batch)

np.testing.assert_array_equal(scaled_batch, SCALE * np.asarray(batch))

# %% [markdown]
"""
What a kernel does not have is a derivative: JAX cannot look into it. `jax.grad` says
so, and that `jax.custom_vjp` is the way to give it one.
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
## What it becomes

A kernel can be compiled without a GPU. That takes NVIDIA's compiler, which the extra
`offline` installs on Linux; without it this part is left out.

`sm_90a` names the target, Hopper. The result is one report for each kernel in the
function.
"""

# %%
try:
    reports = plgpu.offline.compile(scale_by_hand, x, target="sm_90a")
except plgpu.errors.OfflineUnavailableError as error:
    reports = []
    print("left out:", error)

for report in reports:
    print(report)

# %% [markdown]
"""
How to read it:

- A thread can have up to 255 **registers** of 32 bits. A tile of 64 x 128 numbers on
  128 threads is 64 registers for each, and some more hold addresses.
- **Spills** are values that found no register and went to memory. There should be
  none.
- **SMEM** is the tile, 64 x 128 x 4 bytes, and 8 bytes for the barrier.
- **Blocks per SM** says how many blocks fit on an SM at once. While one waits for its
  copy, another can compute.

`report.ptx` is the kernel as text, in NVIDIA's portable assembly language PTX. The
two TMA copies and the wait are easy to find in it:
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

On a GPU both of these kernels would run, and might even give the right result. The
emulator stops at them and names the line. `interpret=True` asks for the emulator on
any machine.

### A missing wait

This is `scale_by_hand` without `barrier_wait`. It reads the tile while TMA may still
be filling it. If the copy happens to be quick, nothing is wrong to be seen. The
emulator keeps account of which copies have been waited for, so it finds the mistake
in every run.
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
The message has the same parts each time: what happened, what was expected and what
was found, what to do, and where.

### An index out of bounds

In JAX, `x[8]` of an array with 8 rows is no error: the index is clamped to the last
row. A kernel has no such net. On a GPU the read returns whatever lies behind the
array.

Here every block copies the row below its own, and the last block has none. An array
in GMEM can be read and written directly, with no TMA, which is good enough for a row.
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
The last line names the block that went wrong. What the last row should be is for the
author to say, for example itself:
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
Under `jax.jit` the same messages arrive, but at the end of a long error of JAX's own.
To look for a mistake, call the kernel without `jit`.

## Summary

| word | what it is |
|---|---|
| block, CTA | one of the many independent instances of a kernel |
| grid | how many blocks, and how they are numbered |
| warpgroup | the 128 threads that execute a block here |
| GMEM | far memory, where all arrays live |
| SMEM | near memory, a part for each block |
| registers | where arithmetic happens |
| reference | a name for memory: `ref[...]` reads, `ref[...] = v` writes |
| `ref.at[...]` | a name for a part of it |
| TMA | the unit that copies tiles, beside the program |
| barrier | what a warpgroup waits at until a copy in has arrived |
| `commit_smem` | makes stores to SMEM visible to TMA |
| `wait_smem_to_gmem` | waits for copies out |

[demo/kernels.py](../demo/kernels.py) has the next step: a kernel that reduces over
rows, with SMEM stored in the order that the hardware likes best.
"""
