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
Tutorial 8: embeddings on SparseCore

# Embeddings on SparseCore

TPUs have a second kind of core beside the one that multiplies matrices. A
**SparseCore** moves and adds small pieces of memory that indices name: rows of a table,
words of a histogram. A v5p has four of them, and a device of tpu7x two; each consists
of 16 **vector subcores**, which run independently. A subcore has

* a memory of its own, VMEM, from which it loads vectors of 8 or 16 words;
* a **stream engine**, which copies while the subcore computes, and which takes a list
  of indices: one instruction gathers a thousand rows;
* access to all of HBM, and to VMEM_SHARED, which the 16 subcores of a core share.

`pallas_gpu.sparsecore` has kernels for them, with the names of JAX's `plsc`. They run
in an emulator on any machine, and compile for each chip without one. **They have never
run on a TPU**: what follows is what the emulator executes and the compiler accepts.
"""

# %%
import itertools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import sparsecore as plsc
from pallas_gpu.sparsecore import ops

rng = np.random.default_rng(0)
table = rng.normal(size=(1000, 128)).astype(np.float32)
rows = rng.integers(0, 1000, 512).astype(np.int32)

# %% [markdown]
"""
## A lookup

Looking up rows of a table is `table[rows]`. A kernel says which subcores run it, a
**mesh**, and each of them takes its share of the indices. Arguments and results are
references in HBM; a subcore cannot compute with them, it has to copy. Scratch in VMEM
follows them.

There are 16 subcores here, so each has 32 of the 512 indices.
"""

# %%
mesh = plsc.VectorSubcoreMesh(
    core_axis_name="core", subcore_axis_name="subcore", num_cores=1
)
SHARE = 512 // 16


@plsc.kernel(
    out_type=jax.ShapeDtypeStruct((512, 128), jnp.float32),
    mesh=mesh,
    scratch_types=[
        plsc.VMEM((SHARE,), jnp.int32),
        plsc.VMEM((SHARE, 128), jnp.float32),
    ],
)
def lookup(table_ref, rows_ref, out_ref, rows_vmem, found_vmem):
    mine = plsc.ds(lax.axis_index("subcore") * SHARE, SHARE)
    plsc.sync_copy(rows_ref.at[mine], rows_vmem)
    plsc.sync_copy(table_ref.at[rows_vmem], found_vmem)
    plsc.sync_copy(found_vmem, out_ref.at[mine])


np.testing.assert_array_equal(lookup(table, rows), table[rows])

# %% [markdown]
"""
The line in the middle is the point: `table_ref.at[rows_vmem]` are the rows that the
indices in VMEM name, and the copy is one instruction, an **indirect stream**. The other
two are streams of consecutive words.

`sync_copy` waits. `async_copy` does not: it returns the copy, whose `wait()` returns
when as much has arrived as it moves. Each copy in flight has a semaphore of its own.
Until the wait returns the copy may read its source, and its indices, at any moment.

## Overlap

While a subcore waits, nothing else happens on it. `emit_pipeline` divides the work into
blocks with two buffers each: while the body works on a block, the indices of the next
one arrive and the rows of the last one leave. `core_axis_name` names the axes of the
mesh whose subcores share the steps of a parallel axis.
"""

# %%
BLOCK = 16
everywhere = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")


@plsc.kernel(out_type=jax.ShapeDtypeStruct((512, 128), jnp.float32), mesh=everywhere)
def pipelined(table_ref, rows_ref, out_ref):
    def gather(rows_vmem, found_vmem):
        plsc.sync_copy(table_ref.at[rows_vmem], found_vmem)

    plsc.emit_pipeline(
        gather,
        grid=(512 // BLOCK,),
        in_specs=[plsc.BlockSpec((BLOCK,), lambda i: (i,))],
        out_specs=[plsc.BlockSpec((BLOCK, 128), lambda i: (i, 0))],
        core_axis_name=("core", "subcore"),
        dimension_semantics=(plsc.PARALLEL,),
    )(rows_ref, out_ref)


np.testing.assert_array_equal(pipelined(table, rows), table[rows])

# %% [markdown]
"""
## Computing with rows

