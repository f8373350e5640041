# SPDX-License-Identifier: Apache-2.0
"""Other devices: how they are named, and what is refused where the call is written."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu.entry.call import CallParams
from pallas_gpu.program import spec
from pallas_gpu.program.build import region_of
from pallas_gpu.program.text import text
from tests.support import golden
from tests.support.public_calls import Good, top
from tests.support.refusal import refused_by

F32 = jnp.float32
X = jax.ShapeDtypeStruct((16, 128), F32)
LOGICAL = plgpu.DeviceIdType.LOGICAL
SCRATCH = [
    plgpu.SMEM((8, 128), F32),
    plgpu.Barrier(),
    plgpu.SemaphoreType.REGULAR,
]


def traced(body, sizes=(2, 4), names=("x", "y"), axis_names=(), **launch):
    """Returns the parameters of a kernel under `jax.shard_map`."""
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.AbstractMesh(sizes, names, axis_types=auto)
    kernel = plgpu.kernel(body, out_type=X, scratch_types=SCRATCH, **launch)
    sharded = jax.shard_map(
        kernel,
        mesh=mesh,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
        axis_names={*axis_names},
    )
    (outer,) = jax.make_jaxpr(sharded)(X).eqns
    eqns = outer.params["jaxpr"].eqns
    return next(CallParams(**x.params) for x in eqns if "mesh" in x.params)


def test_devices_are_logical_ids_in_the_program(request):
    def body(x, o, tmp, bar, sem):
        right = lax.rem(lax.axis_index("x") + 1, jnp.int32(lax.axis_size("x")))
        peer = plgpu.remote_ref(o, {"x": right})
        peer[0] = x[0]
        plgpu.remote_ref(o.at[1], (0, lax.axis_index("y")))[...] = x[1]
        plgpu.atomic_add(
            plgpu.remote_ref(o, 3, LOGICAL).at[jnp.arange(4), 0], x[0, 0:4]
        )
        o[...] = plgpu.remote_ref(x, {("x", "y"): right})[...]
        eighth = plgpu.remote_ref(x, {"y": 1}).reshape(8, 256).at[:, 0:128]
        plgpu.copy_gmem_to_smem(eighth, tmp, bar)
        plgpu.copy_smem_to_gmem(tmp, peer.reshape(2, 8, 128).at[right])
        plgpu.copy_smem_to_gmem(tmp, plgpu.multicast_ref(o, ("x", "y")).at[0:8])
        plgpu.semaphore_signal(sem, device_id=7, device_id_type=LOGICAL)
        plgpu.semaphore_signal_parallel(
            plgpu.SemaphoreSignal(sem, device_id=(right, 0))
        )
        plgpu.semaphore_signal_multicast(sem, 2, collective_axes=("y", "x"))
        plgpu.multimem_store(x[...].reshape(4, 512), o.reshape(4, 512), ("x", "y"))
        part = plgpu.multimem_load_reduce(
            x.at[0], collective_axes=("x", "y"), reduction_op="add"
        )
        plgpu.barrier_wait(bar)
        plgpu.wait_smem_to_gmem(0)
        o[0] = part

    params = traced(body)
    region = region_of(params.jaxpr)
    spec.check(region)
    assert params.devices == plgpu.types.Devices(("x", "y"), (2, 4))
    assert params.enclosing == ()
    golden.compare(request, re.sub(r" +# .*", "", text(region)).strip())


test_devices_are_logical_ids_in_the_program.has_golden_text = True  # type: ignore


def test_a_kernel_that_reaches_no_device_gets_its_position_as_an_operand():
    def body(x, o, *_):
        o[...] = x[...] + lax.axis_index("y").astype(F32)

    params = traced(body)
    assert params.devices is None
    assert [axis.name for axis in params.enclosing] == ["y"]


GOOD = {
    "PeerMemRef": top(device_id=1, device_id_type=LOGICAL),
    "remote_ref": Good(lambda e: {"ref": e.x, "device_id": 1}, lambda ref, e: ref[...]),
    "multicast_ref": lambda e: {"ref": e.o, "collective_axes": "d"},
    "multimem_store": lambda e: {
        "source": e.array,
        "ref": e.o,
        "collective_axes": "d",
    },
    "multimem_load_reduce": lambda e: {
        "ref": e.x,
        "collective_axes": "d",
        "reduction_op": "add",
    },
    "semaphore_signal_multicast": lambda e: {"semaphore": e.q, "collective_axes": "d"},
}
EFFECTS = {
    "remote_ref.device_id_type": "test_devices_are_logical_ids_in_the_program",
    "semaphore_signal_multicast.value": [1, 2],
    **dict.fromkeys(
        ("CompilerParams.is_multi_process", "CompilerParams.skip_device_barrier"),
        "tests/lowering/families/devices/test_peers.py::test_what_xla_is_told",
    ),
}


def store(o, *device, **ids):
    plgpu.remote_ref(o, *device, **ids)[...] = 1.0


def remote(o):
    return plgpu.remote_ref(o, {"x": 1})


def multicast(o):
    return plgpu.multicast_ref(o, ("x", "y"))


USES = {
    "an unknown axis": lambda x, o, t, s: store(o, {"z": 0}),
    "an axis twice": lambda x, o, t, s: store(o, {("x", "y"): 0, "x": 0}),
    "an unknown axis of several": lambda x, o, t, s: store(o, {("x", "z"): 0}),
    "a position outside": lambda x, o, t, s: store(o, {"x": 2}),
    "a negative position": lambda x, o, t, s: store(o, (0, -1)),
    "a joint position outside": lambda x, o, t, s: store(o, {("x", "y"): 8}),
    "one position of two": lambda x, o, t, s: store(o, 1),
    "a float": lambda x, o, t, s: store(o, {"x": 1.0}),
    "a logical id outside": lambda x, o, t, s: store(o, 8, LOGICAL),
    "a dict as a logical id": lambda x, o, t, s: store(o, {"x": 1}, LOGICAL),
    "SMEM": lambda x, o, t, s: store(t, {"x": 1}),
    "no reference": lambda x, o, t, s: store(x[...], {"x": 1}),
    "an input is written": lambda x, o, t, s: store(x, {"x": 1}),
    "multicast of a peer": lambda x, o, t, s: multicast(remote(o)),
    "a peer of multicast": lambda x, o, t, s: remote(multicast(o)),
    "multicast to some": lambda x, o, t, s: plgpu.multicast_ref(o, "x"),
    "a store to multicast": lambda x, o, t, s: multicast(o).set(0.0),
    "a wait for a peer's": lambda x, o, t, s: plgpu.semaphore_wait(remote(s)),
    "the scope of a GPU": lambda x, o, t, s: plgpu.semaphore_signal(
        s, device_id={"x": 1}, memory_scope="gpu"
    ),
    "the scope of a GPU, atomic": lambda x, o, t, s: plgpu.atomic_add(
        remote(o), 1.0, scope="gpu"
    ),
    "max of f32": lambda x, o, t, s: plgpu.multimem_load_reduce(
        x, collective_axes=("x", "y"), reduction_op="max"
    ),
    "half a word": lambda x, o, t, s: plgpu.multimem_store(
        jnp.bfloat16(0), o.bitcast(jnp.bfloat16).at[:, 1:], ("x", "y")
    ),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
@refused_by(traced)
def test_the_use_is_refused(x, o, t, bar, s, *, use):
    USES[use](x, o, t, s)


@refused_by(lambda body: jax.eval_shape(plgpu.kernel(body, out_type=X), X))
def test_a_shard_map_is_around_the_kernel(x, o):
    plgpu.remote_ref(o, 1)[...] = x[...]  # HERE


@refused_by(functools.partial(traced, axis_names={"x"}))
def test_the_shard_map_is_over_all_axes(x, o, *_):
    plgpu.remote_ref(o, {"x": 1})[...] = x[...]  # HERE


def test_names_of_the_kernel_are_not_those_of_the_mesh():
    def body(x, o, *_):
        plgpu.remote_ref(o, {"x": 1})[...] = x[...]

    with pytest.raises(plgpu.errors.AxisNameError, match="the axis 'x' is one of"):
        traced(body, grid=(1,), grid_names=("x",))
