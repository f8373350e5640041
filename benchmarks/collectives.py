# SPDX-License-Identifier: Apache-2.0
"""Collectives on several GPUs: ours, NCCL's through JAX, and upstream's, in one run.

`python -m benchmarks.collectives [--json] [--only all_reduce ...] [--sizes 4096 ...]`

Each candidate is a program of several calls, each after the one before. The device's
clock is read before the first call and after the last one: that is the device's time.
The calls then wait on the device until the host has launched all of them. The host's
time is that of the whole program without this wait, from the call in Python to the
results. Both are divided by the number of calls. Upstream's all-gather and
reduce-scatter need NVLink multicast, and are left out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import math
import random
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from benchmarks import timing
from pallas_gpu.ops import collectives

AXIS = "d"
SIZES = (*(4096 * 16**i for i in range(4)), 1 << 28)  # 4 KiB to 256 MiB
Function = Callable[..., jax.Array]
# GB/s each way of the 18 links of an H100 or H200, NVIDIA's data sheet.
LINK = 450.0

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
EXPERTS, CHOICES, TOKENS, WIDTH = 64, 8, 128, 7168
ROUNDS = 8
# The wait of the device: a thread sleeps so often for up to 20 µs.
SLEEPS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    names = [*COLLECTIVES, "products", "experts"]
    parser.add_argument("--only", nargs="*", default=names)
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES)
    options = parser.parse_args()
    devices = jax.devices()
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((len(devices),), (AXIS,), axis_types=auto)
    tables: dict[str, list[dict[str, Any]]] = {"Collectives": [], "Products": []}
    for title, label, work in _work(mesh, options.only, options.sizes):
        try:
            tables[title].append(row := {**label, **work()})
            print(row, flush=True)
        except Exception:
            traceback.print_exc(limit=-4)
    notes = f"{len(devices)} devices; µs of a call, device / host"
    for title, rows in tables.items():
        if rows:
            timing.report(title, rows, notes, options.json)


def _work(mesh: Any, only: Sequence[str], sizes: Sequence[int]) -> Any:
    """Yields a table's title, the first columns of a row, and what returns the rest."""
    for size in sizes:
        for name in only:
            if name in COLLECTIVES:
                label = {"collective": name, "bytes": size}
                work = functools.partial(_collective, mesh, name, size)
                yield "Collectives", label, work
    if "experts" in only:
        label = {"product": "dispatch and combine"}
        yield "Products", label, functools.partial(_experts, mesh)
    for name, sizes in PRODUCTS.items() if "products" in only else ():
        for kind in ("gather", "scatter"):
            label = {"product": f"{name}, {kind}"}
            yield "Products", label, functools.partial(_product, mesh, kind, *sizes)