A value in a kernel is a scalar, or has the shape of a register: on tpu7x 16 words. A
loop over parts of a row loads, computes and stores a register at a time. The iterations
of a `parallel_loop` do not depend on each other, so the compiler runs them interleaved:
unrolled, a register in each bundle of instructions.
"""

# %%
LANES = plsc.get_sparse_core_info().num_lanes


@plsc.kernel(out_type=jax.ShapeDtypeStruct((512, 128), jnp.float32), mesh=everywhere)
def scaled(table_ref, rows_ref, out_ref):
    def gather(rows_vmem, found_vmem):
        plsc.sync_copy(table_ref.at[rows_vmem], found_vmem)

        @plsc.loop(0, BLOCK)
        def _(row):
            @plsc.parallel_loop(0, 128, step=LANES, unroll=8)
            def _(column):
                part = plsc.ds(column, LANES)
                found_vmem[row, part] = found_vmem[row, part] * 128**0.5

    plsc.emit_pipeline(
        gather,
        grid=(512 // BLOCK,),
        in_specs=[plsc.BlockSpec((BLOCK,), lambda i: (i,))],
        out_specs=[plsc.BlockSpec((BLOCK, 128), lambda i: (i, 0))],
        core_axis_name=("core", "subcore"),
        dimension_semantics=(plsc.PARALLEL,),
    )(rows_ref, out_ref)


np.testing.assert_allclose(scaled(table, rows), table[rows] * 128**0.5, rtol=1e-6)

# %% [markdown]
"""
## The derivative: adding rows

The derivative of a lookup adds rows: each row of the cotangent to the row of the table
that it came from, and several may go to the same one. Streams can add, but only to
memory on the chip. So the sums are made in VMEM_SHARED, by all subcores of a core at a
time, and copied to HBM when all of them are done.

"When all are done" is `subcore_barrier()`. Two are needed: nobody may add before all
sums are zero, and nobody may copy before all have added.
"""

# %%
SEGMENTS = 64
EACH = SEGMENTS // 16  # rows that a subcore clears and copies


def sums_of(first_barrier=True, second_barrier=True):
    """The kernel, or one with a mistake."""

    @plsc.kernel(
        out_type=jax.ShapeDtypeStruct((SEGMENTS, 128), jnp.float32),
        mesh=mesh,
        scratch_types=[
            plsc.VMEM((SHARE,), jnp.int32),
            plsc.VMEM((SHARE, 128), jnp.float32),
            plsc.VMEM_SHARED((SEGMENTS, 128), jnp.float32),
        ],
    )
    def sums(data_ref, rows_ref, zeros_ref, out_ref, rows_vmem, data_vmem, shared):
        subcore = lax.axis_index("subcore")
        own = plsc.ds(subcore * EACH, EACH)
        plsc.sync_copy(zeros_ref, shared.at[own])
        mine = plsc.ds(subcore * SHARE, SHARE)
        plsc.sync_copy(rows_ref.at[mine], rows_vmem)
        plsc.sync_copy(data_ref.at[mine], data_vmem)
        if first_barrier:
            plsc.subcore_barrier()
        plsc.sync_copy(data_vmem, shared.at[rows_vmem], add=True)
        if second_barrier:
            plsc.subcore_barrier()
        plsc.sync_copy(shared.at[own], out_ref.at[own])

    return sums


data = rng.integers(-9, 9, (512, 128)).astype(np.float32)
segments = rng.integers(0, SEGMENTS, 512).astype(np.int32)
zeros = np.zeros((EACH, 128), np.float32)
expected = np.zeros((SEGMENTS, 128), np.float32)
np.add.at(expected, segments, data)
np.testing.assert_array_equal(sums_of()(data, segments, zeros), expected)

# %% [markdown]
"""
## Mistakes

