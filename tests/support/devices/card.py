# SPDX-License-Identifier: Apache-2.0
"""What only GPUs can tell: `python -m tests.support.devices.card` on two or more.

Kernels of several devices in loops, on meshes of two axes, from inline code; and how
long signals and copies to other devices take. NVLink multicast is not used.
"""

from __future__ import annotations

import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import mosaic
from tests.support.devices import programs
from tests.support.devices.checks import run

F32 = jnp.float32
REGULAR = plgpu.SemaphoreType.REGULAR


def mesh(sizes=None):
    sizes = (jax.device_count(),) if sizes is None else sizes
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=auto)


def over(mesh, local):
    spec = jax.P(mesh.axis_names)
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


def placed(mesh, x):
    return jax.device_put(x, jax.NamedSharding(mesh, jax.P(mesh.axis_names)))


def in_a_scan():
    """Kernels one after the other, with a collective of XLA between them."""
    n = jax.device_count()
    kernel = programs.kernel(programs.PROGRAMS["put"], n, plgpu.LoweringSemantics.Lane)

    def local(x):
        def step(carry, _):
            moved = kernel(carry)
            return moved + lax.psum(jnp.max(moved), "x") * 0, None

        return lax.scan(step, x[0], None, length=50)[0][None]

    xs = programs.operands(n)
    out = over(mesh(), local)(placed(mesh(), xs))
    np.testing.assert_array_equal(out, np.roll(xs, 50, axis=0))


def when_one_device_moves():
    """Addresses change on one device while XLA replays what others have recorded."""
    n, (first, *_) = jax.device_count(), jax.devices()
    semantics = plgpu.LoweringSemantics.Warpgroup
    xs = programs.operands(n)
    for name in ("put", "push_tiles", "pull_tiles"):
        program = programs.PROGRAMS[name]
        local = programs.kernel(program, n, semantics)

        def in_a_loop(x, local=local):
            def step(x, _):
                return x + 1, local(x)

            return lax.scan(step, x[0], None, length=4)[1][None]

        f, held = over(mesh(), in_a_loop), []
        for i in range(24):
            steps = [program.expected(xs + i + j) for j in range(4)]
            found = np.asarray(f(placed(mesh(), xs + i)))
            np.testing.assert_array_equal(found, np.stack(steps, axis=1))
            if i >= 4:
                held.append(jax.device_put(np.zeros(1 << 12 + i % 8, F32), first))


def on_two_axes():
    def body(x, o, sem):
        last = lax.axis_size("y") - 1
        device = {"x": lax.axis_size("x") - 1 - lax.axis_index("x")}
        device["y"] = last - lax.axis_index("y")
        plgpu.remote_ref(o, device)[...] = x[...] + lax.axis_index("y").astype(F32)
        plgpu.semaphore_signal(sem, device_id=device)
        plgpu.semaphore_wait(sem)

    n = jax.device_count()
    xs = programs.operands(n)
    for sizes in ((n, 1), (1, n)):
        kernel = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(programs.SHAPE, F32),
            scratch_types=[REGULAR],
        )
        out = over(mesh(sizes), lambda x, k=kernel: k(x[0])[None])(
            placed(mesh(sizes), xs)
        )
        place = np.arange(n).reshape(sizes)
        y = (place % sizes[1]).reshape(n, 1, 1)
        np.testing.assert_array_equal(out, (xs + y)[::-1])


def on_an_abstract_mesh():
    """The devices are those of the operand; also of a program that is exported."""
    program, xs = programs.PROGRAMS["push_tiles"], programs.operands(jax.device_count())
    semantics = plgpu.LoweringSemantics.Warpgroup
    f = jax.jit(programs.sharded(program, mesh().abstract_mesh, semantics))
    x = placed(mesh(), xs)
    np.testing.assert_array_equal(f(x), program.expected(xs))
    exported = jax.export.export(
        jax.jit(programs.sharded(program, mesh(), semantics)), platforms=["cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")],
    )(x)  # fmt: skip
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(jax.jit(again.call)(x), program.expected(xs))


def in_another_order():
    """A mesh whose devices are in another order than its positions is refused."""
    reverse = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("x",))
    program = programs.PROGRAMS["put"]
    local = programs.kernel(program, reverse.size, plgpu.LoweringSemantics.Lane)
    try:
        over(reverse, lambda x: local(x[0])[None])(
            placed(reverse, programs.operands(reverse.size))
        )
    except plgpu.errors.UnsupportedError:
        return
    raise AssertionError("the mesh is accepted")


