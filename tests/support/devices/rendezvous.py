# SPDX-License-Identifier: Apache-2.0
"""Kernels on eight CPU devices of another process, whose callbacks meet.

`python -m tests.support.devices.rendezvous` runs each check and prints what has come of
all of them as JSON: an empty text, or a traceback.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.emulator import rendezvous
from tests.support.devices import programs

CHECKS: dict[str, Callable[[], None]] = {}
RNG = np.random.default_rng(0)
REGULAR = plgpu.SemaphoreType.REGULAR


def check(test: Callable[[], None]) -> Callable[[], None]:
    CHECKS[test.__name__] = test
    return test


def mesh_of(devices: Any = 4, names: str = "x") -> Any:
    each = np.array(jax.devices()[:devices]) if isinstance(devices, int) else devices
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.Mesh(each, tuple(names), axis_types=auto)


def shift(distance: int = 1, rows: int = 1, **options: Any) -> Callable[..., Any]:
    """A kernel that stores its rows to a device on the right, on one axis or two."""

    def body(x, o, sem):
        peer = programs.neighbour(distance)
        plgpu.remote_ref(o, {"x": peer})[...] = x[...]
        plgpu.semaphore_signal(sem, device_id={"x": peer})
        plgpu.semaphore_wait(sem)

    out = jax.ShapeDtypeStruct((rows, 128), jnp.float32)
    return plgpu.kernel(body, out_type=out, scratch_types=[REGULAR], **options)


def numbers(devices: int = 4, rows: int = 1) -> np.ndarray:
    return RNG.random((devices * rows, 128), np.float32)


def sharded(f: Callable[..., Any], mesh: Any = None, **options: Any) -> Any:
    mesh = mesh_of() if mesh is None else mesh
    spec = jax.P(mesh.axis_names)
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, **options)


def equal(f: Callable[..., Any], x: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(f(x), expected)


@check
def two_four_and_eight_devices() -> None:
    for count in (2, 4, 8):
        x = numbers(count)
        f = sharded(shift(), mesh_of(count))
        equal(jax.jit(f), x, np.roll(x, 1, 0))
        equal(f, x, np.roll(x, 1, 0))


@check
def a_mesh_of_two_axes() -> None:
    x = numbers(8)
    devices = np.array(jax.devices()).reshape(2, 4)
    # Of each row of the mesh, devices with the same position on "y" are neighbours.
    expected = np.roll(x.reshape(2, 4, 128), 1, 0).reshape(8, 128)
    equal(jax.jit(sharded(shift(), mesh_of(devices, "xy"))), x, expected)


@check
def devices_in_another_order() -> None:
    devices = np.array(jax.devices()[:4])[[2, 0, 3, 1]]
    x = numbers()
    with pytest.raises(
        plgpu.errors.UnsupportedError, match="devices in row-major order"
    ):
        jax.jit(sharded(shift(), mesh_of(devices)))(x)


@check
def every_step_of_a_scan() -> None:
    kernel, x = shift(), numbers()

    def steps(x):
        return lax.scan(lambda c, _: (kernel(c), None), x, length=5)[0]

    equal(jax.jit(sharded(steps)), x, np.roll(x, 5, 0))


@check
def several_kernels() -> None:
    one, two, x = shift(1), shift(2), numbers()

    def f(x):
        return one(two(x)) + 2 * two(x) + one(x)

    expected = np.roll(x, 3, 0) + 2 * np.roll(x, 2, 0) + np.roll(x, 1, 0)
    np.testing.assert_allclose(jax.jit(sharded(f))(x), expected, rtol=1e-6)


@check
def a_batch() -> None:
    x = np.stack([numbers(), numbers()], axis=1)
    equal(jax.jit(sharded(jax.vmap(shift(), in_axes=1, out_axes=1))),
          x, np.roll(x, 1, 0))  # fmt: skip


@check
def large_arrays() -> None:
    x = numbers(rows=8192)
    expected = np.roll(x.reshape(4, -1, 128), 1, 0).reshape(x.shape)
    equal(jax.jit(sharded(shift(rows=8192))), x, expected)


@check
def calls_that_nobody_waits_for() -> None:
    f, xs = jax.jit(sharded(shift())), [numbers() for _ in range(20)]
    for x, y in zip(xs, [f(x) for x in xs], strict=True):
        np.testing.assert_array_equal(y, np.roll(x, 1, 0))


@check
def calls_from_several_threads() -> None:
    f, xs = jax.jit(sharded(shift())), [numbers() for _ in range(4)]
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: np.asarray(f(xs[i]))}))
        for i in range(len(xs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(xs):
        np.testing.assert_array_equal(found[i], np.roll(x, 1, 0))


@check
def beside_a_kernel_of_one_device_and_a_collective() -> None:
    double = plgpu.kernel(
        lambda x, o: o.set(2 * x[...]),
        out_type=jax.ShapeDtypeStruct((1, 128), "float32"),
    )
    kernel, x = shift(), numbers()

    def f(x):
        return kernel(double(x)) + lax.psum(x, "x")

    expected = 2 * np.roll(x, 1, 0) + x.sum(0)
    np.testing.assert_allclose(jax.jit(sharded(f))(x), expected, rtol=1e-5)


@check
def every_program_in_several_schedules() -> None:
    mesh = mesh_of(8)
    xs = programs.operands(8)
    interpret = plgpu.InterpretParams(schedules=2)
    semantics = plgpu.LoweringSemantics.Lane
    for name, program in programs.PROGRAMS.items():
        f = programs.sharded(program, mesh, semantics, interpret=interpret)
        np.testing.assert_array_equal(jax.jit(f)(xs), program.expected(xs), name)


@check
def an_error_reaches_the_caller_with_its_line() -> None:
    def body(x, o, sem):
        plgpu.semaphore_signal(sem, device_id=programs.neighbour())
        plgpu.semaphore_wait(sem, 2)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((1, 128), "float32"),
        scratch_types=[REGULAR],
    )
    x = numbers()
    for f in (jax.jit(sharded(kernel)), sharded(kernel)):
        with pytest.raises(Exception, match=r"rendezvous.py:\d+ .*\n.*semaphore_wait"):
            jax.block_until_ready(f(x))
    # The devices meet again afterwards.
    equal(jax.jit(sharded(shift())), x, np.roll(x, 1, 0))


@check
def a_device_that_does_not_come_is_an_error() -> None:
    kernel, x = shift(), numbers()

    def f(x):
        return lax.cond(lax.axis_index("x") == 2, lambda x: 2 * x, kernel, x)

    before, rendezvous.PATIENCE_S = rendezvous.PATIENCE_S, 1.0
    try:
        with pytest.raises(
            Exception, match=r"launches on \[0, 1, 3\] and none on \[2\]"
        ):
            jax.block_until_ready(jax.jit(sharded(f, check_vma=False))(x))
    finally:
        rendezvous.PATIENCE_S = before
    equal(jax.jit(sharded(kernel)), x, np.roll(x, 1, 0))


@check
def a_check_of_all_schedules() -> None:
    kernel = sharded(shift())
    verdict = plgpu.check(jax.jit(kernel), orders=3)(numbers())
    assert not verdict.findings


def main() -> None:
    found = {}
    for name, test in CHECKS.items():
        try:
            test()
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()[-3000:]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