The emulator runs the subcores in an order that a seed chooses, lets copies happen as
late or as early as the waits allow, and knows who has ordered what. Without the second
barrier the result may well be right in a run; it is an error all the same.
"""


# %%
def reported(function, *args):
    """Prints what is reported of a call; nothing would be a mistake of its own."""
    try:
        function(*args)
    except plgpu.errors.PallasGpuError as error:
        print(f"{type(error).__name__}: {error}\n")
    else:
        raise AssertionError("the emulator has to report it")


reported(sums_of(second_barrier=False), data, segments, zeros)

# %% [markdown]
"""
An index that changes while a stream still reads it is a frequent one. Here the wait is
behind the store that reuses the memory of the indices.
"""


# %%
@plsc.kernel(
    out_type=jax.ShapeDtypeStruct((512, 128), jnp.float32),
    mesh=mesh,
    scratch_types=[
        plsc.VMEM((SHARE,), jnp.int32),
        plsc.VMEM((SHARE, 128), jnp.float32),
        plsc.SemaphoreType.DMA,
    ],
)
def early(table_ref, rows_ref, out_ref, rows_vmem, found_vmem, arrived):
    mine = plsc.ds(lax.axis_index("subcore") * SHARE, SHARE)
    plsc.sync_copy(rows_ref.at[mine], rows_vmem)
    copy = plsc.async_copy(table_ref.at[rows_vmem], found_vmem, arrived)
    rows_vmem[:LANES] = jnp.zeros(LANES, jnp.int32)
    copy.wait()
    plsc.sync_copy(found_vmem, out_ref.at[mine])


reported(early, table, rows)

# %% [markdown]
"""
Other mistakes do not wait for a run: they are found while the body is traced. Offsets
in HBM have to be multiples of 32 bytes, which the compiler does not check; VMEM cannot
be copied to VMEM; a value has to fit registers.
"""


# %%
@plsc.kernel(
    out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
    mesh=mesh,
    scratch_types=[plsc.VMEM((128,), jnp.float32)],
)
def crooked(x_ref, out_ref, part):
    plsc.sync_copy(x_ref.at[4:132], part)
    plsc.sync_copy(part, out_ref)


reported(crooked, np.zeros(1024, np.float32))

# %% [markdown]
"""
## Ready kernels

`pallas_gpu.sparsecore.ops` has these kernels for any sizes. `embedding_lookup` has a
derivative, `embedding_bag` adds the rows of ragged bags while it gathers the next ones,
`deduplicate` finds the different indices of a batch, and `dispatch` moves the rows of
tokens to their experts.
"""

# %%
narrow = jnp.asarray(rng.normal(size=(1000, 48)), jnp.bfloat16)
np.testing.assert_array_equal(ops.embedding_lookup(narrow, rows), narrow[rows])


def loss(table):
    return jnp.sum(ops.embedding_lookup(table, rows) ** 2)


np.testing.assert_allclose(
    jax.grad(loss)(table), jax.grad(lambda t: jnp.sum(t[rows] ** 2))(table), rtol=1e-5
)

# %%
offsets = np.array([0, 3, 3, 200, 512], np.int32)
bags = ops.embedding_bag(table, rows, offsets)
by_hand = [table[rows[a:b]].sum(0) for a, b in itertools.pairwise(offsets)]
np.testing.assert_allclose(bags, np.stack(by_hand), rtol=1e-4, atol=1e-4)

# %% [markdown]
"""
Rows whose length is not a multiple of 128 words, as those of `narrow`, need another
tiling of memory than the one in which XLA keeps arrays: `CompilerParams(tiling=
"sparsecore")`, which the ready kernels choose where they have to. XLA then copies the
table at each call. A table that is looked up often should have rows of multiples of 128
words; two bfloat16 fit a word.

docs/sparsecore.md has all operations, what each memory can do, and how to compile for a
chip without one.
"""
