# SPDX-License-Identifier: Apache-2.0
"""`as_gpu_kernel`: its arguments, its scratch, and what the function checks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref

import pallas_gpu as plgpu
from pallas_gpu import mosaic as mgpu
from tests.support.mosaic_kernels import check, kernel, run, smem, typed
from tests.support.refusal import refused

X, Y, Z = gpu.Dimension.x, gpu.Dimension.y, gpu.Dimension.z
F32, I32 = np.float32, np.int32


def index(value):
    return mgpu.c(value, ir.IndexType.get())


def i32(value):
    type_ = ir.IntegerType.get_signless(32)
    return (
        mgpu.c(value, type_)
        if isinstance(value, int)
        else arith.index_cast(type_, value)
    )


def is_equal(a, b):
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def load(ref):
    return mgpu.FragmentedArray.load_strided(ref, is_signed=True)


def numbers(*shape, dtype=F32):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


# --- what is launched -----------------------------------------------------------------


def test_blocks_lie_on_three_axes():
    def body(ctx, o_ref, scratch):
        at = tuple(gpu.block_id(d) for d in (Z, Y, X))
        total = i32(0)
        for d in (Z, Y, X):
            total = arith.addi(arith.muli(total, i32(10)), i32(gpu.block_id(d)))
        with mgpu.single_thread():
            memref.store(total, o_ref, at)

    x, y, z = np.meshgrid(range(4), range(3), range(2), indexing="ij")
    expected = (x + 10 * y + 100 * z).transpose(2, 1, 0).astype(I32)
    check(body, [], expected, grid=(4, 3, 2))


def test_threads_lie_on_three_axes():
    def body(ctx, o_ref, scratch):
        at = tuple(gpu.thread_id(d) for d in (Z, Y, X))
        memref.store(mgpu.thread_idx(), o_ref, at)

    check(body, [], numbers(2, 8, 16, dtype=I32), block=(16, 8, 2))


@pytest.mark.parametrize("dims", [X, Y, (X, Y), None])
def test_a_block_knows_its_place_in_the_cluster(dims):
    def body(ctx, o_ref, scratch):
        at = tuple(gpu.block_id(d) for d in (Y, X))
        with mgpu.single_thread():
            memref.store(i32(ctx.cluster_idx(dims)), o_ref, at)

    y, x = np.meshgrid(range(2), range(4), indexing="ij")
    expected = {X: x % 2, Y: y % 2}.get(dims, x % 2 + 2 * (y % 2))
    check(body, [], expected.astype(I32), grid=(4, 2, 1), cluster=(2, 2, 1))


def doubling(ctx, x_ref, *rest):
    """Stores twice the first argument to the last reference."""
    (load(x_ref) * 2.0).store_untiled(rest[-2])


@pytest.mark.parametrize("form", ["single", "tuple", "list"])
def test_results_have_the_form_that_was_asked_for(form):
    x = numbers(128)
    out = {"single": typed(x), "tuple": (typed(x),), "list": [typed(x)]}[form]
    found = mgpu.as_gpu_kernel(doubling, (1, 1, 1), (128, 1, 1), typed(x), out, ())(x)
    (found,) = (found,) if form == "single" else found
    np.testing.assert_array_equal(found, 2 * x)


def test_arrays_are_updated_in_place():
    x, y = numbers(128), numbers(128) + 1

    def body(ctx, x_ref, y_ref, o_ref, scratch):
        old = load(y_ref)
        (load(x_ref) + old).store_untiled(y_ref)
        old.store_untiled(o_ref)

    function = kernel(body, [x], [y], inout_shape=(typed(y),))
    old, new = function(x, y)
    np.testing.assert_array_equal(old, y)
    np.testing.assert_array_equal(new, x + y)
    np.testing.assert_array_equal(y, numbers(128) + 1)


def test_it_composes_with_jit_and_scan():
    x = numbers(128)
    function = kernel(doubling, [x], [x])
    step = lambda carry, _: (function(carry)[0], None)  # noqa: E731
    (found, _) = jax.jit(lambda y: jax.lax.scan(step, y, length=3))(x)
    np.testing.assert_array_equal(found, 8 * x)


def test_it_is_exported():
    x = numbers(128)
    function = jax.jit(kernel(doubling, [x], [x], ir_version=5))
    text = jax.export.export(function, platforms=["cuda"])(x).mlir_module()
    assert "mosaic_gpu_v2" in text


@pytest.mark.offline
def test_it_compiles_offline():
    x = numbers(128)
    (report,) = plgpu.offline.compile(kernel(doubling, [x], [x]), x, target="sm_90a")
    assert ".entry doubling" in report.ptx


# --- scratch --------------------------------------------------------------------------


def test_scratch_is_a_pytree():
    x = numbers(128)

    def body(ctx, x_ref, o_ref, scratch):
        first, rest = scratch["first"], scratch["rest"]
        assert rest[1] is None
        load(x_ref).store_untiled(first)
        (load(first) + 1.0).store_untiled(rest[0])
        load(rest[0]).store_untiled(o_ref)

    scratch = {"first": smem((128,), F32), "rest": (smem((128,), F32), None)}
    check(body, [x], x + 1, scratch=scratch)


def test_members_of_a_union_share_their_memory():
    x = numbers(2, 256)

    def body(ctx, x_ref, o_ref, scratch):
        whole, (halves, (single, nested)) = scratch
        load(x_ref).store_untiled(whole)
        mgpu.warpgroup_barrier()
        a, b = (load(ref) for ref in halves)
        (a * 1000.0 + b).store_untiled(o_ref)
        del single, nested

    one = smem((256,), F32)
    scratch = mgpu.Union([smem((2, 256), F32), [(one, one), mgpu.Union([one, [one]])]])
    check(body, [x], x[0] * 1000 + x[1], scratch=scratch)


def test_barriers_of_a_union_are_their_own():
    x = numbers(128)

    def body(ctx, x_ref, o_ref, scratch):
        (tile, first), (other, second) = scratch
        ctx.async_copy(src_ref=x_ref, dst_ref=tile, barrier=first)
        first.wait()
        mgpu.warpgroup_barrier()
        mgpu.commit_shared()
        ctx.async_copy(src_ref=x_ref, dst_ref=other, barrier=second)
        second.wait()
        load(other).store_untiled(o_ref)

    one = (smem((128,), F32), mgpu.TMABarrier())
    check(body, [x], x, scratch=mgpu.Union([one, one]))


def test_each_thread_arrives_on_a_barrier():
    x = numbers(256)

    def body(ctx, x_ref, o_ref, scratch):
        tile, barriers = scratch
        load(x_ref).store_untiled(tile)
        for i in range(2):
            barriers[i].arrive()
            barriers[i].wait()
        load(tile).store_untiled(o_ref)

    check(body, [x], x, scratch=(smem((256,), F32), mgpu.Barrier(128, 2)))


def test_blocks_of_a_cluster_arrive_at_each_other():
    def body(ctx, o_ref, scratch):
        barrier = scratch
        for _ in range(2):
            barrier.arrive()
            barrier.wait()
        with mgpu.single_thread():
            memref.store(i32(ctx.cluster_idx()), o_ref, (ctx.cluster_idx(),))

    barrier = mgpu.ClusterBarrier([X, Y])
    shape = (2, 2, 1)
    expected = numbers(4, dtype=I32)
    check(body, [], expected, scratch=barrier, grid=shape, cluster=shape)


def test_warpgroups_meet_at_hardware_barriers():
    x = numbers(128)

    def body(ctx, x_ref, o_ref, scratch):
        tile, barriers = scratch
        first = is_equal(mgpu.warpgroup_idx(), i32(0))
        with mgpu.when(first):
            load(x_ref).store_untiled(tile)
            barriers[1].arrive()
        with mgpu.when(is_equal(mgpu.warpgroup_idx(), i32(1))):
            barriers[1].arrive_and_wait()
            load(tile).store_untiled(o_ref)

    scratch = (smem((128,), F32), mgpu.CtaBarrier(256, 2))
    check(body, [x], x, scratch=scratch, block=(256, 1, 1))


@pytest.mark.parametrize("packing", [None, 2])
def test_arrays_in_tensor_memory_are_stored_and_loaded(packing):
    dtype = F32 if packing is None else np.float16
    x = numbers(128, 64, dtype=dtype)

    def body(ctx, x_ref, o_ref, scratch):
        layout = mgpu.TCGEN05_LAYOUT
        value = mgpu.FragmentedArray.load_untiled(x_ref, layout=layout, optimized=False)
        scratch.store(value)
        mgpu.tcgen05.commit_tmem()
        scratch.load(layout).store_untiled(o_ref, optimized=False)

    check(body, [x], x, scratch=mgpu.TMEM((128, 64), dtype, packing=packing))


# --- what is refused ------------------------------------------------------------------

VECTOR = jax.ShapeDtypeStruct((128,), jnp.float32)
VALID = {
    "body": doubling, "grid": (1, 1, 1), "block": (128, 1, 1), "in_shape": VECTOR,
    "out_shape": VECTOR, "smem_scratch_shape": (),
}  # fmt: skip
REFUSED = {
    "a grid of one number": {"grid": (4,)},
    "part of a cluster": {"grid": (3, 1, 1), "cluster": (2, 1, 1)},
    "part of a warpgroup": {"block": (96, 1, 1)},
    "Warpgroup semantics": {"thread_semantics": plgpu.LoweringSemantics.Warpgroup},
    "a shape without a dtype": {"in_shape": (128,)},
    "a body without scratch": {"body": lambda ctx, x_ref, o_ref: None},
    "other scratch": {"smem_scratch_shape": plgpu.Barrier()},
    "another profiler": {"prof_spec": "a profiler"},
}


@pytest.mark.parametrize("case", REFUSED)
@refused
def test_what_cannot_be_launched(case):
    mgpu.as_gpu_kernel(**{**VALID, **REFUSED[case]})  # HERE


@refused
def test_a_missing_wait_has_its_line_in_the_body():
    def body(ctx, x_ref, o_ref, scratch):
        tile, barrier = scratch
        ctx.async_copy(src_ref=x_ref, dst_ref=tile, barrier=barrier)
        x = mgpu.FragmentedArray.load_strided(tile)  # HERE
        x.store_untiled(o_ref)

    x = numbers(128)
    kernel(body, [x], [x], (smem([128], F32), mgpu.TMABarrier()))(x)


ARGUMENTS = {
    "too few": (),
    "another tree": ((numbers(128),),),
    "another shape": (numbers(64),),
    "another dtype": (numbers(128, dtype=I32),),
}


@pytest.mark.parametrize("case", ARGUMENTS)
@refused
def test_what_cannot_be_passed(case):
    mgpu.as_gpu_kernel(**VALID)(*ARGUMENTS[case])  # HERE


@refused
def test_a_python_scalar_has_another_dtype():
    scalar = jax.ShapeDtypeStruct((), jnp.int16)
    mgpu.as_gpu_kernel(**{**VALID, "in_shape": scalar})(1)  # HERE


@refused
def test_instances_have_no_axis_to_lie_on():
    jax.vmap(mgpu.as_gpu_kernel(**VALID))(numbers(2, 128))  # HERE


SCRATCH = {
    "no arrivals": lambda: mgpu.Barrier(0),
    "part of a warp": lambda: mgpu.CtaBarrier(48),
    "two layouts": lambda: mgpu.TMEM(
        (128, 64), jnp.float16, packing=2, layout=mgpu.tcgen05.tmem_default_layout(2)
    ),
}


@pytest.mark.parametrize("case", SCRATCH)
@refused
def test_what_cannot_be_declared(case):
    SCRATCH[case]()


@refused
def test_a_block_has_sixteen_hardware_barriers():
    run(lambda ctx, o, scratch: None, [], [VECTOR], mgpu.CtaBarrier(128, 15))  # HERE


@pytest.mark.parametrize(
    "method", [lambda ctx, ref: ctx.device_id(), lambda ctx, ref: ctx.to_remote(ref, 1),
               lambda ctx, ref: ctx.to_remote_multicast(ref)],
    ids=["device_id", "to_remote", "to_remote_multicast"],
)  # fmt: skip
@refused
def test_several_devices(method):
    def body(ctx, o_ref, scratch):
        method(ctx, o_ref)

    run(body, [], [VECTOR])
