# SPDX-License-Identifier: Apache-2.0
"""Kernels of several devices as code: instructions, tensor maps, the launch."""

from __future__ import annotations

import dataclasses
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import offline
from pallas_gpu.entry import placement
from pallas_gpu.entry.call import CallParams
from pallas_gpu.runtime import devices as runtime_devices
from pallas_gpu.runtime import register
from pallas_gpu.runtime.devices import check_processes
from tests.support.devices import programs
from tests.support.refusal import refused

F32 = jnp.float32
SEMANTICS = list(plgpu.LoweringSemantics)
X = jax.ShapeDtypeStruct(programs.SHAPE, F32)


def abstract(sizes, names=("x", "y")):
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.AbstractMesh(sizes, names[: len(sizes)], axis_types=auto)


def over(mesh, body, dtype=F32, **options):
    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(X.shape, dtype), **options
    )
    return jax.shard_map(
        kernel, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
    )


def divided(local, devices):
    """Returns a function of an array that the devices divide by rows."""
    rows = jax.P("x")
    return jax.shard_map(
        local, mesh=abstract((devices,)), in_specs=rows, out_specs=rows, check_vma=False
    )


def params_of(function):
    (outer,) = jax.make_jaxpr(function)(X).eqns
    eqns = outer.params["jaxpr"].eqns
    return next(CallParams(**x.params) for x in eqns if "mesh" in x.params)


def ptx(function, *args, target="sm_90a"):
    (report,) = offline.compile(function, *args, target=target)
    return report.ptx


def call_of(function, *args):
    """Returns the custom call as text, without the module."""
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
    lines = lowered.as_text().splitlines()
    (line,) = [x for x in lines if "@mosaic_gpu_v2" in x]
    return re.sub(r'(module|kernel_hash) = "[^"]*"', "", line)


@pytest.mark.offline
@pytest.mark.parametrize("semantics", SEMANTICS, ids=lambda x: x.name)
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_programs_compile_for_any_mesh(name, devices, semantics):
    program = programs.PROGRAMS[name]
    function = programs.sharded(program, abstract((devices,)), semantics)
    assert ptx(function, jax.ShapeDtypeStruct((devices, *X.shape), F32))


@pytest.mark.offline
def test_a_position_divides_the_rank():
    def body(x, o):
        peer = plgpu.remote_ref(x, {"x": 0})
        o[...] = peer[...] + lax.axis_index("y").astype(F32)

    text = ptx(over(abstract((4, 3)), body), X)
    assert "ld.global.nc.b32" in text and "rem" not in text.lower()  # mul, shift, sub


def to_peers(x, o, tile, sem):
    for device in range(lax.axis_size("x")):
        plgpu.copy_smem_to_gmem(tile, plgpu.remote_ref(o, device))
    plgpu.wait_smem_to_gmem(0)
    programs.meet(sem)


def test_tma_has_a_descriptor_for_each_device():
    mesh = abstract((5,))
    scratch = [programs.TILE, plgpu.SemaphoreType.REGULAR]
    (report,) = offline.lower(over(mesh, to_peers, scratch_types=scratch), X)
    # The host encodes the device's own one, from which a block makes those of all.
    assert report.mlir.count("@mosaic_gpu_init_tma_desc") == 1 + 1
    assert report.mlir.count("tensormap.replace") == 1
    assert report.mlir.count("fence.proxy.tensormap::generic.acquire") == 5


def test_more_devices_than_lanes():
    def push(x, o, tile, bar, sem):
        plgpu.copy_gmem_to_smem(x.at[0], tile, bar)
        plgpu.barrier_wait(bar)
        target = plgpu.remote_ref(o, programs.neighbour())
        plgpu.copy_smem_to_gmem(tile, target.at[0])
        plgpu.wait_smem_to_gmem(0)
        plgpu.semaphore_signal(sem, device_id=programs.neighbour())
        plgpu.semaphore_wait(sem)

    row = plgpu.SMEM((4,), F32)
    kernel = plgpu.kernel(
        push,
        out_type=jax.ShapeDtypeStruct((1, 4), F32),
        scratch_types=[row, plgpu.Barrier(), programs.REGULAR],
        interpret="emitted",
    )
    function = divided(kernel, 33)
    x = np.arange(33 * 4, dtype=np.float32).reshape(33, 4)
    expected = np.roll(x, 1, axis=0)
    np.testing.assert_array_equal(plgpu.emulate_mesh(function)(x), expected)


