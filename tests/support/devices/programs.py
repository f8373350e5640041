# SPDX-License-Identifier: Apache-2.0
"""Small kernels that reach the memory of other devices, and what they compute.

`python -m tests.support.devices.programs` runs each of them, under both semantics, on
all devices that JAX has, and prints what has come of it: devices of the CPU
(XLA_FLAGS=--xla_force_host_platform_device_count=4) run them in the emulator, GPUs the
compiled code.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from tests.support.devices.checks import run

F32, I32 = jnp.float32, jnp.int32
REGULAR = plgpu.SemaphoreType.REGULAR
ROWS, COLUMNS = 16, 128
SHAPE = (ROWS, COLUMNS)
TILE = plgpu.SMEM(SHAPE, F32)
LOGICAL = plgpu.DeviceIdType.LOGICAL


def me() -> Any:
    return lax.axis_index("x")


def count() -> int:
    return lax.axis_size("x")


def neighbour(distance: int = 1) -> Any:
    return lax.rem(me() + distance, I32(count()))


def meet(semaphore: Any) -> None:
    """Waits for all devices, which have a semaphore for each meeting."""
    signals = (
        plgpu.SemaphoreSignal(semaphore, device_id=device) for device in range(count())
    )
    plgpu.semaphore_signal_parallel(*signals)
    plgpu.semaphore_wait(semaphore, count())


# --- bodies ---------------------------------------------------------------------------


def put(x, o, sem):
    """A store by threads to the next device, and its signal."""
    plgpu.remote_ref(o, neighbour())[...] = x[...]
    plgpu.semaphore_signal(sem, device_id=neighbour())
    plgpu.semaphore_wait(sem)


def get(x, o, sem):
    """A load by threads from the next device."""
    o[...] = plgpu.remote_ref(x, {"x": neighbour()})[...]
    meet(sem)


def put_indexed(x, o, sem):
    """A store with an index for each element, and a mask."""
    rows = ROWS - 1 - jnp.arange(ROWS)
    peer = plgpu.remote_ref(o, neighbour())
    values = x[...]
    plgpu.store(peer, rows, values, mask=values == values)
    meet(sem)


def pull_tiles(x, o, tile, bar, sem):
    """TMA loads from each device in turn: the id is a loop's counter."""

    @plgpu.loop(0, count())
    def _(i):
        device = lax.rem(me() + i, I32(count()))
        plgpu.copy_gmem_to_smem(plgpu.remote_ref(x, device), tile, bar)
        plgpu.barrier_wait(bar)
        plgpu.copy_smem_to_gmem(tile, o.at[device])
        plgpu.wait_smem_to_gmem(0)

    meet(sem)


def push_tiles(x, o, tile, bar, sem):
    """TMA stores to each device: ids that are known, in an unrolled loop."""
    plgpu.copy_gmem_to_smem(x, tile, bar)
    plgpu.barrier_wait(bar)
    for device in range(count()):
        target = plgpu.remote_ref(o, device, LOGICAL)
        plgpu.copy_smem_to_gmem(tile, target.at[me()])
    plgpu.wait_smem_to_gmem(0)
    meet(sem)


def add_tiles(x, o, tile, bar, start, end):
    """TMA reductions to the next device, behind what that has stored."""
    o[...] = x[...]
    plgpu.commit_gmem()
    meet(start)
    plgpu.copy_gmem_to_smem(x, tile, bar)
    plgpu.barrier_wait(bar)
    target = plgpu.remote_ref(o, neighbour())
    plgpu.copy_smem_to_gmem(tile, target, reduction_op="add")
    plgpu.wait_smem_to_gmem(0)
    meet(end)


def add_atomically(x, o, start, end):
    """Atomic additions of all devices to the results of all."""
    o[...] = jnp.zeros(SHAPE, F32)
    meet(start)
    values = x[...]
    for device in range(count()):
        plgpu.atomic_add(plgpu.remote_ref(o, device), values)
    meet(end)


def copy_by_threads(x, o, tile, bar, sem):
    """What TMA cannot address: a part that starts at an odd column."""
    peer = plgpu.remote_ref(x, neighbour())
    plgpu.copy_gmem_to_smem(peer.at[:, 1:65], tile.at[:, 0:64], bar)
    plgpu.barrier_wait(bar)
    o[:, 0:64] = tile[:, 0:64]
    o[:, 64:] = x[:, 64:]
    meet(sem)


def through_scratch(x, o, room, start, end):
    """Scratch of the kernel in GMEM has other devices' scratch as peers."""
    room[...] = x[...]
    meet(start)
    o[...] = plgpu.remote_ref(room, neighbour())[...]
    meet(end)


def ranks(x, o, *_):
    """The positions of the device, in a kernel that reaches others."""
    here = plgpu.remote_ref(x, me())
    o[...] = here[...] * 0 + me().astype(F32) + 10.0 * count()


def by_warps(x, o, tile, bar, sem):
    """A warp copies and signals, another one waits."""
    plgpu.copy_gmem_to_smem(x, tile, bar)
    plgpu.barrier_wait(bar)

    @plgpu.warp_map
    def _(warp):
        @plgpu.when(warp == 1)
        def _():
            plgpu.copy_smem_to_gmem(tile, plgpu.remote_ref(o, neighbour()))
            plgpu.wait_smem_to_gmem(0)
            plgpu.semaphore_signal(sem, device_id=neighbour())

        @plgpu.when(warp == 2)
        def _():
            plgpu.semaphore_wait(sem)


