# SPDX-License-Identifier: Apache-2.0
"""Trace and lower the Hopper matmul on a CPU: ours and upstream's, in one run.

JAX_PLATFORMS=cpu python -m benchmarks.lowering [--json]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as upstream

from benchmarks import timing
from benchmarks.matmul import STEPS, upstream_config
from pallas_gpu import arch, ops

SHAPE = (4096, 4096, 4096)


def trace_and_lower(f: Callable[..., Any]) -> Callable[[], Any]:
    """Returns a function that traces and lowers `f` for CUDA, with nothing cached."""
    m, n, k = SHAPE
    a = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    b = jax.ShapeDtypeStruct((k, n), jnp.bfloat16)

    def run() -> Any:
        fresh = functools.partial(f)
        traced = jax.jit(lambda x, y: fresh(x, y)).trace(a, b)
        return traced.lower(lowering_platforms=("cuda",))

    return run


def on_h200(f: Callable[..., Any]) -> Callable[..., Any]:
    """Tells upstream's kernel how many SMs there are; it asks the device."""
    device = jax.sharding.AbstractDevice(
        "NVIDIA H200", num_cores=arch.SM_90A.sm_count, platform="cuda"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)

    def run(x: Any, y: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            return f(x, y)

    return run


def fresh_matmul(config: ops.MatmulConfig) -> Callable[..., Any]:
    """Returns our matmul without the cache of traced kernels."""

    def f(x: Any, y: Any) -> Any:
        ops.clear_cache()
        return ops.matmul(x, y, config=config)

    return f


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for step, config in STEPS.items():
        theirs = on_h200(
            functools.partial(upstream.matmul, c=None, config=upstream_config(config))
        )
        times = timing.interleaved(
            {
                "upstream": trace_and_lower(theirs),
                "pallas_gpu": trace_and_lower(fresh_matmul(config)),
            },
            rounds=9,
        )
        for name, seconds in times.items():
            rows.append(
                {
                    "kernel": f"{name}, {step}",
                    "ms": seconds * 1e3,
                    "of upstream": times["upstream"] / seconds,
                }
            )
    notes = "Trace and lower to the custom call, warm; medians of 9 interleaved rounds."
    timing.report("Lowering the matmul (4096³, bf16)", rows, notes, options.json)


if __name__ == "__main__":
    main()