REDUCTIONS = [
    ("add", jnp.int32, "add.s32"),
    ("add", jnp.int64, "add.u64"),
    ("max", jnp.uint32, "max.u32"),
    ("xor", jnp.int64, "xor.b64"),
    ("add", F32, "add.v4.f32"),
    ("min", jnp.float16, "min.v2.f16x2"),
    ("add", jnp.bfloat16, "add.v2.bf16x2"),
    ("max", jnp.float8_e5m2, "max.e5m2x4"),
    ("add", jnp.float8_e4m3fn, "add.e4m3x4"),
]


@pytest.mark.offline
@pytest.mark.parametrize("semantics", SEMANTICS, ids=lambda x: x.name)
@pytest.mark.parametrize("reduction, dtype, expected", REDUCTIONS)
def test_loads_reduce_over_all_devices(reduction, dtype, expected, semantics):
    def body(x, o):
        part = plgpu.multimem_load_reduce(
            x, collective_axes="x", reduction_op=reduction
        )
        plgpu.multimem_store(part, o, "x")

    with jax.enable_x64(True):
        params = plgpu.CompilerParams(lowering_semantics=semantics)
        function = over(abstract((4,)), body, dtype, compiler_params=params)
        narrow = jnp.dtype(dtype).itemsize == 1
        target = "sm_100a" if narrow else "sm_90a"
        text = ptx(function, jax.ShapeDtypeStruct(X.shape, dtype), target=target)
    assert f"multimem.ld_reduce.relaxed.sys.global.{expected} " in text
    assert "multimem.st.relaxed.sys.global" in text


@refused
def test_float8_is_reduced_on_blackwell():
    def body(x, o):
        o[...] = plgpu.multimem_load_reduce(x, collective_axes="x", reduction_op="add")

    e5m2 = jnp.float8_e5m2
    params = plgpu.CompilerParams(target="sm_90a")
    function = over(abstract((4,)), body, e5m2, compiler_params=params)
    jax.eval_shape(function, jax.ShapeDtypeStruct(X.shape, e5m2))


@pytest.mark.offline
def test_a_scalar_of_all_devices():
    def body(x, o):
        total = plgpu.multimem_load_reduce(
            x.at[0, 0], collective_axes="x", reduction_op="add"
        )
        plgpu.multimem_store(total, o.at[1, 1], "x")
        o[...] = jnp.full(X.shape, total)

    text = ptx(over(abstract((4,)), body), X)
    assert "multimem.ld_reduce.relaxed.sys.global.add.f32 " in text
    assert "multimem.st.relaxed.sys.global.f32 " in text


# --- the launch -----------------------------------------------------------------------


def put(x, o, *_):
    plgpu.remote_ref(o, {"x": 0})[...] = x[...]


def put_to_all(x, o, *_):
    plgpu.multimem_store(x[...], o, "x")


