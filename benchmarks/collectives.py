# SPDX-License-Identifier: Apache-2.0
"""Collectives on several GPUs: ours, NCCL's through JAX, and upstream's, in one run.

`python -m benchmarks.collectives [--json] [--seconds 60] [--only all_reduce ...]
[--sizes 4096 ...]`

Calls are chained in one program, each waiting for the one before; the time of a call is
the difference between long and short chains, divided by the difference of their
lengths. Upstream's all-gather and reduce-scatter need NVLink multicast, and are left
out.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import timing
from pallas_gpu.ops import collectives

AXIS = "d"
SIZES = tuple(4096 * 4**i for i in range(9))  # 4 KiB to 256 MiB
Function = Callable[..., jax.Array]

gather = functools.partial(collectives.all_gather, axis_name=AXIS)
scatter = functools.partial(collectives.reduce_scatter, axis_name=AXIS)
reduce = functools.partial(collectives.all_reduce, axis_name=AXIS)


def exchange(x: Any, method: str) -> jax.Array:
    return collectives.all_to_all(x, AXIS, 0, 0, method=method)


# Each candidate takes a device's array. The bytes are those that a device receives at
# least, in parts of the array's: what NCCL's tests call the bus bandwidth.
COLLECTIVES: dict[str, tuple[dict[str, Function], Callable[[int], float]]] = {
    "all_gather": (
        {m: functools.partial(gather, method=m) for m in ("kernel", "lax")},
        lambda n: n - 1,
    ),
    "reduce_scatter": (
        {m: functools.partial(scatter, method=m) for m in ("kernel", "lax")},
        lambda n: (n - 1) / n,
    ),
    "all_reduce": (
        {
            m: functools.partial(reduce, method=m)
            for m in ("one_shot", "two_shot", "lax")
        },
        lambda n: 2 * (n - 1) / n,
    ),
    "all_to_all": (
        {m: functools.partial(exchange, method=m) for m in ("kernel", "lax")},
        lambda n: (n - 1) / n,
    ),
}
# Rows of all devices, K, and columns of all devices, of a layer that is parallel over
# its columns; parallel over K, the other way round.
PRODUCTS = {
    "8B, 4096 tokens, up": (4096, 4096, 14336),
    "8B, 16384 tokens, up": (16384, 4096, 14336),
    "8B, 16384 tokens, attention": (16384, 4096, 4096),
    "70B, 8192 tokens, up": (8192, 8192, 28672),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", nargs="*", default=[*COLLECTIVES, "products"])
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES)
    options = parser.parse_args()
    devices = jax.devices()
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((len(devices),), (AXIS,), axis_types=auto)
    start, each = time.monotonic(), options.seconds / len(options.only)
    rows = []
    for i, name in enumerate(options.only, 1):
        end = start + i * each
        try:
            if name == "products":
                rows += _products(mesh, end)
            else:
                rows += _collective(mesh, name, options.sizes, end)
        except Exception:
            traceback.print_exc(limit=-4)
    notes = f"{len(devices)} devices; microseconds, and GB/s each way"
    if rows:
        timing.report("Collectives", rows, notes, options.json)


def _collective(
    mesh: Any, name: str, sizes: Sequence[int], end: float
) -> list[dict[str, Any]]:
    candidates, parts = COLLECTIVES[name]
    rows = []
    for size in sizes:
        if time.monotonic() > end:
            break
        # Of an all-gather the size is that of the result.
        own = size // (mesh.size if name == "all_gather" else 1)
        shape = (mesh.size * own // 2,)
        x = _random(mesh, shape, jax.P(AXIS))
        programs = {
            m: _Program(mesh, f, jax.P(AXIS), jax.P(AXIS), own)
            for m, f in candidates.items()
        }
        found = _measure(programs, (x,))
        row: dict[str, Any] = {"collective": name, "bytes": size}
        for method, microseconds in found.items():
            row[f"{method} us"] = microseconds
            row[f"{method} GB/s"] = own * parts(mesh.size) / microseconds / 1e3
        print(row, flush=True)
        rows.append(_wide(row))
    return rows


_COLUMNS = ("collective", "bytes", *(
    f"{m} {unit}" for m in ("kernel", "one_shot", "two_shot", "lax", "separate",
    "upstream") for unit in ("us", "GB/s", "TFLOP/s")
))  # fmt: skip


def _wide(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with the columns of all tables."""
    return {c: row.get(c, "") for c in _COLUMNS if c in row or "TFLOP" not in c}