def _collective(mesh: Any, name: str, size: int) -> dict[str, Any]:
    candidates, parts = COLLECTIVES[name]
    # Of an all-gather the size is that of the result.
    own = size // (mesh.size if name == "all_gather" else 1)
    x = _random(mesh, (mesh.size * own // 2,), jax.P(AXIS))
    spec = jax.P(AXIS)
    calls = 24 if size <= 1 << 20 else 8 if size <= 1 << 24 else 3
    row: dict[str, Any] = {}
    for method, times in _measure(mesh, candidates, spec, spec, (x,), calls).items():
        row[method] = times.text
        bandwidth = own * parts(mesh.size) / times.device / 1e3
        row[f"{method}, GB/s"] = bandwidth
        row[f"{method}, of the link"] = bandwidth / LINK
    ours = {m: row.pop(m) for m in ("one_shot", "two_shot") if m in row}
    return {"calls": calls, **row, **ours}


def _product(mesh: Any, kind: str, m: int, k: int, n: int) -> dict[str, Any]:
    shapes, specs, out = {
        "gather": (((m, k), (k, n)), ((AXIS,), (None, AXIS)), (None, AXIS)),
        "scatter": (((m, n), (n, k)), ((None, AXIS), (AXIS,)), (AXIS,)),
    }[kind]
    ins = tuple(jax.P(*s) for s in specs)
    args = tuple(_random(mesh, s, i) for s, i in zip(shapes, ins, strict=True))
    candidates = _product_candidates(kind)
    row: dict[str, Any] = {}
    found = _measure(mesh, candidates, ins, jax.P(*out), args, 2)
    for method, times in found.items():
        row[method] = times.text
        row[f"{method}, TFLOP/s"] = 2 * m * k * n / mesh.size / times.device / 1e6
    return row


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


def _experts(mesh: Any) -> dict[str, Any]:
    """Rows of tokens to experts and back, with the operations of XLA around them."""

    def there_and_back(x: Any, experts: Any, method: str) -> jax.Array:
        options = {"axis_name": AXIS, "method": method}
        sent = collectives.dispatch(x, experts, num_experts=EXPERTS, **options)
        weights = jnp.full(experts.shape, 1 / CHOICES, jnp.float32)
        return collectives.combine(sent.rows, experts, sent.slots, weights, **options)

    spec = jax.P(AXIS)
    tokens = TOKENS * mesh.size
    random = np.random.default_rng(0)
    chosen = [random.permutation(EXPERTS)[:CHOICES] for _ in range(tokens)]
    experts = jax.device_put(np.int32(chosen), jax.NamedSharding(mesh, spec))
    x = _random(mesh, (tokens, WIDTH), spec)
    candidates = {
        m: functools.partial(there_and_back, method=m) for m in ("kernel", "lax")
    }
    found = _measure(mesh, candidates, (spec, spec), spec, (x, experts), 4)
    return {method: times.text for method, times in found.items()}


# --- programs -------------------------------------------------------------------------


class _Times:
    """Microseconds of a call: the device's, and the host's."""

    def __init__(self) -> None:
        self.devices: list[float] = []
        self.hosts: list[float] = []

    @property
    def device(self) -> float:
        return statistics.median(self.devices)

    @property
    def text(self) -> str:
        return f"{self.device:.1f} / {statistics.median(self.hosts):.1f}"


def _stamp(sleeps: Any, out: Any) -> None:
    @plgpu.loop(0, sleeps[0])
    def _(_: Any) -> None:
        plgpu.delay(10_000)

    clock = "mov.u32 $0, %globaltimer_lo;"
    out[0] = plgpu.inline_ptx(clock, dtype=jnp.int32, pure=False)


_clock = plgpu.kernel(
    _stamp, out_type=jax.ShapeDtypeStruct((1,), jnp.int32), kernel_name="clock"
)


def _program(mesh: Any, f: Function, ins: Any, out: Any, calls: int) -> Any:
    """Returns a function of the sleeps and the operands: times, and all results."""

    def run(sleeps: Any, x: Any, *others: Any) -> Any:
        start = _clock(sleeps)
        start, x = lax.optimization_barrier((start, x))
        results = []
        for _ in range(calls):
            # All results are used: without a use a call would be left out.
            x, y = lax.optimization_barrier((x, f(x, *others)))
            results.append(y)
        none, *results = lax.optimization_barrier((jnp.zeros_like(sleeps), *results))
        return _clock(none) - start, results

    ins = ins if isinstance(ins, tuple) else (ins,)
    return jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(jax.P(), *ins),
            out_specs=(jax.P(AXIS), out),
            check_vma=False,
        )
    )


def _measure(
    mesh: Any,
    candidates: Mapping[str, Function],
    ins: Any,
    out: Any,
    args: Any,
    calls: int,
) -> dict[str, _Times]:
    """Returns the times of each candidate that compiles, and says which are wrong."""
    waits = [
        jax.device_put(np.int32([s]), jax.NamedSharding(mesh, jax.P()))
        for s in (SLEEPS, 0)
    ]
    programs: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for method, f in candidates.items():
            try:
                lowered = _program(mesh, f, ins, out, calls).lower(waits[0], *args)
                programs[method] = pool.submit(lowered.compile)
            except Exception as error:
                _say(method, error)
    expected = None
    for method in ["lax", *(m for m in [*programs] if m != "lax")]:
        try:
            programs[method] = programs[method].result()
            _, results = programs[method](waits[1], *args)
            got = _sample(results[-1])
            expected = got if expected is None else expected
            error = np.abs(got - expected).max() / max(1.0, np.abs(expected).max())
            if not error < 0.02:
                print(f"{method}: WRONG, relative error {error}", flush=True)
        except Exception as error:
            _say(method, error)
            programs.pop(method, None)
    found = {method: _Times() for method in candidates if method in programs}
    for _ in range(ROUNDS):
        for method in random.sample([*found], len(found)):
            times, program = found[method], programs[method]
            taken, results = program(waits[0], *args)
            del results
            times.devices.append(np.asarray(taken).max() / 1e3 / calls)
            start = time.perf_counter()
            jax.block_until_ready(program(waits[1], *args))
            times.hosts.append((time.perf_counter() - start) / calls * 1e6)
    return found


def _say(method: str, error: Exception) -> None:
    print(f"{method}: {type(error).__name__}: {str(error)[:400]}", flush=True)


def _sample(y: jax.Array) -> np.ndarray:
    """Returns some elements of the last device's part."""
    part = np.asarray(y.addressable_shards[-1].data).reshape(-1)
    return part[:: max(1, part.size >> 16)].astype(np.float32)


def _random(mesh: Any, shape: tuple[int, ...], spec: Any) -> jax.Array:
    place = jax.NamedSharding(mesh, spec)
    scale = 1 / math.sqrt(shape[-1]) if len(shape) > 1 else 1.0

    def make() -> jax.Array:
        x = jax.random.normal(jax.random.key(len(shape)), shape, jnp.bfloat16)
        return (x * scale).astype(jnp.bfloat16)

    return jax.jit(make, out_shardings=place)()


if __name__ == "__main__":
    main()
