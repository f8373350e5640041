# SPDX-License-Identifier: Apache-2.0
"""Where the time of a fused product goes, and that of small calls."""

import functools
import traceback

import jax
import numpy as np
from jax import lax

from benchmarks import collectives as b
from benchmarks import timing
from pallas_gpu.ops import matmul
from pallas_gpu.ops.collectives import exchange, fused
from pallas_gpu.ops.gemm.config import MatmulConfig
from pallas_gpu.ops.rules import clear_cache


def main():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), (b.AXIS,), axis_types=auto)
    for look in (flagged, small, blocks):
        try:
            look(mesh)
        except Exception:
            traceback.print_exc(limit=-3)
    m, k, n = 16384, 4096, 14336
    ins = (jax.P(b.AXIS), jax.P(None, b.AXIS))
    args = b._random(mesh, (m, k), ins[0]), b._random(mesh, (k, n), ins[1])
    kernel = functools.partial(b.collectives.all_gather_matmul, axis_name=b.AXIS)
    found = b._product_candidates("gather")
    del found["separate"]
    for name, c in {
        "64x256 m": dict(tile_m=64, tile_n=256, cluster="m"),
        "64x256 m, strip 16": dict(tile_m=64, tile_n=256, cluster="m", strip=16),
        "128x128 n": dict(tile_m=128, tile_n=128, cluster="n"),
        "128x128 m": dict(tile_m=128, tile_n=128, cluster="m"),
    }.items():
        config = MatmulConfig(epilogue_m=64, epilogue_n=32, stages=4, **c)
        found[name] = functools.partial(kernel, method="kernel", config=config)

    def product(x, w):
        return matmul(lax.concatenate([x] * mesh.size, 0), w)

    def unsent(x, w):
        clear_cache()
        part = fused._send_part
        fused._send_part = lambda *_: None
        try:
            return kernel(
                x,
                w,
                method="kernel",
                config=MatmulConfig(
                    tile_m=64,
                    tile_n=256,
                    cluster="m",
                    epilogue_m=64,
                    epilogue_n=32,
                    stages=4,
                    strip=9,
                ),
            )
        finally:
            fused._send_part = part

    found |= {"the product alone": product, "nothing sent": unsent}
    times = b._measure(mesh, found, ins, jax.P(None, b.AXIS), args, 2)
    print({name: t.text for name, t in times.items()}, flush=True)


def flagged(mesh):
    """Elements with flags, and devices that meet, by size."""
    spec = jax.P(b.AXIS)
    exchange._FLAGGED_BYTES = 1 << 18
    for name, how in (("all_gather", "kernel"), ("all_reduce", "one_shot")):
        for size in (1 << 12, 1 << 16, 1 << 18):
            own = size // (mesh.size if name == "all_gather" else 1)
            x = b._random(mesh, (mesh.size * own // 2,), spec)
            f = functools.partial(getattr(b.collectives, name), axis_name=b.AXIS)
            found = {
                "lax": functools.partial(f, method="lax"),
                "flags": functools.partial(f, method=how),
                "meet": functools.partial(f, method=how, num_blocks=132),
                "meet, 32": functools.partial(f, method=how, num_blocks=32),
            }
            times = b._measure(mesh, found, spec, spec, (x,), 24)
            print(name, size, {m: t.text for m, t in times.items()}, flush=True)
    exchange._FLAGGED_BYTES = 1 << 16
    clear_cache()


def blocks(mesh):
    """Numbers of CTAs for large arrays, and of threads' vectors."""
    spec = jax.P(b.AXIS)
    for name, how in (
        ("all_gather", "kernel"),
        ("all_reduce", "two_shot"),
        ("reduce_scatter", "kernel"),
        ("all_to_all", "kernel"),
    ):
        candidates, _ = b.COLLECTIVES[name]
        own = (1 << 28) // (mesh.size if name == "all_gather" else 1)
        x = b._random(mesh, (mesh.size * own // 2,), spec)
        found = {"lax": candidates["lax"]}
        for count in (64, 132, 264, 528):
            f = getattr(b.collectives, name)
            if name == "all_to_all":
                f = functools.partial(f, split_axis=0, concat_axis=0)
            found[str(count)] = functools.partial(
                f, axis_name=b.AXIS, method=how, num_blocks=count
            )
        times = b._measure(mesh, found, spec, spec, (x,), 3)
        print(name, {m: t.text for m, t in times.items()}, flush=True)


def small(mesh):
    for name in ("all_gather", "all_reduce"):
        candidates, _ = b.COLLECTIVES[name]
        x = b._random(mesh, (1 << 15,), jax.P(b.AXIS))
        spec = jax.P(b.AXIS)
        for method in candidates:
            program = b._program(mesh, candidates[method], spec, spec, 6)
            wait = jax.device_put(np.int32([200]), jax.NamedSharding(mesh, jax.P()))
            jax.block_until_ready(program(wait, x))
            import pallas_gpu as plgpu

            times = plgpu.testing.kernel_times(lambda: program(wait, x))
            print(
                name,
                method,
                [(n[:26], round(t * 1e3, 1)) for n, t in times],
                flush=True,
            )
    candidates, _ = b.COLLECTIVES["all_gather"]
    for flags in (None, {"xla_gpu_enable_command_buffer": ""}):
        options = {} if flags is None else {"compiler_options": flags}
        programs = {}
        for method, f in candidates.items():
            program = (
                b._program(mesh, f, spec, spec, 24).lower(wait, x).compile(**options)
            )
            none = jax.device_put(np.int32([0]), jax.NamedSharding(mesh, jax.P()))
            programs[method] = lambda p=program: jax.block_until_ready(p(none, x))
        print(
            flags,
            {
                m: t / 24 * 1e6
                for m, t in timing.interleaved(programs, rounds=10).items()
            },
            flush=True,
        )


if __name__ == "__main__":
    main()
