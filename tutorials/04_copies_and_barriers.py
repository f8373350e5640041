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
Tutorial 4: what the pipelines of tutorial 3 are made of

# Copies, barriers and clusters

A kernel on Hopper is mostly bookkeeping: data is copied while threads compute, and each
must know when the other is done. Pipelines write that bookkeeping for you. This
tutorial writes it by hand: **copies** in all their forms, the **barriers** that they
complete on, and **clusters**, whose blocks share copies and memory.

Each part also has the mistake that belongs to it. On a GPU most of them give right
results most of the time. The emulator reports each of them in every run, with the line.

As before, no GPU is needed. A block of threads is called a **CTA** from here on, as in
NVIDIA's documentation.
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

F32 = jnp.float32
TILE = (64, 128)
x = jnp.asarray(np.random.default_rng(0).standard_normal((4, *TILE)), F32)


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
## A copy and its barrier

`copy_gmem_to_smem` starts a copy and returns. The TMA engine moves the tile while the
threads go on. A **barrier** is how they learn that it has arrived. It counts two
things, and a **phase** of it is complete when both have come:

    arrivals    as many as `num_arrivals` says; here 1, by the copy when it starts
    bytes       as many as the copies of the phase have announced

Then the next phase begins, with the same counts. `barrier_wait` waits for one phase
after the other, so a barrier in a loop needs no reset.
"""


# %%
def copied(waits=True):
    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(TILE, F32),
        scratch_types=[plgpu.SMEM(TILE, F32), plgpu.Barrier()],
    )
    def double(x_gmem, o_gmem, tile, loaded):
        plgpu.copy_gmem_to_smem(x_gmem.at[0], tile, loaded)
        if waits:
            plgpu.barrier_wait(loaded)
        o_gmem[...] = 2 * tile[...]

    return double


np.testing.assert_array_equal(copied()(x), 2 * x[0])

# %% [markdown]
"""
Without the wait the threads read the tile while the copy still writes it. The emulator
moves the data as late as the waits allow, or earlier, as its seed decides; the report
does not depend on that:
"""

# %%
report(plgpu.errors.RaceError, copied(waits=False), x)

# %% [markdown]
"""
## What a phase waits for

Two copies on one barrier are two arrivals in each phase. A barrier that is declared
with one would be complete when the first copy has arrived:
"""


# %%
def sum_of_two(num_arrivals):
    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(TILE, F32),
        scratch_types=[
            plgpu.SMEM((2, *TILE), F32),
            plgpu.Barrier(num_arrivals=num_arrivals),
        ],
    )
    def add(x_gmem, o_gmem, tiles, loaded):
        for k in range(2):
            plgpu.copy_gmem_to_smem(x_gmem.at[k], tiles.at[k], loaded)
        plgpu.barrier_wait(loaded)
        o_gmem[...] = tiles[0] + tiles[1]

    return add


np.testing.assert_array_equal(sum_of_two(2)(x), x[0] + x[1])
report(plgpu.errors.PallasGpuError, sum_of_two(1), x)

# %% [markdown]
"""
With three, the third arrival never comes. A GPU would hang; the emulator says who waits
for what:
"""

# %%
report(plgpu.errors.DeadlockError, sum_of_two(3), x)

# %% [markdown]
"""
## Threads meet at barriers, too

Copies are not the only ones to arrive. `barrier_arrive` is an arrival of a warpgroup:
all that it has read or written before happens before what others do after their wait.
So a ring of buffers has two barriers for each:

    full[i]     the copy arrives       the consumer waits before it reads
    empty[i]    the consumer arrives   the producer waits before it copies again

`barrier_test` asks whether a phase is complete and does not wait. If it says so, the
phase has been waited for. Here the warpgroup that copies counts how often it could have
done something else in the meantime.
"""

# %%
SLOTS, STEPS = 2, 4


@plgpu.kernel(
    out_type=[jax.ShapeDtypeStruct(TILE, F32), jax.ShapeDtypeStruct((128,), jnp.int32)],
    num_threads=2,
    thread_name="role",
    scratch_types=[
        plgpu.SMEM((SLOTS, *TILE), F32),
        plgpu.Barrier(num_barriers=SLOTS),
        plgpu.Barrier(num_barriers=SLOTS),
    ],
)
def total(x_gmem, o_gmem, polls_gmem, tiles, full, empty):
    @plgpu.when(lax.axis_index("role") == 0)
    def _():
        def copy(k, polls):
            slot = k % SLOTS

            def test(state):
                return plgpu.barrier_test(empty.at[slot]), state[1] + 1

            # The first round finds the slots empty.
            state = (k < SLOTS, polls)
            _, polls = lax.while_loop(lambda state: ~state[0], test, state)
            plgpu.copy_gmem_to_smem(x_gmem.at[k], tiles.at[slot], full.at[slot])
            return polls

        polls = lax.fori_loop(0, STEPS, copy, 0)
        polls_gmem[...] = jnp.full((128,), polls)

    @plgpu.when(lax.axis_index("role") == 1)
    def _():
        def add(k, acc):
            slot = k % SLOTS
            plgpu.barrier_wait(full.at[slot])
            acc += tiles[slot]
            plgpu.barrier_arrive(empty.at[slot])
            return acc

        o_gmem[...] = lax.fori_loop(0, STEPS, add, jnp.zeros(TILE, F32))


result, polls = total(x)
np.testing.assert_allclose(result, x.sum(0), atol=1e-5)
assert polls[0] >= STEPS - SLOTS

# %% [markdown]
"""
## Copies to GMEM