LAUNCHES = {
    "no other device": (lambda x, o: o.set(x[...]), {}, ["metadata = false"]),
    "another device": (put, {}, ["metadata = true", 'xla_replica_ids = "0,1"']),
    "no barrier": (
        put,
        {"skip_device_barrier": True},
        ["skip_device_barrier = true"],
    ),
    "all devices": (put_to_all, {}, ['symmetric_memory_parameters = "0,1"']),
    "processes": (
        put,
        {"is_multi_process": True},
        ['symmetric_memory_parameters = "1,1"'],
    ),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_what_xla_is_told(case):
    body, options, expected = LAUNCHES[case]
    params = plgpu.CompilerParams(**options)
    found = call_of(over(abstract((2,)), body, compiler_params=params), X)
    assert all(part in found for part in expected)
    assert ("symmetric" in found) == any("symmetric" in x for x in expected)


def test_one_device_has_no_others():
    assert "metadata = false" in call_of(over(abstract((1,)), put), X)


@pytest.mark.parametrize("devices", [1, 2])
def test_xla_makes_no_slices_of_operands_and_results(devices):
    """In a loop other devices would not know the address of a slice."""
    function = over(abstract((devices,)), put)
    lowered = jax.jit(function).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("optimization_barrier") == (2 if devices > 1 else 0)


@pytest.mark.parametrize("here", [True, False])
def test_arrays_that_are_kept(here, monkeypatch):
    """On devices that are here their addresses are passed; others get new ones."""
    known = [1 << 34, 1 << 35, 0]
    monkeypatch.setattr(register, "_addresses", lambda *_: np.array(known, np.int64))
    if here:
        replaced = functools.partial(dataclasses.replace, present=(0, 1))
        monkeypatch.setattr(runtime_devices, "present", lambda _, mesh: replaced(mesh))

    def body(x, o, semaphore, array, other):
        o[...] = x[...]
        programs.meet(semaphore)
        for counter in (array, other):
            plgpu.atomic_add(counter.at[0], 1)

    types = [plgpu.GMEM((1,), jnp.int32, init=0, kept=kept) for kept in (True, False)]
    function = over(
        abstract((2,)),
        body,
        scratch_types=[plgpu.SemaphoreType.BARRIER, *types],
        compiler_params=plgpu.CompilerParams(skip_device_barrier=True),
    )
    lowered = jax.jit(function).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count(f"dense<{known}> : tensor<3xi64>") == 2 * here
    called = call_of(function, X)
    aliases = re.findall(r"operand_index = (\d)", called)
    assert aliases == (["3"] if here else ["1", "2", "3"])
    assert f"skip_device_barrier = {str(here).lower()}" in called


ORDERS = {"another order": (1, 0), "some of the devices": (2, 3)}


@pytest.mark.parametrize("order", ORDERS)
@refused
def test_orders_of_devices_that_are_refused(order):
    devices = [SimpleNamespace(id=i) for i in ORDERS[order]]
    placement.require_order("put", devices, lambda: None)


@refused
def test_processes_that_the_author_does_not_name():
    devices = [SimpleNamespace(process_index=i) for i in range(2)]
    several = plgpu.CompilerParams(is_multi_process=True)
    check_processes(
        devices, params_of(over(abstract((2,)), put, compiler_params=several))
    )
    check_processes(devices, params_of(over(abstract((2,)), put)))


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_programs_compute(name, devices):
    program, xs = programs.PROGRAMS[name], programs.operands(devices)
    function = programs.sharded(program, abstract((devices,)), SEMANTICS[0])
    np.testing.assert_array_equal(
        plgpu.emulate_mesh(function)(xs), program.expected(xs)
    )


@pytest.mark.offline
@pytest.mark.parametrize("name", ["put", "push_tiles"])
def test_instances_of_vmap_reach_their_own(name):
    local = programs.kernel(programs.PROGRAMS[name], 3, SEMANTICS[0])
    function = divided(lambda xs: jax.vmap(local)(xs[0])[None], 3)
    xs = programs.operands(3)
    both = np.stack([xs, 2 * xs], axis=1)
    one = programs.PROGRAMS[name].expected
    expected = np.stack([one(xs), one(2 * xs)], axis=1)
    np.testing.assert_array_equal(plgpu.emulate_mesh(function)(both), expected)
    assert ptx(function, jax.ShapeDtypeStruct(both.shape, F32))


def test_contents_of_a_reference_are_those_of_the_peer():
    def body(r, start, end):
        theirs = plgpu.remote_ref(r, programs.neighbour())[...]
        programs.meet(start)
        r[...] = theirs
        programs.meet(end)

    kernel = plgpu.kernel(body, out_type=(), scratch_types=[programs.REGULAR] * 2)

    def local(x):
        ref = jax.new_ref(x[0])
        kernel(ref)
        return jax.freeze(ref)[None]

    function = divided(local, 3)
    xs = programs.operands(3)
    found = plgpu.emulate_mesh(function)(xs)
    np.testing.assert_array_equal(found, np.roll(xs, -1, axis=0))