def from_inline_code():
    layout = mosaic.WGStridedFragLayout(programs.SHAPE, 4)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
    def store(ctx, peer, x, o):
        array = mosaic.FragmentedArray.load_untiled(peer, layout=layout)
        target = ctx.to_remote(o, ctx.device_id())
        array.store_untiled(target, optimized=False)

    def body(x, o, sem):
        store(plgpu.remote_ref(x, programs.neighbour()), x, o)
        programs.meet(sem)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(programs.SHAPE, F32),
        scratch_types=[REGULAR],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    xs = programs.operands(jax.device_count())
    out = over(mesh(), lambda x: kernel(x[0])[None])(placed(mesh(), xs))
    np.testing.assert_array_equal(out, np.roll(xs, -1, axis=0))


def signals():
    """µs for a signal to the next device and back."""
    turns = 1000

    def body(x, o, sem):
        o[...] = x[...]

        @plgpu.loop(0, turns)
        def _(_):
            plgpu.semaphore_signal(sem, device_id=programs.neighbour())
            plgpu.semaphore_wait(sem)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(programs.SHAPE, F32),
        scratch_types=[REGULAR],
    )
    xs = placed(mesh(), programs.operands(jax.device_count()))
    return timed(over(mesh(), lambda x: kernel(x[0])[None]), xs) / turns, "us a signal"


def timed(f, x):
    f(x).block_until_ready()
    best = min(_once(f, x) for _ in range(5))
    return best * 1e6


def _once(f, x):
    start = time.perf_counter()
    f(x).block_until_ready()
    return time.perf_counter() - start


TILE_ROWS, ROW, CTAS, TILES = 64, 256, 132, 32


def _tiles(move):
    """GB/s to the next device, of 132 CTAs and 32 tiles of 64 KiB each."""

    def body(x, o, tile, bar, sem):
        cta = lax.axis_index("cta")

        @plgpu.loop(0, TILES)
        def _(i):
            rows = plgpu.ds((cta * TILES + i) * TILE_ROWS, TILE_ROWS)
            move(x.at[rows], o.at[rows], tile, bar)

        plgpu.wait_smem_to_gmem(0)
        programs.meet(sem)

    shape = (CTAS * TILES * TILE_ROWS, ROW)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, F32),
        grid=(CTAS,),
        grid_names=("cta",),
        scratch_types=[plgpu.SMEM((TILE_ROWS, ROW), F32), plgpu.Barrier(), REGULAR],
    )
    n = jax.device_count()
    x = placed(mesh(), np.arange(n * shape[0] * ROW, dtype=np.float32).reshape(-1, ROW))
    f = over(mesh(), kernel)
    expected = np.roll(np.asarray(x).reshape(n, -1), SHIFTS[move], axis=0)
    np.testing.assert_array_equal(np.asarray(f(x)).reshape(n, -1), expected)
    took = timed(f, x)
    return 4 * shape[0] * ROW / took / 1e3, "GB/s"


def push(x, o, tile, bar):
    plgpu.copy_gmem_to_smem(x, tile, bar)
    plgpu.barrier_wait(bar)
    plgpu.copy_smem_to_gmem(tile, plgpu.remote_ref(o, programs.neighbour()))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def pull(x, o, tile, bar):
    plgpu.copy_gmem_to_smem(plgpu.remote_ref(x, programs.neighbour()), tile, bar)
    plgpu.barrier_wait(bar)
    plgpu.copy_smem_to_gmem(tile, o)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def by_threads(x, o, tile, bar):
    plgpu.remote_ref(o, programs.neighbour())[...] = x[...]


SHIFTS = {push: 1, pull: -1, by_threads: 1}
CHECKS = {
    "in a scan": in_a_scan,
    "when one device moves": when_one_device_moves,
    "on two axes": on_two_axes,
    "on an abstract mesh": on_an_abstract_mesh,
    "in another order": in_another_order,
    "from inline code": from_inline_code,
    "signals": signals,
    "TMA stores": functools.partial(_tiles, push),
    "TMA loads": functools.partial(_tiles, pull),
    "stores by threads": functools.partial(_tiles, by_threads),
}


if __name__ == "__main__":
    sys.exit(run(CHECKS))