A copy in the other direction has no barrier. The warpgroup that starts it closes a
**group** of copies, and waits until at most so many groups are pending. Two more rules:

- What threads have stored in SMEM is visible to TMA only after `commit_smem()`, a
  fence.
- `wait_smem_to_gmem(0, wait_read_only=True)` waits until the source has been read.
  That suffices to overwrite it. To read the result the copy must be complete.
"""


# %%
def stored(fence=True):
    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(x.shape, F32),
        scratch_types=[plgpu.SMEM(TILE, F32)],
    )
    def negate(x_gmem, o_gmem, tile):
        for k in range(4):
            tile[...] = -x_gmem[k]
            if fence:
                plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, o_gmem.at[k])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return negate


np.testing.assert_array_equal(stored()(x), -x)
report(plgpu.errors.RaceError, stored(fence=False), x)

# %% [markdown]
"""
### Copies that combine

With `reduction_op="add"` the copy adds to what is in GMEM, element by element and
atomically. Several CTAs may add to one tile, in any order, without barriers. The tile
needs a value first: here it comes in as a `jax.Ref`, which kernels update in place.
"""


# %%
@plgpu.kernel(
    out_type=(),
    grid=(4,),
    grid_names=("k",),
    scratch_types=[plgpu.SMEM(TILE, F32), plgpu.Barrier()],
)
def add_all(x_gmem, sum_gmem, tile, loaded):
    plgpu.copy_gmem_to_smem(x_gmem.at[lax.axis_index("k")], tile, loaded)
    plgpu.barrier_wait(loaded)
    plgpu.copy_smem_to_gmem(tile, sum_gmem, reduction_op="add")
    plgpu.wait_smem_to_gmem(0)


total_ref = jax.new_ref(jnp.zeros(TILE, F32))
add_all(x, total_ref)
np.testing.assert_allclose(total_ref[...], x.sum(0), atol=1e-5)

# %% [markdown]
"""
### Copies of chosen rows

An array of indices in place of a slice makes the copy a **gather**: each row comes from
where its index says. `copy_smem_to_gmem` to such a part is a scatter.
"""


# %%
@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct((16, 128), F32),
    scratch_types=[plgpu.SMEM((16, 128), F32), plgpu.Barrier()],
)
def take(x_gmem, rows_gmem, o_gmem, tile, loaded):
    plgpu.copy_gmem_to_smem(x_gmem.at[rows_gmem[...]], tile, loaded)
    plgpu.barrier_wait(loaded)
    o_gmem[...] = tile[...]


table = x.reshape(-1, 128)
rows = jnp.asarray(np.random.default_rng(1).integers(0, 256, 16), jnp.int32)
np.testing.assert_array_equal(take(table, rows), table[rows])

# %% [markdown]
"""
## Clusters

The CTAs of a **cluster** run at the same time, on SMs that are close to each other.
They can do three things that others cannot: share a copy, access each other's SMEM, and
arrive on each other's barriers. `cluster=(2,)` makes pairs; the grid then counts pairs.

### A copy for several CTAs

With `collective_axes` the CTAs along these axes make one copy together: each loads a
part of the tile, and TMA writes it to all of them. The tile is read from GMEM once.
Each CTA waits on its own barrier, which counts all bytes.

A CTA now writes to the memory of the others. Before it copies into a buffer again,
*all* of them must have read it. That is what a `ClusterBarrier` is for: an arrival on
it arrives in every CTA along its axes.
"""


# %%
def multicast(barrier):
    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((2, *TILE), F32),
        cluster=(2,),
        cluster_names=("pair",),
        scratch_types=[plgpu.SMEM(TILE, F32), plgpu.Barrier(), barrier],
    )
    def scaled_sums(x_gmem, o_gmem, tile, full, empty):
        cta = lax.axis_index("pair")

        def step(k, acc):
            @plgpu.when(k > 0)
            def _():
                plgpu.barrier_wait(empty)

            plgpu.copy_gmem_to_smem(x_gmem.at[k], tile, full, collective_axes="pair")
            plgpu.barrier_wait(full)
            acc += (cta + 1) * tile[...]
            plgpu.barrier_arrive(empty)
            return acc

        o_gmem[cta] = lax.fori_loop(0, STEPS, step, jnp.zeros(TILE, F32))

    return scaled_sums


free = plgpu.ClusterBarrier(collective_axes="pair")
sums = multicast(free)(x)
np.testing.assert_allclose(sums, np.stack([x.sum(0), 2 * x.sum(0)]), atol=1e-5)

# %% [markdown]
"""
A barrier of the CTA alone does not know of the other one, and on a GPU the faster CTA
would now and then overwrite what the slower one still reads:
"""

# %%
report(plgpu.errors.RaceError, multicast(plgpu.Barrier()), x)

# %% [markdown]
"""
### The memory of another CTA

