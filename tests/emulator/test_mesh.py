# SPDX-License-Identifier: Apache-2.0
"""`emulate_mesh`: a `jax.shard_map` over devices that JAX does not have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from tests.support import tiers
from tests.support.devices import programs
from tests.support.devices.rendezvous import shift
from tests.support.mutations.mutant import abstract_mesh
from tests.support.refusal import refused

P = jax.P
X = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)


def on_mesh(f, mesh, spec=None, out=None, **options):
    spec = P(tuple(mesh)) if spec is None else spec
    specs = {"in_specs": spec, "out_specs": spec if out is None else out}
    sharded = jax.shard_map(f, mesh=abstract_mesh(**mesh), **specs, **options)
    return plgpu.emulate_mesh(sharded)


@pytest.mark.parametrize("name", programs.PROGRAMS)
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_programs_of_several_devices(name, devices):
    """In twenty schedules each, in the default tier in four."""
    program, xs = programs.PROGRAMS[name], programs.operands(devices)
    lane = plgpu.LoweringSemantics.Lane
    interpret = plgpu.InterpretParams(schedules=20 if tiers.runs_everything() else 4)
    mesh = abstract_mesh(x=devices)
    f = programs.sharded(program, mesh, lane, interpret=interpret)
    np.testing.assert_array_equal(plgpu.emulate_mesh(f)(xs), program.expected(xs))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
def test_a_kernel_beside_collectives_in_loops(jit, check_vma):
    kernel = shift()

    def f(x):
        def step(total, _):
            return kernel(total) + lax.psum(x, "x"), None

        return lax.scan(step, x, length=2)[0]

    if jit:
        f = jax.jit(f)
    got = on_mesh(f, {"x": 8}, check_vma=check_vma)(X)
    np.testing.assert_array_equal(got, np.roll(X, 2, 0) + 2 * X.sum(0))


def test_arrays_are_divided_on_both_axes_as_the_specs_say():
    def f(x):
        return x + 1000 * lax.axis_index("x") + 100 * lax.axis_index("y")

    mesh = {"x": 2, "y": 4}
    for spec in (P("x", "y"), P("y", "x"), P(("y", "x")), P(None, ("x", "y")), P("y")):
        number = np.zeros(X.shape)
        for axis, names in enumerate(spec):
            names = names if isinstance(names, tuple) else (names,)
            names = tuple(name for name in names if name is not None)
            count = int(np.prod([mesh[name] for name in names]))
            at = np.arange(X.shape[axis]) // (X.shape[axis] // count)
            for name in names[::-1]:
                at, own = np.divmod(at, mesh[name])
                by = (1000 if name == "x" else 100) * own
                number += by[:, None] if axis == 0 else by
        got = on_mesh(f, mesh, spec, check_vma=False)(X)
        np.testing.assert_array_equal(got, X + number, str(spec))


def test_what_devices_share_is_one_array():
    f = on_mesh(lambda x: lax.psum(x, ("x", "y")), {"x": 2, "y": 4}, out=P())
    np.testing.assert_array_equal(f(X), X.sum(0, keepdims=True))


def test_peers_on_one_axis_of_two():
    got = on_mesh(shift(), {"x": 2, "y": 4})(X)
    np.testing.assert_array_equal(got, np.roll(X, 4, 0))


def test_instances_of_vmap_have_memory_of_their_own():
    x = np.stack([X, 2 * X], axis=1)
    f = on_mesh(jax.vmap(shift(), in_axes=1, out_axes=1), {"x": 8})
    np.testing.assert_array_equal(f(x), np.roll(x, 1, 0))


@pytest.mark.parametrize("orders", [3, "all"])
def test_a_check_finds_nothing_in_a_correct_kernel(orders):
    f = on_mesh(shift(), {"x": 2})
    verdict = plgpu.check(f, orders=orders, seconds=5)(X[:2])
    assert not verdict.findings
    assert orders != "all" or verdict.coverage[0].complete


def test_a_check_names_the_device():
    def body(x, o):
        plgpu.remote_ref(o, programs.neighbour())[...] = x[...]  # HERE

    out = jax.ShapeDtypeStruct((1, 128), jnp.float32)
    kernel = plgpu.kernel(body, out_type=out)
    verdict = plgpu.check(on_mesh(kernel, {"x": 2}), orders=3)(X[:2])
    (finding,) = verdict.findings
    assert finding.rule.id == "race-between-ctas"
    assert finding.at.line is not None


@refused
def test_axes_are_not_left_to_the_compiler():
    mesh = abstract_mesh(x=2, y=2)
    f = jax.shard_map(
        lambda x: 2 * x, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    plgpu.emulate_mesh(f)(X)


@pytest.mark.parametrize("semantics", plgpu.LoweringSemantics)
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_the_code_of_programs_of_several_devices(name, semantics):
    program, xs = programs.PROGRAMS[name], programs.operands(2)
    f = programs.sharded(program, abstract_mesh(x=2), semantics, interpret="emitted")
    np.testing.assert_array_equal(plgpu.emulate_mesh(f)(xs), program.expected(xs))


def test_a_check_of_the_code():
    f = on_mesh(shift(), {"x": 2})
    assert not plgpu.check(f, orders=2, emitted=True)(X[:2]).findings
