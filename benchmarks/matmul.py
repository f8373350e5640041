# SPDX-License-Identifier: Apache-2.0
"""bf16 matrix products on a GPU: ours, upstream's and XLA's (cuBLAS), in one run.

python -m benchmarks.matmul [--json]
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as upstream

import pallas_gpu as plgpu
from benchmarks import timing
from pallas_gpu import ops

INPUTS = 5
SHAPES = [(4096, 4096, 4096), (8192, 8192, 8192), (4096, 8192, 4096)]
STEPS = {
    "no cluster": ops.MatmulConfig(cluster=None),
    "cluster of 2": ops.MatmulConfig(cluster="n"),
    "64x256, no cluster": ops.MatmulConfig(tile_m=64, tile_n=256, cluster=None),
}
# Ours is under Warpgroup semantics, the default, as upstream's, and under Lane.
LANE = ", Lane"
LANE_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def upstream_config(config: ops.MatmulConfig) -> Any:
    """Returns upstream's configuration with the same tiles and schedule."""
    dimensions = upstream.MatmulDimension
    return upstream.TuningConfig(
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        tile_k=config.tile_k,
        max_concurrent_steps=config.stages,
        epi_tile_m=config.epilogue_m,
        epi_tile_n=config.epilogue_n,
        grid_minor_dim=dimensions.M if config.minor == "m" else dimensions.N,
        grid_tile_width=config.strip,
        wg_dimension=dimensions.M,
        cluster_dimension=None if config.cluster is None else dimensions.N,
    )


def measure(m: int, n: int, k: int) -> list[dict[str, Any]]:
    """Times the candidates on one problem; checks them against float32."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    inputs = [(normal(m, k), normal(k, n)) for _ in range(INPUTS)]
    a, b = inputs[0]
    reference = a[:256].astype(jnp.float32) @ b.astype(jnp.float32)
    candidates = {"cuBLAS through JAX": jax.jit(jnp.matmul)}
    for step, config in STEPS.items():
        candidates[f"upstream, {step}"] = jax.jit(
            functools.partial(upstream.matmul, c=None, config=upstream_config(config))
        )
        for suffix, params in (("", None), (LANE, LANE_PARAMS)):
            candidates[f"pallas_gpu, {step}{suffix}"] = jax.jit(
                functools.partial(ops.matmul, config=config, compiler_params=params)
            )
    rows = []
    times = timing.on_device(candidates, inputs)
    for name, f in candidates.items():
        error = jnp.linalg.norm(f(a, b)[:256].astype(jnp.float32) - reference)
        relative = float(error / jnp.linalg.norm(reference))
        assert relative < 1e-2, f"{name}: relative error {relative}"
        seconds = times[name]
        rows.append(
            {
                "m, n, k": f"{m}, {n}, {k}",
                "kernel": name,
                "µs": seconds * 1e6,
                "TFLOP/s": 2 * m * n * k / seconds / 1e12,
                "rel. error": relative,
            }
        )
    cublas = rows[0]["µs"]
    for row in rows:
        row["of cuBLAS"] = cublas / row["µs"]
        twin = row["kernel"].replace("pallas_gpu", "upstream").removesuffix(LANE)
        other = next(r for r in rows if r["kernel"] == twin)
        row["of upstream"] = other["µs"] / row["µs"] if twin != row["kernel"] else ""
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [row for shape in SHAPES for row in measure(*shape)]
    notes = (
        "bfloat16, random normal; device times, medians of 40 "
        "rounds of one call of each in a shuffled order, 50 ms apart."
    )
    timing.report("Matrix products", rows, notes, options.json)


if __name__ == "__main__":
    main()
