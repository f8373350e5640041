# SPDX-License-Identifier: Apache-2.0
"""Bodies that run with upstream's module and with ours, by changing the import alone.

Upstream's functions emit into the same module, which the machine of emitted code runs.
"""

from __future__ import annotations

import jax.experimental.mosaic.gpu as upstream
import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from pallas_gpu import mosaic
from pallas_gpu.emitters import module
from tests.support import mosaic_bodies as bodies

F32, F16, I32 = np.float32, np.float16, np.int32
RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(64, 128)).astype(F32) for _ in range(2))
H, B = (RNG.normal(size=s).astype(F16) for s in ((64, 128), (128, 64)))
N = RNG.integers(-50, 50, (64, 128)).astype(I32)


def index(mgpu, n):
    return mgpu.c(n, ir.IndexType.get())


def load(mgpu, ref, **options):
    how = {"layout": mgpu.WGMMA_LAYOUT, "optimized": False, **options}
    return mgpu.FragmentedArray.load_untiled(ref, **how)


def strided(mgpu, x, y, out):
    x, y = (mgpu.FragmentedArray.load_strided(ref) for ref in (x, y))
    (x * y + 1.0 - x / 2.0).store_untiled(out)


def integers(mgpu, n, out):
    n = load(mgpu, n, is_signed=True)
    ((n // 7) * 100 + n % 7 + (n > 3).select(n << 1, n >> 1)).store_untiled(
        out, optimized=False
    )


def softmax(mgpu, x, _, out):
    x = load(mgpu, x)
    e = (x - x.reduce("max", 1).broadcast_minor(128)).exp()
    (e / e.reduce("add", 1).broadcast_minor(128)).store_untiled(out, optimized=False)


def columns(mgpu, x, _, out):
    scratch = bodies.smem(0, (1024,), F32)
    total = load(mgpu, x).reduce("add", 0, scratch)
    wide = total.broadcast_in_dim((64, 128), (1,), mgpu.WGMMA_LAYOUT)
    wide.store_untiled(out, optimized=False)


def parts(mgpu, x, _, out):
    middle = mgpu.memref_slice(x, (mgpu.ds(index(mgpu, 16), 32), slice(0, 128)))
    flat = mgpu.memref_unfold(mgpu.memref_fold(middle, 0, 2), 0, (32, None))
    for half in (0, 1):
        target = mgpu.memref_slice(out, slice(32 * half, 32 * half + 32))
        mgpu.FragmentedArray.load_strided(flat).store_untiled(target)


def in_smem(mgpu, x, _, out):
    tiles = bodies.smem(0, (8, 4, 8, 32), F32)
    load(mgpu, x).store_tiled(tiles, 128)
    mgpu.commit_shared()
    turned = mgpu.memref_transpose(
        mgpu.memref_slice(tiles, mgpu.ds(0, 8)), (0, 1, 2, 3)
    )
    array = mgpu.FragmentedArray.load_tiled(turned, 128)

    @mgpu.fori(index(mgpu, 3), array)
    def loop(i, carry):
        return carry + array

    loop.result.store_untiled(out, optimized=False)


def each(mgpu, x, _, out):
    layout = mgpu.WGMMA_LAYOUT
    f32 = ir.F32Type.get()
    rows = mgpu.FragmentedArray.broadcasted_iota(f32, (64, 128), 0, layout)
    x = load(mgpu, x)
    x = x.foreach(lambda v, at: arith.addf(v, v), create_array=True)
    x[:, 0:64] = x[:, 0:64] + rows[:, 0:64]
    x.store_untiled(out, optimized=False)


def product(mgpu, a, b, out):
    left = bodies.smem(0, (8, 2, 8, 64), F16)
    right = bodies.smem(1 << 15, (16, 1, 8, 64), F16)
    mgpu.copy_tiled(a, left, 128)
    mgpu.copy_tiled(b, right, 128)
    mgpu.commit_shared()
    acc = mgpu.wgmma(mgpu.WGMMAAccumulator.zero(64, 64), left, right)
    nvvm.wgmma_commit_group_sync_aligned()
    nvvm.wgmma_wait_group_sync_aligned(0)
    acc.value.store_untiled(out, optimized=False)


def product_of_warps(mgpu, a, b, out):
    layouts = mgpu.MMALayouts(F16)
    b = mgpu.memref_transpose(b, (1, 0))
    left, right = load(mgpu, a, layout=layouts.lhs), load(mgpu, b, layout=layouts.rhs)
    zero = mgpu.c(0.0, ir.F32Type.get())
    acc = mgpu.FragmentedArray.splat(zero, (64, 64), layouts.acc)
    mgpu.mma(acc, left, right).store_untiled(out, optimized=False)


def barriers(mgpu, x, _, out):
    pair = mgpu.BarrierRef.initialize(bodies.smem(0, (2,), np.int64), 128)
    module.current().sync_after_init()
    held = bodies.smem(1024, (64, 128), F32)
    mgpu.FragmentedArray.load_strided(x).store_untiled(held)
    for barrier in (pair[0], pair[1], pair[0]):
        barrier.arrive()
        barrier.wait()
    turned = mgpu.memref_reshape(held, (128, 64))
    whole = mgpu.memref_reshape(out, (128, 64))
    mgpu.FragmentedArray.load_strided(turned).store_untiled(whole)


def softmax_of(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


PRODUCT = H.astype(F32) @ B.astype(F32)
# name: (the body, its operands, what it gives)
BODIES = {
    "strided": (strided, [X, Y], X * Y + 1 - X / 2),
    "integers": (
        integers, [N],
        (N // 7) * 100 + np.fmod(N, 7) + np.where(N > 3, N << 1, N >> 1),
    ),
    "softmax": (softmax, [X, Y], softmax_of(X)),
    "columns": (columns, [X, Y], np.broadcast_to(X.sum(0), X.shape)),
    "parts": (parts, [X, Y], np.concatenate([X[16:48]] * 2)),
    "in SMEM": (in_smem, [X, Y], 4 * X),
    "each": (
        each, [X, Y],
        2 * X + np.where(np.arange(128) < 64, np.arange(64.0)[:, None], 0).astype(F32),
    ),
    "product": (product, [H, B], PRODUCT),
    "product of warps": (product_of_warps, [H, np.ascontiguousarray(B.T)], PRODUCT),
    "barriers": (barriers, [X, Y], X),
}  # fmt: skip


@pytest.mark.parametrize("mgpu", [mosaic, upstream], ids=["ours", "upstream"])
@pytest.mark.parametrize("name", BODIES)
def test_a_body_gives_the_same(name, mgpu):
    body, operands, expected = BODIES[name]
    bodies.check(
        lambda *refs: body(mgpu, *refs),
        operands,
        np.ascontiguousarray(expected),
        rtol=1e-3,
        smem_bytes=1 << 16,
    )