def _products(mesh: Any, end: float) -> list[dict[str, Any]]:
    rows = []
    for name, (m, k, n) in PRODUCTS.items():
        flops = 2 * m * k * n / mesh.size
        for kind, shapes, specs, out in (
            ("gather", ((m, k), (k, n)), ((AXIS,), (None, AXIS)), (None, AXIS)),
            ("scatter", ((m, n), (n, k)), ((None, AXIS), (AXIS,)), (AXIS,)),
        ):
            if time.monotonic() > end:
                return rows
            ins = tuple(jax.P(*s) for s in specs)
            args = tuple(_random(mesh, s, i) for s, i in zip(shapes, ins, strict=True))
            programs = {
                method: _Program(mesh, f, ins, jax.P(*out), 1 << 24)
                for method, f in _product_candidates(kind).items()
            }
            row: dict[str, Any] = {"product": f"{name}, {kind}"}
            for method, microseconds in _measure(programs, args).items():
                row[f"{method} us"] = microseconds
                row[f"{method} TFLOP/s"] = flops / microseconds / 1e6
            print(row, flush=True)
    return rows


def _product_candidates(kind: str) -> dict[str, Function]:
    function, plain = {
        "gather": (collectives.all_gather_matmul, _gather_then_matmul),
        "scatter": (collectives.matmul_reduce_scatter, _matmul_then_scatter),
    }[kind]
    found: dict[str, Function] = {
        m: functools.partial(function, axis_name=AXIS, method=m)
        for m in ("kernel", "separate")
    }
    found["lax"] = plain
    if kind == "gather":
        found["upstream"] = _upstreams
    return found


def _gather_then_matmul(x: Any, w: Any) -> jax.Array:
    return lax.all_gather(x, AXIS, axis=0, tiled=True) @ w


def _matmul_then_scatter(x: Any, w: Any) -> jax.Array:
    return lax.psum_scatter(x @ w, AXIS, scatter_dimension=0, tiled=True)


def _upstreams(x: Any, w: Any) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as theirs

    config = theirs.TuningConfig(
        tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4,
        grid_minor_dim=theirs.MatmulDimension.M, grid_tile_width=8,
        wg_dimension=theirs.MatmulDimension.N,
    )  # fmt: skip
    return theirs.all_gather_lhs_matmul(x, w, AXIS, config=config, dtype=x.dtype)


class _Program:
    """A function in a `shard_map`, and chains of it of two lengths."""

    def __init__(self, mesh: Any, f: Function, ins: Any, out: Any, size: int) -> None:
        self.mesh, self.ins, self.out, self.f = mesh, ins, out, f
        short = 2 if size > 1 << 22 else 8
        self.lengths = short, 3 * short

    def mapped(self, f: Function, out: Any) -> Any:
        return jax.jit(
            jax.shard_map(
                f, mesh=self.mesh, in_specs=self.ins, out_specs=out, check_vma=False
            )
        )

    def once(self, *args: Any) -> Any:
        return self.mapped(self.f, self.out)(*args)

    def chains(self) -> list[Any]:
        def chained(length: int) -> Any:
            def run(x: Any, *others: Any) -> list[Any]:
                results = []
                for _ in range(length):
                    # All results are used: without a use a call would be left out.
                    x, y = lax.optimization_barrier((x, self.f(x, *others)))
                    results.append(y)
                return results

            return self.mapped(run, self.out)

        return [chained(length) for length in self.lengths]


def _measure(programs: Mapping[str, _Program], args: Any) -> dict[str, float]:
    """Returns the microseconds of a call of each candidate that runs and is right."""
    expected = np.asarray(programs["lax"].once(*args).astype(jnp.float32))
    chains: dict[str, list[Any]] = {}
    for method, program in programs.items():
        try:
            got = np.asarray(program.once(*args).astype(jnp.float32))
            scale = max(1.0, float(np.abs(expected).max()))
            error = float(np.abs(got - expected).max()) / scale
            if not error < 0.02:
                print(f"{method}: WRONG, relative error {error}", flush=True)
            chains[method] = program.chains()
            for f in chains[method]:
                jax.block_until_ready(f(*args))
        except Exception as error:
            print(f"{method}: {type(error).__name__}: {str(error)[:400]}", flush=True)
            chains.pop(method, None)
    times: dict[str, tuple[list[float], list[float]]] = {}
    for _ in range(12):
        for method, both in chains.items():
            for f, found in zip(both, times.setdefault(method, ([], [])), strict=True):
                start = time.perf_counter()
                jax.block_until_ready(f(*args))
                found.append(time.perf_counter() - start)
    result = {}
    for method, (short, long) in times.items():
        lengths = programs[method].lengths
        difference = statistics.median(long) - statistics.median(short)
        result[method] = difference / (lengths[1] - lengths[0]) * 1e6
    return result


def _random(mesh: Any, shape: tuple[int, ...], spec: Any) -> jax.Array:
    place = jax.NamedSharding(mesh, spec)
    scale = 1 / math.sqrt(shape[-1]) if len(shape) > 1 else 1.0

    def make() -> jax.Array:
        x = jax.random.normal(jax.random.key(len(shape)), shape, jnp.bfloat16)
        return (x * scale).astype(jnp.bfloat16)

    return jax.jit(make, out_shardings=place)()


if __name__ == "__main__":
    main()
