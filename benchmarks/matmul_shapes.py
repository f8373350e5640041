# SPDX-License-Identifier: Apache-2.0
"""bf16 products of language models' shapes on a GPU: ours and cuBLAS, in one run.

python -m benchmarks.matmul_shapes [--only 1 16 others] [--rounds 15] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import timing
from pallas_gpu import ops

INPUTS = 3
# Rows of the result that are compared with float32, at both ends.
CHECKED = 64
TOKENS = [1, 16, 64, 256, 1000, 4096]
# Weights of two models: columns and depth.
WEIGHTS = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B up+gate": (28672, 4096),
    "8B down": (4096, 14336),
    "70B qkv": (10240, 8192),
    "70B o": (8192, 8192),
    "70B up+gate": (57344, 8192),
    "70B down": (8192, 28672),
}
OTHERS = {
    "odd": ((4095, 4099), (4099, 4097)),
    "long K": ((256, 65536), (65536, 256)),
    "8192^3": ((8192, 8192), (8192, 8192)),
    "2048^3": ((2048, 2048), (2048, 2048)),
    "1024^3": ((1024, 1024), (1024, 1024)),
}
# Beside the table: batches, and float32, which is tf32 on both sides.
BESIDE = {
    "batch of 64": ((64, 512, 64), (64, 64, 512), "bfloat16"),
    "float32 2048^3": ((2048, 2048), (2048, 2048), "float32"),
    "float32 4096^3": ((4096, 4096), (4096, 4096), "float32"),
}
# Of an H200, as measured: the power limit on large squares, and a copy.
FLOPS, BYTES = {"bfloat16": 810e12, "float32": 405e12}, 4.27e12


def problems(only: list[str]) -> list[tuple[str, str, tuple[Any, ...]]]:
    """Returns group, name and (shape of A, shape of B, type) of what is measured."""
    found: list[tuple[str, str, tuple[Any, ...]]] = [
        (str(m), name, ((m, k), (k, n), "bfloat16"))
        for m in TOKENS
        for name, (n, k) in WEIGHTS.items()
    ]
    found += [("others", name, (*s, "bfloat16")) for name, s in OTHERS.items()]
    found += [("beside", name, shapes) for name, shapes in BESIDE.items()]
    return [p for p in found if not only or p[0] in only]


def operands(shapes: tuple[Any, ...], seed: Any) -> list[jax.Array]:
    """Returns random normal operands."""
    *sizes, dtype = shapes
    keys = jax.random.split(jax.random.key(seed), len(sizes))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, sizes, strict=True)]


def relative_error(a: jax.Array, b: jax.Array, out: jax.Array) -> jax.Array:
    """Returns the error at the first and the last rows, of their norm."""

    def ends(x: jax.Array) -> jax.Array:
        parts = [x[..., :CHECKED, :], x[..., -CHECKED:, :]]
        return jnp.concatenate(parts, axis=-2).astype(jnp.float32)

    expected = jnp.matmul(ends(a), b.astype(jnp.float32), precision="highest")
    difference = ends(out) - expected
    return jnp.linalg.norm(difference) / jnp.linalg.norm(expected)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What runs for a problem: nothing is compiled between measurements."""

    operands: Any
    error: Any
    sides: dict[str, Any]


def compiled(shapes: tuple[Any, ...]) -> Compiled:
    """Compiles what a problem needs."""
    make = functools.partial(operands, shapes)
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    types = jax.eval_shape(make, seed)
    out = jax.eval_shape(jnp.matmul, *types)
    sides = {"cuBLAS": jnp.matmul, "ours": ops.matmul}

    def build(f: Any, *arguments: Any) -> Any:
        return jax.jit(f).lower(*arguments).compile()

    return Compiled(
        build(make, seed),
        build(relative_error, *types, out),
        {name: build(f, *types) for name, f in sides.items()},
    )


def measure(
    problem: tuple[str, str, tuple[Any, ...]], run: Compiled, rounds: int
) -> dict[str, Any]:
    """Checks both sides and times them."""
    group, name, shapes = problem
    inputs = [run.operands(jnp.uint32(seed)) for seed in range(INPUTS)]
    errors = {
        side: float(run.error(*inputs[0], f(*inputs[0])))
        for side, f in run.sides.items()
    }
    for side, error in errors.items():
        assert error < 1e-2, f"{group}, {name}, {side}: relative error {error}"
    times = timing.on_device(run.sides, inputs, rounds=rounds, pause_seconds=0.01)
    a, b, dtype = shapes
    flops = 2 * math.prod(a) * b[-1]
    out = math.prod(a[:-1]) * b[-1]
    moved = (math.prod(a) + math.prod(b) + out) * jnp.dtype(dtype).itemsize
    bound = max(flops / FLOPS[dtype], moved / BYTES)
    return {
        "tokens": group,
        "weights": name,
        "cuBLAS µs": times["cuBLAS"] * 1e6,
        "ours µs": times["ours"] * 1e6,
        "of cuBLAS": times["cuBLAS"] / times["ours"],
        "cuBLAS, of the roofline": bound / times["cuBLAS"],
        "ours, of the roofline": bound / times["ours"],
        "rel. error": errors["ours"],
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    groups = [*map(str, TOKENS), "others", "beside"]
    parser.add_argument("--only", nargs="*", default=[], choices=groups)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = problems(options.only)
    with ThreadPoolExecutor(16) as pool:
        ready = list(pool.map(lambda p: compiled(p[2]), chosen))
    rows = [
        measure(p, run, options.rounds) for p, run in zip(chosen, ready, strict=True)
    ]
    ratios = [r["of cuBLAS"] for r in rows if r["tokens"] != "beside"]
    notes = (
        "bfloat16, random normal; device times, medians of "
        f"{options.rounds} rounds of one call of each in a shuffled order."
    )
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        notes += (
            f" Geometric mean of our share of cuBLAS over {len(ratios)} shapes: "
            f"{mean:.3f}, least {min(ratios):.3f}."
        )
    timing.report("Matrix products", rows, notes, options.json)


if __name__ == "__main__":
    main()
