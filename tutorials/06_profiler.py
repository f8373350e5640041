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
Tutorial 6: where the time of a kernel goes

# The profiler

A kernel that computes the right result can still waste most of its time. Its total time
does not say where: that needs a look inside, at what each warpgroup does when. The
profiler records that. In this tutorial it finds a **bubble**, a time in which the
tensor core has nothing to do, in a matrix product whose results are right, and shows
that the repair works.

As before, no GPU is needed. In the emulator the profiler shows the order of events
instead of their times; the measured pictures below are from an H200.
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
## A product, and its scopes

The kernel is the third step of tutorial 2: a CTA computes one tile of the result, in
steps along K, and has four buffers for the tiles of A and B, so that copies for later
steps are under way while it multiplies.

`jax.named_scope` gives a part of the kernel a name. JAX has it for its own profiles,
and it changes nothing in the kernel: without the profiler there is not one instruction
more.
"""

# %%
M = N = 128  # of a tile of the result
K = 64  # of a step
STAGES = 4


def tiles(*shape):
    return plgpu.SMEM(
        shape,
        jnp.bfloat16,
        transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)),
    )


def product_of(a, b, ahead):
    """A @ B; a step starts the copies of the step that is `ahead` of it."""
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
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ],
    )
    def product(a, b, out, a_smem, b_smem, out_smem, full):
        rows = plgpu.ds(lax.axis_index("m") * M, M)
        columns = plgpu.ds(lax.axis_index("n") * N, N)

        def fetch(step):
            stage, depth = lax.rem(step, STAGES), plgpu.ds(step * K, K)
            barrier = full.at[stage]
            plgpu.copy_gmem_to_smem(a.at[rows, depth], a_smem.at[stage], barrier)
            plgpu.copy_gmem_to_smem(b.at[depth, columns], b_smem.at[stage], barrier)

        def multiply(acc):
            @plgpu.loop(0, steps)
            def _(step):
                stage = lax.rem(step, STAGES)
                plgpu.barrier_wait(full.at[stage])
                with jax.named_scope("multiply"):
                    plgpu.wgmma(acc, a_smem.at[stage], b_smem.at[stage])
                    plgpu.wgmma_wait(0)
                with jax.named_scope("fetch"):

                    @plgpu.when(step + ahead < steps)
                    def _():
                        fetch(step + ahead)

            return acc[...].astype(jnp.bfloat16)

        with jax.named_scope("first copies"):
            for step in range(ahead):
                fetch(jnp.int32(step))
        values = plgpu.run_scoped(multiply, plgpu.ACC((M, N)))
        with jax.named_scope("store"):
            out_smem[...] = values
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, out.at[rows, columns])
            plgpu.wait_smem_to_gmem(0)

    return product(a, b)


def random(rows, columns, seed):
    values = np.random.default_rng(seed).standard_normal((rows, columns))
    return jnp.asarray(values, jnp.bfloat16)


a, b = random(128, 512, 0), random(512, 128, 1)

# %% [markdown]
"""
The author wanted to be careful, and starts each copy one step ahead. The result is
right:
"""

# %%
result = product_of(a, b, ahead=1)
expected = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
np.testing.assert_allclose(np.asarray(result, np.float32), expected, atol=0.5)

# %% [markdown]
"""
## The profile

`plgpu.testing.profile(f)` returns a function that calls `f` and returns a `Profile`.
The kernels that `f` calls record when each scope begins and ends, for each warpgroup of
each CTA. Waits are recorded by themselves, with the names of their barriers.

`print` tells for each warpgroup where its time goes:
"""

# %%
late = plgpu.testing.profile(product_of)(a, b, ahead=1)
print(late)

# %% [markdown]
"""
A wait has the name that the barrier has in the body, `full`, and the index, or a point
where the index is computed. The spans are a NumPy array with a row for each. Here are
the first ones of warpgroup 0; a notebook draws the profile itself if it is the last
line of a cell.
"""

# %%
for span in late.spans[:6]:
    print(span["name"], span["begin"], span["end"])
late

# %% [markdown]
"""
In the emulator a time is a number of events, and says only what came before what. Yet
that is enough to see the order of things: each `fetch` stands directly before a wait
for `full`. How long such a wait takes, only a GPU can tell. On an H200, for matrices of
1024 x 4096 and 4096 x 1024:

    kernel product: 64 CTAs on 64 SMs, 50.85 µs; an SM has no CTA for 3 % of it
      warpgroup 0: waits 37 % on `full[.]`, 34 % on `wgmma_wait`, 1 % on
          `wait_smem_to_gmem`; `multiply` 12 %, `fetch` 10 %, outside of spans 6 %

![A lane of an SM: short products between long waits for full](06_profiler_late.svg)

The hatched parts are the waits. `first copies` starts the copies of a single step, and
from there on every product is preceded by a wait for `full`, red, which is as long as
the product itself: the copies that it waits for have only just been started. At most
one of the four buffers is ever filled while another is read. That is the bubble, and
its name is on it.

## The repair

The copies have to start earlier: as many steps ahead as there are buffers. The product
of a step has been waited for when its `fetch` runs, so that its own buffer is free
again.
"""

# %%
early = plgpu.testing.profile(product_of)(a, b, ahead=STAGES)
np.testing.assert_array_equal(early.results, result)
print(early)

# %% [markdown]
"""
On the H200 the same matrices now give

    kernel product: 64 CTAs on 64 SMs, 33.66 µs
      warpgroup 0: waits 50 % on `wgmma_wait`, 8 % on `full[.]`, 2 % on
          `wait_smem_to_gmem`; `multiply` 17 %, `fetch` 12 %, outside of spans 10 %

![The same lane: products that follow each other closely](06_profiler_early.svg)

Two thirds of the time. The first wait remains: somebody has to wait for the first copy.
Most of the rest is `wgmma_wait`, orange, in which the tensor core works. Between two of
these it is idle: it has one product at a time, until the next one is issued. Tutorial 2
repairs that, too.

A test can hold such a repair. The share of waits is in the table:
"""


# %%
def share_of_waits(profile, name):
    spans = profile.spans[profile.spans["name"] == name]
    total = (profile.traces["end"] - profile.traces["begin"]).sum()
    return (spans["end"] - spans["begin"]).sum() / total


print("late ", round(share_of_waits(late, "full[.]"), 2))
print("early", round(share_of_waits(early, "full[.]"), 2))

# %% [markdown]
"""
## Other views

`save` writes a file that [Perfetto](https://ui.perfetto.dev) opens, with each SM as a
process and each warpgroup of a CTA as a thread. `svg` returns the picture; `sm` and
`between` choose a part of it.
"""

# %%
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    late.save(Path(folder) / "late.json")
    picture = late.svg(between=(0, late.traces["end"].max() / 2))
    (Path(folder) / "late.svg").write_text(picture)
    print(sorted(path.name for path in Path(folder).iterdir()))

# %% [markdown]
"""
A kernel can also profile itself on every call, as with JAX's own Pallas:
`CompilerParams(profile_space=64, profile_dir="traces")` writes a file of each launch to
that folder. [docs/profiler.md](../docs/profiler.md) has the details: what a span costs,
what happens if there are too many, and single warps.
"""
