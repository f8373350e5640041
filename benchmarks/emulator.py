# SPDX-License-Identifier: Apache-2.0
"""A 512³ float16 matmul on a CPU: our emulator and upstream's interpreter, in one run.

JAX_PLATFORMS=cpu python -m benchmarks.emulator [--json]
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as upstream

import pallas_gpu as plgpu
from benchmarks import timing

SIZE, TILE_M, TILE_N, TILE_K = 512, 128, 128, 64


def matmul(api: Any, blocks: Any, interpret: Any) -> Any:
    """Returns the same kernel, written once, for either package.

    Args:
      api: pallas_gpu, or upstream's module.
      blocks: the module with `run_scoped` and `ds`.
      interpret: the package's interpretation parameters.
    """
    transforms = (api.TilingTransform((8, 64)), api.SwizzleTransform(128))

    def body(a, b, out, a_smem, b_smem, out_smem, barrier):
        rows = blocks.ds(lax.axis_index("i") * TILE_M, TILE_M)
        columns = blocks.ds(lax.axis_index("j") * TILE_N, TILE_N)

        def accumulate(acc):
            def step(k, _):
                depth = blocks.ds(k * TILE_K, TILE_K)
                api.copy_gmem_to_smem(a.at[rows, depth], a_smem, barrier)
                api.copy_gmem_to_smem(b.at[depth, columns], b_smem, barrier)
                api.barrier_wait(barrier)
                api.wgmma(acc, a_smem, b_smem)
                api.wgmma_wait(0)

            lax.fori_loop(0, SIZE // TILE_K, step, None)
            return acc[...]

        product = blocks.run_scoped(accumulate, api.ACC((TILE_M, TILE_N), jnp.float32))
        out_smem[...] = product.astype(jnp.float16)
        api.commit_smem()
        api.copy_smem_to_gmem(out_smem, out.at[rows, columns])
        api.wait_smem_to_gmem(0)

    return api.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float16),
        grid=(SIZE // TILE_M, SIZE // TILE_N),
        grid_names=("i", "j"),
        scratch_types=[
            api.SMEM((TILE_M, TILE_K), jnp.float16, transforms=transforms),
            api.SMEM((TILE_K, TILE_N), jnp.float16, transforms=transforms),
            api.SMEM((TILE_M, TILE_N), jnp.float16, transforms=transforms),
            api.Barrier(num_arrivals=2),
        ],
        interpret=interpret,
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((SIZE, SIZE)), jnp.float16) for _ in "ab")
    kernels = {
        "upstream": jax.jit(matmul(upstream, pl, upstream.InterpretGPUParams())),
        "pallas_gpu": jax.jit(matmul(plgpu, plgpu, plgpu.InterpretParams())),
        "pallas_gpu, detect_races=False": jax.jit(
            matmul(plgpu, plgpu, plgpu.InterpretParams(detect_races=False))
        ),
    }
    expected = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    for name, f in kernels.items():
        error = np.abs(np.asarray(f(a, b), np.float32) - expected).max()
        assert error < 0.1, f"{name}: error {error}"
    times = timing.interleaved(
        {
            name: (lambda f=f: f(a, b).block_until_ready())
            for name, f in kernels.items()
        },
        rounds=9,
    )
    rows = [
        {"runs in": name, "ms": s * 1e3, "of upstream": times["upstream"] / s}
        for name, s in times.items()
    ]
    notes = "16 CTAs, tiles 128x128x64, random normal; medians of 9 interleaved rounds."
    timing.report("Emulating a 512³ float16 matmul", rows, notes, options.json)


if __name__ == "__main__":
    main()
