# SPDX-License-Identifier: Apache-2.0
"""Collectives equal those of `jax.lax`, on devices that the emulator has."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.ops import collectives
from tests.support.meshes import emulated, mesh, numbers
from tests.support.refusal import refused

# Ours, which takes what all take; and what it equals.
CALLS = {
    "all_gather": (
        collectives.all_gather,
        functools.partial(lax.all_gather, axis=0, tiled=True),
    ),
    "all_gather, second dimension": (
        functools.partial(collectives.all_gather, gather_dimension=-1),
        functools.partial(lax.all_gather, axis=1, tiled=True),
    ),
    "reduce_scatter": (
        collectives.reduce_scatter,
        functools.partial(lax.psum_scatter, scatter_dimension=0, tiled=True),
    ),
    "reduce_scatter, second dimension": (
        functools.partial(collectives.reduce_scatter, scatter_dimension=1),
        functools.partial(lax.psum_scatter, scatter_dimension=1, tiled=True),
    ),
    "all_reduce, one shot": (
        functools.partial(collectives.all_reduce, method="one_shot"), lax.psum,
    ),
    "all_reduce, two shots": (
        functools.partial(collectives.all_reduce, method="two_shot"), lax.psum,
    ),
    "all_to_all": (
        lambda x, axis, **options: collectives.all_to_all(x, axis, 0, 1, **options),
        lambda x, axis: lax.all_to_all(x, axis, 0, 1, tiled=True),
    ),
    "all_to_all, second dimension": (
        lambda x, axis, **options: collectives.all_to_all(x, axis, 1, 1, **options),
        lambda x, axis: lax.all_to_all(x, axis, 1, 1, tiled=True),
    ),
    "rotate": (
        lambda x, axis, **options: collectives.rotate(
            x, axis, distance=-1, **options
        ),
        lambda x, axis: lax.ppermute(
            x, axis, [(i, i - 1) for i in range(1, lax.axis_size(axis))]
            + [(0, lax.axis_size(axis) - 1)],
        ),
    ),
}  # fmt: skip


def check(name, x, axis, mesh, **options):
    ours, theirs = CALLS[name]
    if "method" not in getattr(ours, "keywords", {}):
        options["method"] = "kernel"
    got = emulated(lambda x: ours(x, axis, **options), mesh)(x)
    expected = emulated(lambda x: theirs(x, axis), mesh, check_vma=False)(x)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("name", CALLS)
def test_20_schedules(name, devices):
    x = numbers(devices * devices, 2 * devices)
    interpret = plgpu.InterpretParams(schedules=20)
    check(name, x, "d", mesh(d=devices), interpret=interpret)


@pytest.mark.parametrize("name", CALLS)
def test_20_schedules_of_elements_with_flags(name):
    x = numbers(2048, 4, dtype="bfloat16")
    interpret = plgpu.InterpretParams(schedules=20)
    check(name, x, "d", mesh(d=4), interpret=interpret)


@pytest.mark.parametrize("name", CALLS)
def test_ctas_with_several_tiles(name):
    check(name, numbers(8, 5000), "d", mesh(d=2), num_blocks=2)


EMITTED = [
    ("all_gather", "float32"),
    ("all_reduce, two shots", "float32"),
    ("all_to_all", "bfloat16"),
    ("all_reduce, one shot", "bfloat16"),
]


@pytest.mark.parametrize(("name", "dtype"), EMITTED)
def test_emitted_code(name, dtype):
    interpret = plgpu.InterpretParams(emitted=True)
    x = numbers(8, 2048, dtype=dtype)
    check(name, x, "d", mesh(d=2), interpret=interpret)


@pytest.mark.parametrize("axis", ["x", "y"])
@pytest.mark.parametrize("name", CALLS)
def test_an_axis_of_a_mesh(name, axis):
    check(name, numbers(64, 16), axis, mesh(x=2, y=4))


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")])
@pytest.mark.parametrize("name", CALLS)
def test_axes_of_a_mesh(name, axes):
    """Devices are in the order of the axes, as those of one axis."""
    (ours, theirs), x = CALLS[name], numbers(64, 16)
    specs = {"in_specs": jax.P(axes), "out_specs": jax.P(axes)}
    f = jax.shard_map(lambda x: ours(x, axes), mesh=mesh(x=2, y=4), **specs)
    expected = emulated(lambda x: theirs(x, "d"), mesh(d=8), check_vma=False)(x)
    np.testing.assert_array_equal(plgpu.emulate_mesh(f)(x), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int32", "float8_e4m3fn"])
@pytest.mark.parametrize("name", CALLS)
def test_element_types(name, dtype):
    if dtype.startswith("float8") and "reduce" in name:
        pytest.skip("XLA adds float8 in float8, and the kernel in float32")
    check(name, numbers(8, 6, dtype=dtype), "d", mesh(d=2))


def test_rows_of_whole_tiles_are_not_moved():
    """Where a part of a row is a number of tiles, the array is taken as it is."""
    x = numbers(8, 2, 512)
    for ours, theirs in (
        (
            lambda x: collectives.all_gather(x, "d", gather_dimension=1),
            lambda x: lax.all_gather(x, "d", axis=1, tiled=True),
        ),
        (
            lambda x: collectives.reduce_scatter(x, "d", scatter_dimension=1),
            lambda x: lax.psum_scatter(x, "d", scatter_dimension=1, tiled=True),
        ),
    ):
        got = emulated(ours, mesh(d=2))
        np.testing.assert_array_equal(got(x), emulated(theirs, mesh(d=2))(x))
        assert "transpose" not in str(jax.make_jaxpr(got.__wrapped__)(x))


@pytest.mark.parametrize("reduction", ["min", "max", "and", "or", "xor"])
@pytest.mark.parametrize("method", ["kernel", "lax"])
def test_reductions(reduction, method):
    x = numbers(8, 128, dtype="int32")
    by = {"min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
          "or": np.bitwise_or, "xor": np.bitwise_xor}[reduction]  # fmt: skip
    whole = by.reduce(np.asarray(x).reshape(2, 4, 128))
    shots = ["lax"] if method == "lax" else ["one_shot", "two_shot"]
    for shot in shots:
        total = emulated(
            lambda x, shot=shot: collectives.all_reduce(
                x, "d", reduction=reduction, method=shot
            ),
            mesh(d=2),
        )
        np.testing.assert_array_equal(total(x), np.concatenate([whole, whole]))
    part = emulated(
        lambda x: collectives.reduce_scatter(
            x, "d", reduction=reduction, method=method
        ),
        mesh(d=2),
    )
    np.testing.assert_array_equal(part(x), whole)


@pytest.mark.parametrize("name", CALLS)
def test_derivatives(name):
    """The derivative of a loss of all devices equals that of `jax.lax`."""
    ours, theirs = CALLS[name]
    x, spec = numbers(16, 8), jax.P("d")

    def gradient(f):
        g = jax.shard_map(f, mesh=mesh(d=4), in_specs=spec, out_specs=spec)
        weights = numbers(*jax.eval_shape(g, x).shape)
        return plgpu.emulate_mesh(jax.grad(lambda x: (weights * g(x)).sum()))(x)

    varying = functools.partial(lax.pcast, axis_name="d", to="varying")
    plain = {True: lambda x: varying(theirs(x, "d")), False: lambda x: theirs(x, "d")}
    expected = gradient(plain["all_reduce" in name])
    np.testing.assert_array_equal(gradient(lambda x: ours(x, "d")), expected)


def test_sums_of_narrow_floats_are_rounded_once():
    x = jnp.asarray([256.0, 1.0, 1.0, 1.0]).repeat(1024).astype(jnp.bfloat16)
    f = emulated(lambda x: collectives.all_reduce(x, "d"), mesh(d=4))
    np.testing.assert_array_equal(f(x), np.full(4096, 260.0))


def test_an_operand_that_devices_share():
    """Its derivative is the sum of those of all devices."""
    specs = {"mesh": mesh(d=2), "in_specs": jax.P(), "out_specs": jax.P("d")}
    f = jax.shard_map(lambda x: collectives.all_gather(x, "d"), **specs)
    g = plgpu.emulate_mesh(jax.grad(lambda x: f(x).sum()))
    np.testing.assert_array_equal(g(numbers(8)), np.full(8, 4.0))


# --- where no kernel reaches the devices ----------------------------------------------


def reason(mesh, axis="d", **options):
    found = []

    def look(x):
        found.append(collectives.unreachable(axis))
        return x

    f = jax.shard_map(
        look, mesh=mesh, in_specs=jax.P(axis), out_specs=jax.P(axis), **options
    )
    jax.eval_shape(f, numbers(8))
    return found[0]


def test_reasons(monkeypatch):
    assert reason(mesh(d=2)) is None
    assert reason(mesh(d=1)) == "there is one device"
    left = reason(mesh(d=2, e=2), axis_names={"d"})
    assert left == "jax.shard_map leaves axes of its mesh to the compiler"
    vmapped = []
    jax.vmap(lambda _: vmapped.append(collectives.unreachable("v")), axis_name="v")(
        numbers(2)
    )
    assert vmapped == ["the axis is not one of jax.shard_map"]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert reason(mesh(d=2)) == "the devices are those of several processes"


@pytest.mark.parametrize("name", CALLS)
def test_falls_back_to_lax(name, monkeypatch):
    """Types and values are the same."""
    if "shot" in name:
        pytest.skip("its method is a kernel")
    ours, theirs = CALLS[name]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    x = numbers(16, 8)
    f = emulated(lambda x: ours(x, "d"), mesh(d=4))
    assert "pallas_gpu_kernel" not in str(jax.make_jaxpr(f.__wrapped__)(x))
    np.testing.assert_array_equal(
        f(x), emulated(lambda x: theirs(x, "d"), mesh(d=4))(x)
    )


def test_bools_are_gathered_by_lax():
    f = emulated(lambda x: collectives.all_gather(x, "d"), mesh(d=2))
    np.testing.assert_array_equal(f(jnp.arange(4) > 1), [False, False, True, True] * 2)


ONE, TWO = mesh(d=1), mesh(d=2)
REFUSED = {
    "one device": (ONE, lambda x: collectives.rotate(x, "d", method="kernel")),
    "scattered": (TWO, lambda x: collectives.reduce_scatter(x[:3], "d")),
    "exchanged": (TWO, lambda x: collectives.all_to_all(x, "d", 1, 0)),
    "dimension": (TWO, lambda x: collectives.all_gather(x, "d", gather_dimension=2)),
    "reduction": (TWO, lambda x: collectives.all_reduce(x, "d", reduction="mean")),
    "bits": (TWO, lambda x: collectives.all_reduce(x, "d", reduction="xor")),
    "method": (TWO, lambda x: collectives.all_reduce(x, "d", method="kernel")),
    "axis": (TWO, lambda x: collectives.all_gather(x, "e")),
    "no array": (TWO, lambda x: collectives.all_gather([x], "d")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@refused
def test_a_refused_call(name):
    devices, f = REFUSED[name]
    emulated(f, devices)(numbers(8, 3))
