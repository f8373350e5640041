# SPDX-License-Identifier: Apache-2.0
"""Inline code that reaches other devices: instructions, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir

import pallas_gpu as plgpu
from pallas_gpu import mosaic as mgpu
from pallas_gpu import offline
from tests.support.refusal import refused

F32 = jnp.float32
X = jax.ShapeDtypeStruct((16, 128), F32)
LAYOUT = mgpu.WGStridedFragLayout((16, 128), 4)


def compiled(emit, *, remote=True):
    """Returns the PTX of inline code that gets an input, a result and SMEM."""
    code = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 4)(emit)

    def body(x, o, tile, bar):
        code(plgpu.remote_ref(x, 1) if remote else x, x, o, tile)

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((4,), ("x",), axis_types=auto)
    kernel = plgpu.kernel(
        body,
        out_type=X,
        scratch_types=[plgpu.SMEM(X.shape, F32), plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    function = jax.shard_map(
        kernel, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
    )
    (report,) = offline.compile(function, X)
    return report.ptx


def argument(ctx, peer, x, o, tile):
    array = mgpu.FragmentedArray.load_untiled(peer, layout=LAYOUT, optimized=False)
    array.store_untiled(o, optimized=False)


def by_id(ctx, peer, x, o, tile):
    array = mgpu.FragmentedArray.load_untiled(x, layout=LAYOUT, optimized=False)
    array.store_untiled(ctx.to_remote(o, ctx.device_id()), optimized=False)


def copy(ctx, peer, x, o, tile):
    ctx.async_copy(src_ref=tile, dst_ref=o, gmem_peer_id=ctx.device_id())
    ctx.async_copy(src_ref=tile, dst_ref=ctx.to_remote(o, 3))
    ctx.async_copy(src_ref=tile, dst_ref=o, gmem_peer_id=mgpu.GLOBAL_BROADCAST)
    ctx.await_async_copy(0)


def to_all(ctx, peer, x, o, tile):
    every = ctx.to_remote_multicast(o)
    array = mgpu.FragmentedArray.load_reduce_untiled(every, LAYOUT, "add")
    array.store_untiled(every, optimized=False)
    zero, index = mgpu.c(0, every.type.element_type), mgpu.c(0, ir.IndexType.get())
    every.store(zero, [index, index])


CASES = {
    argument: {"ld.global.nc.b64": 1, "st.global": 4},
    by_id: {"st.global.v4.b32": 4},
    copy: {"cp.async.bulk.tensor": 3},
    to_all: {
        "multimem.ld_reduce.relaxed.sys.global.add.v4.f32": 4,
        "multimem.st.relaxed.sys.global.v4.f32": 4,
        "multimem.st.relaxed.sys.global.f32": 1,
    },
}


@pytest.mark.offline
@pytest.mark.parametrize("emit", CASES, ids=lambda emit: emit.__name__)
def test_instructions(emit):
    text = compiled(emit)
    assert {part: text.count(part) for part in CASES[emit]} == CASES[emit]


REFUSED = {
    "a kernel of one device": (lambda ctx, *refs: ctx.device_id(), False),
    "code for the host": (lambda ctx, *refs: ctx.device_id(on_host=True), True),
    "SMEM": (lambda ctx, p, x, o, tile: ctx.to_remote(tile, 1), True),
    "a peer's peer": (lambda ctx, p, x, o, tile: ctx.to_remote(p, 1), True),
}


@pytest.mark.parametrize("case", REFUSED)
@refused
def test_what_is_refused(case):
    emit, remote = REFUSED[case]
    compiled(lambda *args: [emit(*args), None][1], remote=remote)
