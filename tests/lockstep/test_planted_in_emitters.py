# SPDX-License-Identifier: Apache-2.0
"""Mistakes in emitters: `interpret="emitted"` finds them, the emulator cannot.

The emulator runs a kernel's body; what an emitter leaves out of the code is not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir.dialects import llvm

import pallas_gpu as plgpu
from pallas_gpu import ops
from pallas_gpu.emitters import (
    cluster,
    mbarrier,
    module,
    registers,
    tensor_map,
    tma,
)
from pallas_gpu.emitters.copies import cp_async
from pallas_gpu.emitters.devices import descriptors, peers
from pallas_gpu.emitters.tensor_cores import tcgen05, tmem, wgmma
from tests.support.semantics import Lane

F32, F16 = jnp.float32, jnp.float16
RNG = np.random.default_rng(0)
X = RNG.integers(-8, 8, (64, 128)).astype(np.float32)
A = RNG.integers(-4, 5, (256, 256)).astype(np.float16)
TILE = plgpu.SMEM((64, 128), F32)


def doubled(interpret):
    def body(x, o, tile, barrier):
        for _ in range(2):
            plgpu.copy_gmem_to_smem(x, tile, barrier)
            plgpu.barrier_wait(barrier)
            tile[...] = 2 * tile[...]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, o)
            plgpu.wait_smem_to_gmem(0)

    scratch = [TILE, plgpu.Barrier()]
    return plgpu.kernel(body, TILE, scratch_types=scratch, interpret=interpret)(X)


def ring(interpret):
    """A warpgroup copies, another one adds; each frees what the other waits for."""

    def body(x, o, tile, full, empty):
        @pl_when(jax.lax.axis_index("wg") == 0)
        def _():
            for i in range(4):
                if i:
                    plgpu.barrier_wait(empty)
                plgpu.copy_gmem_to_smem(x.at[plgpu.ds(16 * i, 16)], tile, full)

        @pl_when(jax.lax.axis_index("wg") == 1)
        def _():
            for i in range(4):
                plgpu.barrier_wait(full)
                o[plgpu.ds(16 * i, 16)] = 1 + tile[...]
                plgpu.barrier_arrive(empty)

    return plgpu.kernel(
        body, TILE, num_threads=2, thread_name="wg", interpret=interpret,
        scratch_types=[plgpu.SMEM((16, 128), F32), plgpu.Barrier(), plgpu.Barrier()],
    )(X)  # fmt: skip


def pl_when(condition):
    return lambda body: jax.lax.cond(condition, body, lambda: None)


def neighbours(interpret):
    """Each CTA of a pair adds the tile of the other one."""

    def body(x, o, tile, barrier):
        me = jax.lax.axis_index("pair")
        tile[...] = x[plgpu.ds(32 * me, 32)]
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        theirs = plgpu.cluster_ref(tile, {"pair": 1 - me})[...]
        o[plgpu.ds(32 * me, 32)] = theirs

    return plgpu.kernel(
        body, TILE, cluster=(2,), cluster_names=("pair",), interpret=interpret,
        scratch_types=[
            plgpu.SMEM((32, 128), F32),
            plgpu.ClusterBarrier(collective_axes=("pair",)),
        ],
    )(X)  # fmt: skip


def to_another_device(interpret):
    """Each of two devices stores its rows at the other one."""

    def body(x, o, tile, barrier, semaphore):
        plgpu.copy_gmem_to_smem(x, tile, barrier)
        plgpu.barrier_wait(barrier)
        there = {"d": 1 - jax.lax.axis_index("d")}
        plgpu.copy_smem_to_gmem(tile, plgpu.remote_ref(o, there))
        plgpu.wait_smem_to_gmem(0)
        plgpu.semaphore_signal(semaphore, device_id=there)
        plgpu.semaphore_wait(semaphore)

    half = plgpu.SMEM((32, 128), F32)
    scratch = [half, plgpu.Barrier(), plgpu.SemaphoreType.REGULAR]
    kernel = plgpu.kernel(body, half, scratch_types=scratch, interpret=interpret)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=auto)
    rows = jax.P("d")
    local = jax.shard_map(
        kernel, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
    )
    return plgpu.emulate_mesh(local)(X)


def by_threads(interpret):
    def body(x, o, tile):
        engine = plgpu.AsyncCopyImplementation.CP_ASYNC
        plgpu.copy_gmem_to_smem(x, tile, implementation=engine)
        plgpu.wait_gmem_to_smem(0)
        o[...] = tile[...]

    return plgpu.kernel(body, TILE, scratch_types=[TILE], interpret=interpret)(X)


def product(interpret):
    config = ops.MatmulConfig(
        tile_m=64, tile_n=64, tile_k=64, stages=2, blocks=2, cluster=None, strip=1,
    )  # fmt: skip
    return _product(interpret, config, None)


def blackwell(interpret):
    config = ops.BlackwellMatmulConfig(tile_n=128, tile_k=64, stages=2, blocks=1)
    return _product(interpret, config, "sm_100a")


def _product(interpret, config, target):
    params = plgpu.CompilerParams(target=target, lowering_semantics=Lane)
    emulated = interpret if isinstance(interpret, plgpu.InterpretParams) else None
    with plgpu.force_gpu_interpret_mode(emulated):
        ops.clear_cache()
        return ops.matmul(A, A, config=config, compiler_params=params)


class Mistake(NamedTuple):
    """What an emitter does wrong.

    Attributes:
      kernel: what it is found in.
      where, name: the emitter.
      wrong: takes the emitter and returns another one; None leaves the code out.
    """

    kernel: Callable[[Any], Any]
    where: Any
    name: str
    wrong: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None


def flipped(real):
    def wait(pointer, parity, **options):
        one = module.current().i32(1)
        return real(pointer, registers.arith.xori(parity, one), **options)

    return wait


def fewer(real):
    return lambda pointer, num_bytes, *rest: real(pointer, num_bytes - 16, *rest)


def lacking(what):
    text = f"wgmma.{what}.sync.aligned;"
    return lambda real: (
        lambda *args, **options: real(*args, **options).replace(text, "")
    )


def without(what):
    return lambda real: lambda text, *rest: None if what in text else real(text, *rest)


def of_the_host(real):
    """The descriptors of addresses that XLA does not write again for a replay."""

    def emit(tensor_maps, pointers):
        word = peers.load_word(pointers[-1], peers.word_of(2, 0))
        address = llvm.inttoptr(module.pointer_type(), word)
        return real(tensor_maps, [address] * len(pointers))

    return emit


MISTAKES = {
    "no wait": Mistake(doubled, mbarrier, "wait"),
    "the other parity": Mistake(doubled, mbarrier, "wait", flipped),
    "a count of two": Mistake(
        *(ring, mbarrier, "init_each"),
        lambda real: lambda offset, counts: real(offset, [2] * len(counts)),
    ),
    "no initialization": Mistake(doubled, mbarrier, "init_each"),
    "no meeting after it": Mistake(ring, module.KernelBuilder, "sync_after_init"),
    "fewer bytes": Mistake(doubled, mbarrier, "emit_arrive_expect_tx", fewer),
    "no fence for a store": Mistake(doubled, tma, "fence_proxy_async"),
    "no commit of a store": Mistake(doubled, tma, "commit_group"),
    "no wait for a store": Mistake(doubled, tma, "wait_group"),
    "threads do not meet": Mistake(doubled, mbarrier, "synchronize"),
    "nor those of a warpgroup": Mistake(ring, mbarrier, "warpgroup_barrier"),
    "no arrival": Mistake(ring, mbarrier, "emit_arrive"),
    "no arrival at another CTA": Mistake(neighbours, cluster, "emit_arrive_remote"),
    "a tensor map with its own address": Mistake(
        to_another_device, descriptors, "_assembly", without("replace")
    ),
    "no release of a tensor map": Mistake(
        to_another_device, descriptors, "_assembly", without("release")
    ),
    "a tensor map that is not acquired": Mistake(
        to_another_device, descriptors, "_assembly", without("acquire")
    ),
    "addresses of the host": Mistake(
        to_another_device, tensor_map, "_emit_host", of_the_host
    ),
    "an exit before the others": Mistake(
        neighbours, module.KernelBuilder, "sync_before_exit"
    ),
    "no wait for cp.async": Mistake(by_threads, cp_async, "wait_group"),
    "no wait for wgmma": Mistake(product, wgmma, "wait"),
    "no order of accumulators": Mistake(product, wgmma, "_text", lacking("fence")),
    "no group of wgmma": Mistake(product, wgmma, "_text", lacking("commit_group")),
    "no commit of tcgen05": Mistake(blackwell, tcgen05, "commit_arrive"),
    "no fence after a wait": Mistake(blackwell, mbarrier, "fence_after_wait"),
    "no wait for tcgen05.ld": Mistake(blackwell, tmem, "wait_loads"),
    "TMEM is not freed": Mistake(blackwell, tmem, "free"),
}  # fmt: skip
EMITTED = plgpu.InterpretParams(emitted=True)
KERNELS = {
    doubled: 2 * X,
    ring: X + 1,
    neighbours: np.roll(X, 32, axis=0),
    to_another_device: np.roll(X, 32, axis=0),
    by_threads: X,
    product: A @ A,
    blackwell: A @ A,
}


def test_there_are_twenty():
    assert len(MISTAKES) >= 20
    assert {m.kernel for m in MISTAKES.values()} == KERNELS.keys()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_without_a_mistake_the_code_is_right(kernel):
    np.testing.assert_array_equal(kernel(EMITTED), KERNELS[kernel])


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_an_emitter_is_found(name, monkeypatch):
    mistake = MISTAKES[name]
    real = getattr(mistake.where, mistake.name)
    wrong = mistake.wrong(real) if mistake.wrong else lambda *_, **__: None
    monkeypatch.setattr(mistake.where, mistake.name, wrong)
    emulated = mistake.kernel(plgpu.InterpretParams())
    np.testing.assert_array_equal(emulated, KERNELS[mistake.kernel])
    with pytest.raises(plgpu.errors.PtxError):
        mistake.kernel(EMITTED)
