# SPDX-License-Identifier: Apache-2.0
"""Trace and lower kernels on a CPU: ours and upstream's, in one run.

JAX_PLATFORMS=cpu python -m benchmarks.lowering [--json]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import (
    attention_mgpu,
    blackwell_matmul_mgpu,
    hopper_matmul_mgpu,
)

import pallas_gpu as plgpu
from benchmarks import pipelines, timing
from benchmarks.matmul import STEPS, upstream_config
from pallas_gpu import arch, ops

MATRICES = [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 2
TILE, OPERATIONS = (64, 128), 200
HEADS = [jax.ShapeDtypeStruct((4, 4096, 16, 128), jnp.float16)] * 3


def trace_and_lower(f: Callable[..., Any], avals: Sequence[Any]) -> Callable[[], Any]:
    """Returns a function that traces and lowers `f` for CUDA without caches."""

    def run() -> Any:
        fresh = functools.partial(f)
        traced = jax.jit(lambda *args: fresh(*args)).trace(*avals)
        return traced.lower(lowering_platforms=("cuda",))

    return run


def on_h200(f: Callable[..., Any]) -> Callable[..., Any]:
    """Provides upstream's kernel, which queries the device, with the number of SMs."""
    device = jax.sharding.AbstractDevice(
        "NVIDIA H200", num_cores=arch.SM_90A.sm_count, platform="cuda"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)

    def run(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            return f(*args)

    return run


def ours(
    f: Callable[..., Any], target: str | None = None, **options: Any
) -> dict[str, Callable[..., Any]]:
    """Returns a function of `ops` under each semantics, without cached traces."""

    def under(semantics: Any) -> Callable[..., Any]:
        params = plgpu.CompilerParams(
            approx_math=True, lowering_semantics=semantics, target=target
        )

        def run(*args: Any) -> Any:
            ops.clear_cache()
            return f(*args, compiler_params=params, **options)

        return run

    return {s.name: under(s) for s in plgpu.LoweringSemantics}


def kernels() -> dict[str, tuple[list[Any], dict[str, Callable[..., Any]]]]:
    """Returns arguments and candidates of each kernel, upstream's first."""
    table: dict[str, tuple[list[Any], dict[str, Callable[..., Any]]]] = {}
    for step, config in STEPS.items():
        theirs = functools.partial(
            hopper_matmul_mgpu.matmul, c=None, config=upstream_config(config)
        )
        candidates = {"upstream": on_h200(theirs), **ours(ops.matmul, config=config)}
        table[f"matmul, {step}"] = MATRICES, candidates
    config = ops.BlackwellMatmulConfig()
    table["matmul, Blackwell"] = MATRICES, blackwell_matmul(config)
    config = ops.BlackwellMatmulConfig(collective=True, stages=6)
    table["matmul, Blackwell, pairs of CTAs"] = MATRICES, blackwell_matmul(config)
    for causal in (False, True):
        tuning = attention_mgpu.TuningConfig(
            block_q=64, block_kv=128, max_concurrent_steps=2,
            use_schedule_barrier=True, causal=causal,
        )  # fmt: skip
        theirs = functools.partial(attention_mgpu.attention, config=tuning)
        name = "attention, causal" if causal else "attention"
        # Upstream's tiles and schedule, then the default, whose blocks are persistent.
        same = ours(ops.attention, causal=causal, config=ops.AttentionConfig())
        default = ours(ops.attention, causal=causal)
        table[name] = HEADS, {"upstream": on_h200(theirs), **same}
        table[f"{name}, default"] = HEADS, {"upstream": on_h200(theirs), **default}
    return table | pipelined()


def blackwell_matmul(
    config: ops.BlackwellMatmulConfig,
) -> dict[str, Callable[..., Any]]:
    """Returns both persistent kernels for sm_100a, with the same tiles and stages."""
    tuning = upstream_blackwell(config)
    theirs = functools.partial(blackwell_matmul_mgpu.matmul_kernel, config=tuning)
    mine = ours(ops.matmul, target="sm_100a", config=config)
    return {"upstream": theirs, **mine}


def upstream_blackwell(config: ops.BlackwellMatmulConfig) -> Any:
    """Returns the same tiles and schedule for upstream's kernel."""
    dimensions = blackwell_matmul_mgpu.MatmulDimension
    return blackwell_matmul_mgpu.TuningConfig(
        tile_m=128,
        tile_n=config.tile_n // config.ctas,
        tile_k=config.tile_k,
        max_concurrent_steps=config.stages,
        collective=config.collective,
        epilogue_tile_n=config.epilogue_n or 64,
        grid_minor_dim=dimensions.M if config.minor == "m" else dimensions.N,
        grid_tile_width=config.strip,
    )


def pipelined() -> dict[str, tuple[list[Any], dict[str, Callable[..., Any]]]]:
    """Returns the same for kernels written with pipelines, once for both packages."""

    def both(make: Callable[[str], Callable[..., Any]]) -> dict[str, Any]:
        # A kernel is made in each call: it keeps its traces.
        return {
            "upstream": on_h200(lambda *args: make("upstream")(*args)),
            "Warpgroup": lambda *args: make("pallas_gpu")(*args),
        }

    rows = jax.ShapeDtypeStruct((pipelines.ROWS, pipelines.COLUMNS), jnp.float32)
    size = 4096
    tile = jax.ShapeDtypeStruct(TILE, jnp.float32)
    return {
        f"body of {OPERATIONS} operations": ([tile], both(many_operations)),
        "copy by emit_pipeline": ([rows], both(pipelines.copy)),
        "matmul by emit_pipeline_warp_specialized": (
            MATRICES, both(lambda p: pipelines.matmul(p, size, size, size)),
        ),
    }  # fmt: skip


def many_operations(package: str) -> Callable[..., Any]:
    """A kernel that applies 200 operations of jnp to one array."""
    lib, _ = pipelines.PACKAGES[package]

    def body(x: Any, o: Any, smem: Any, barrier: Any) -> None:
        lib.copy_gmem_to_smem(x, smem, barrier)
        lib.barrier_wait(barrier)
        value = smem[...]
        for i in range(OPERATIONS // 5):
            larger = jnp.maximum(value, 0.1 * i)
            value = jnp.where(value > i, larger, jnp.exp(value - larger))
        smem[...] = value
        lib.commit_smem()
        lib.copy_smem_to_gmem(smem, o)
        lib.wait_smem_to_gmem(0)

    tiles = lib.TilingTransform((8, 32)), lib.SwizzleTransform(128)
    return lib.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(TILE, jnp.float32),
        scratch_types=[
            lib.SMEM(TILE, jnp.float32, transforms=tiles),
            lib.Barrier(),
        ],
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    options = parser.parse_args()
    rows = []
    for kernel, (avals, candidates) in kernels().items():
        if options.only not in kernel:
            continue
        times = timing.interleaved(
            {name: trace_and_lower(f, avals) for name, f in candidates.items()},
            rounds=9,
        )
        for name, seconds in times.items():
            who = name if name == "upstream" else f"pallas_gpu, {name}"
            rows.append(
                {
                    "kernel": kernel,
                    "by": who,
                    "ms": seconds * 1e3,
                    "time of upstream's": seconds / times["upstream"],
                }
            )
    notes = "Trace and lower to the custom call, warm; medians of 9 interleaved rounds."
    timing.report("Lowering kernels", rows, notes, options.json)


if __name__ == "__main__":
    main()