`cluster_ref(ref, {"part": i})` is the array `ref` of the CTA at position `i`. It is
read, written, indexed and masked as any other. Here four CTAs each add up a part of an
array, and every one reads the sums of all: a sum over the cluster without a trip to
GMEM.

Loads and stores in another CTA's memory have an order only through cluster barriers.
"""


# %%
def normalized(barrier):
    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(x.shape, F32),
        cluster=(4,),
        cluster_names=("part",),
        scratch_types=[plgpu.SMEM((128,), F32), barrier],
    )
    def fractions(x_gmem, o_gmem, partial, ready):
        part = lax.axis_index("part")
        mine = jnp.abs(x_gmem[part])
        partial[...] = mine.sum(axis=0)
        plgpu.barrier_arrive_and_wait(ready)
        sums = jnp.zeros((128,), F32)
        for k in range(4):
            sums += plgpu.cluster_ref(partial, {"part": k})[...]
        o_gmem[part] = mine / sums

    return fractions


want = jnp.abs(x) / jnp.abs(x).sum((0, 1))
sums_of_all = plgpu.ClusterBarrier(collective_axes="part")
np.testing.assert_allclose(normalized(sums_of_all)(x), want, atol=1e-6)

# %% [markdown]
"""
With a barrier of each CTA the others' sums may not be there yet. Depending on the
schedule that is a race, or a read of memory that nobody has written:
"""

# %%
report(plgpu.errors.PallasGpuError, normalized(plgpu.Barrier()), x)

# %% [markdown]
"""
What `scratch_types` declares exists until all CTAs of the cluster have ended: the
compiled kernel makes them wait for each other. What a `run_scoped` inside the kernel
declares is free for other arrays once its CTA has left. So a scope whose arrays other
CTAs access ends with a cluster barrier:
"""


# %%
def borrowed(waits=True):
    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((2, 128), F32),
        cluster=(2,),
        cluster_names=("pair",),
        scratch_types=[plgpu.ClusterBarrier(collective_axes="pair", num_barriers=2)],
    )
    def swap(x_gmem, o_gmem, barriers):
        cta = lax.axis_index("pair")

        def scope(row):
            row[...] = x_gmem[cta, 0]
            plgpu.barrier_arrive_and_wait(barriers.at[0])
            o_gmem[cta] = plgpu.cluster_ref(row, {"pair": 1 - cta})[...]
            if waits:
                plgpu.barrier_arrive_and_wait(barriers.at[1])

        plgpu.run_scoped(scope, plgpu.SMEM((128,), F32))

        def next_scope(row):
            row[...] = jnp.zeros((128,), F32)  # at the same place

        plgpu.run_scoped(next_scope, plgpu.SMEM((128,), F32))

    return swap


np.testing.assert_array_equal(borrowed()(x), x[1::-1, 0])
report(plgpu.errors.KernelError, borrowed(waits=False), x)

# %% [markdown]
"""
### Stores that arrive on a barrier

A store to another CTA needs an arrival and a wait for it, a round trip after the store.
`async_store_smem` does it in one: it sends an array from registers, and the bytes that
arrive are counted on a barrier of the *receiver*, as those of a copy. The receiver just
waits. Here each CTA sends its sums to the next one in a ring.
"""


# %%
@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct((4, 128), F32),
    cluster=(4,),
    cluster_names=("part",),
    scratch_types=[plgpu.SMEM((128,), F32), plgpu.Barrier()],
)
def ring(x_gmem, o_gmem, inbox, full):
    part = lax.axis_index("part")
    plgpu.async_store_smem(
        x_gmem[part].sum(axis=0),
        inbox,
        full,
        cluster_idx=(part + 1) % 4,
        cluster_dim="part",
    )
    plgpu.barrier_wait(full)
    o_gmem[part] = inbox[...]


np.testing.assert_allclose(ring(x), jnp.roll(x.sum(1), 1, axis=0), atol=1e-5)

# %% [markdown]
"""
## The rules on one page

| What | who starts it | complete when |
|---|---|---|
| copy to SMEM | one warpgroup, or a warp | its barrier's phase is waited for |
| multicast | every CTA along the axes | each CTA's own barrier is waited for |
| copy to GMEM | after `commit_smem()` | `wait_smem_to_gmem` |
| `barrier_arrive` | a warpgroup, or a warp | at once; others wait for the phase |
| `cluster_ref(...)[...]` | a warpgroup | at once; ordered by a `ClusterBarrier` |
| `async_store_smem` | a warpgroup | the receiver waits for its barrier |

A buffer is written again only after all its readers have arrived on a barrier that the
writer waits for. If readers are in other CTAs, it is a `ClusterBarrier`.
"""