def through_a_pipeline(x, o, sem):
    """The blocks of a pipeline come from the next device."""

    def double(_, a, b):
        b[...] = 2 * a[...]

    spec = plgpu.BlockSpec((8, COLUMNS), lambda i: (i, 0))
    pipeline = plgpu.emit_pipeline(
        double, grid=(2,), in_specs=[spec], out_specs=[spec], max_concurrent_steps=2
    )
    pipeline(plgpu.remote_ref(x, neighbour()), o)
    meet(sem)


def reshaped(x, o, sem):
    """A view of the next device's array."""
    o[...] = plgpu.remote_ref(x, neighbour()).T.reshape(SHAPE)[...]
    meet(sem)


def in_branches(x, o, sem):
    """Each device computes another one's id."""

    @plgpu.when(me() > 0)
    def _():
        plgpu.remote_ref(o, me() - 1)[...] = x[...]

    @plgpu.when(me() == 0)
    def _():
        plgpu.remote_ref(o, count() - 1)[...] = x[...]

    meet(sem)


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel and its reference.

    Attributes:
      body: of the kernel.
      scratch: what it declares.
      expected: maps what all devices have, (devices, *SHAPE), to their results.
      gathers: whether the result of a device is as large as the operands of all.
    """

    body: Callable[..., None]
    scratch: Sequence[Any]
    expected: Callable[[np.ndarray], np.ndarray]
    gathers: bool = False


def _shifted(xs: np.ndarray) -> np.ndarray:
    return np.roll(xs, 1, axis=0)


def _fetched(xs: np.ndarray) -> np.ndarray:
    return np.roll(xs, -1, axis=0)


def _everything(xs: np.ndarray) -> np.ndarray:
    return np.stack([xs] * len(xs))


COPY = (TILE, plgpu.Barrier())
PROGRAMS = {
    "put": Program(put, (REGULAR,), _shifted),
    "get": Program(get, (REGULAR,), _fetched),
    "put_indexed": Program(put_indexed, (REGULAR,), lambda xs: _shifted(xs)[:, ::-1]),
    "pull_tiles": Program(pull_tiles, (*COPY, REGULAR), _everything, True),
    "push_tiles": Program(push_tiles, (*COPY, REGULAR), _everything, True),
    "add_tiles": Program(
        add_tiles, (*COPY, REGULAR, REGULAR), lambda xs: xs + _shifted(xs)
    ),
    "add_atomically": Program(
        add_atomically, (REGULAR, REGULAR), lambda xs: xs * 0 + xs.sum(axis=0)
    ),
    "copy_by_threads": Program(
        copy_by_threads,
        (*COPY, REGULAR),
        lambda xs: np.concatenate([_fetched(xs)[..., 1:65], xs[..., 64:]], axis=-1),
    ),
    "through_scratch": Program(
        through_scratch,
        (plgpu.GMEM(SHAPE, F32), REGULAR, REGULAR),
        _fetched,
    ),
    "by_warps": Program(by_warps, (*COPY, REGULAR), _shifted),
    "through_a_pipeline": Program(
        through_a_pipeline, (REGULAR,), lambda xs: 2 * _fetched(xs)
    ),
    "reshaped": Program(
        reshaped,
        (REGULAR,),
        lambda xs: _fetched(xs).transpose(0, 2, 1).reshape(xs.shape),
    ),
    "in_branches": Program(in_branches, (REGULAR,), _fetched),
    "ranks": Program(
        ranks,
        (),
        lambda xs: xs * 0 + np.arange(len(xs))[:, None, None] + 10.0 * len(xs),
    ),
}


def kernel(
    program: Program, devices: int, semantics: Any, **options: Any
) -> Callable[..., Any]:
    """Returns the kernel of a program, for a call under `jax.shard_map`."""
    shape = (devices, *SHAPE) if program.gathers else SHAPE
    return plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct(shape, F32),
        scratch_types=program.scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
        **options,
    )


def sharded(
    program: Program, mesh: Any, semantics: Any, **options: Any
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function of what all devices have, (devices, *SHAPE)."""
    local = kernel(program, mesh.size, semantics, **options)
    return jax.shard_map(
        lambda xs: local(xs[0])[None],
        mesh=mesh,
        in_specs=jax.P("x"),
        out_specs=jax.P("x"),
        check_vma=False,
    )


def operands(devices: int) -> np.ndarray:
    """Whole numbers, of which the sums are exact in any order."""
    rng = np.random.default_rng(devices)
    return rng.integers(-64, 64, (devices, *SHAPE)).astype(np.float32)


def check(name: str, semantics: Any, **options: Any) -> None:
    """Runs a program on all devices of the default backend."""
    devices = jax.device_count()
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("x",), axis_types=auto)
    program, xs = PROGRAMS[name], operands(devices)
    call = jax.jit(sharded(program, mesh, semantics, **options))
    placed = jax.device_put(xs, jax.NamedSharding(mesh, jax.P("x")))
    for _ in range(2):
        np.testing.assert_array_equal(call(placed), program.expected(xs))


def main() -> int:
    return run(
        {
            f"{semantics.name} {name}": functools.partial(check, name, semantics)
            for semantics in plgpu.LoweringSemantics
            for name in PROGRAMS
        }
    )


if __name__ == "__main__":
    sys.exit(main())
