# SPDX-License-Identifier: Apache-2.0
"""Windows of images, copied pixel by pixel: everywhere, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu import errors
from tests.support import everywhere
from tests.support.features.row import Row, omissions
from tests.support.public_calls import Good
from tests.support.refusal import refused
from tests.support.semantics import Warpgroup

F16, F32 = jnp.float16, jnp.float32
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
ONES = ((1, 1), (1, 1))
# Images, windows, padding; the first window, the pixel in it, channels; type, storage.
CASES = {
    "one dimension": ((3, 20, 16), (5,), ((2, 1),), 10, 40, (3,), (4, 8), F32, ()),
    "two dimensions": ((2, 8, 8, 64), (3, 3), ONES, 5, 64, (0, 2), (0, 64), F32, ()),
    "uneven padding": (
        (2, 7, 9, 32), (3, 2), ((2, 0), (0, 3)), 5, 100, (2, 1), (8, 16), F32, (),
    ),
    "three dimensions": (
        (2, 4, 5, 6, 16), (2, 3, 2), ((0, 1), (1, 1), (1, 0)), 7, 90, (1, 2, 1),
        (0, 16), F32, (),
    ),
    "behind the end": (
        (2, 6, 6, 64), (3, 3), ((0, 0), (0, 0)), 20, 32, (1, 1), (32, 64), F32, (),
    ),
    "swizzled": ((2, 8, 8, 64), (3, 3), ONES, 0, 128, (1, 0), (0, 64), F16, TILED),
    "bytes": ((2, 8, 8, 64), (3, 3), ONES, 5, 64, (0, 2), (16, 32), np.uint8, ()),
}  # fmt: skip


def windows(x, shape, padding):
    """All windows, by the definition."""
    padded = np.pad(x, ((0, 0), *padding, (0, 0)))
    axes = tuple(range(1, x.ndim - 1))
    found = np.lib.stride_tricks.sliding_window_view(padded, shape, axes)
    return np.moveaxis(found, x.ndim - 1, -1).reshape(-1, *shape, x.shape[-1])


def kernel_of(case, zero=None):
    """A copy; a zero that only the kernel knows is added to indices."""
    images, shape, padding, row, rows, offsets, (channel, channels), dtype, how = case
    x = np.arange(1, np.prod(images) + 1).reshape(images).astype(dtype)

    def body(zero_ref, x_ref, o, tile, barrier):
        z = zero_ref[0] if zero is not None else 0
        view = plgpu.im2col_ref(x_ref, window_shape=shape, padding=padding)
        pixels = [offset + z for offset in offsets]
        part = plgpu.ds(row + z, rows), *pixels, plgpu.ds(channel, channels)
        plgpu.copy_gmem_to_smem(view.at[part], tile, barrier)
        plgpu.barrier_wait(barrier)
        o[...] = tile[...]

    every = windows(x, shape, padding)
    found = every[row : row + rows, *offsets, channel : channel + channels]
    missing = [(0, n - k) for n, k in zip((rows, channels), found.shape, strict=True)]
    tile = plgpu.SMEM((rows, channels), dtype, transforms=how)
    args = [np.zeros(1, np.int32), x]
    result = np.pad(found, missing)
    return everywhere.kernel(body, result, tile, plgpu.Barrier()), args, result


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_pixel_of_each_window(case):
    everywhere.check(*kernel_of(case))


@pytest.mark.smoke
def test_indices_that_the_kernel_computes():
    everywhere.check(*kernel_of(CASES["uneven padding"], zero=True))


@pytest.mark.offline
def test_the_instruction_adds_offsets_to_all_pixels():
    make, args, _ = kernel_of(CASES["three dimensions"])
    (report,) = plgpu.offline.compile(make(), *args)
    assert "cp.async.bulk.tensor.5d.shared::cluster.global.im2col" in report.ptx


def test_a_convolution_is_a_product_for_each_pixel():
    """Warpgroup semantics tiles the operand for the copy and for wgmma."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, 8, 8, 64)).astype(F16)
    w = rng.standard_normal((3, 3, 64, 64)).astype(F16)
    pad = ((1, 1), (1, 1))

    def body(x_ref, w_ref, o, left, right, acc, barrier):
        view = plgpu.im2col_ref(x_ref, window_shape=(3, 3), padding=pad)

        @plgpu.loop(0, 9)
        def _(i):
            dy, dx = i // 3, i % 3
            plgpu.copy_gmem_to_smem(view.at[:, dy, dx], left, barrier)
            plgpu.copy_gmem_to_smem(w_ref.at[dy, dx], right, barrier)
            plgpu.barrier_wait(barrier)
            plgpu.wgmma(acc, left, right)
            plgpu.wgmma_wait(0)

        o[...] = acc[...]

    every = windows(x, (3, 3), pad).astype(np.float64)
    expected = np.einsum("nyxc,yxck->nk", every, w.astype(np.float64))
    scratch = [plgpu.SMEM((64, 64), F16)] * 2
    everywhere.run(
        body, [x, w], expected, *scratch, plgpu.ACC((64, 64)),
        plgpu.Barrier(num_arrivals=2), out=jax.ShapeDtypeStruct((64, 64), F32),
        atol=1e-2, semantics=[Warpgroup], executed=[Warpgroup],
    )  # fmt: skip


def test_pixels_are_there_after_a_wait():
    def body(x_ref, o, tile, barrier):
        view = plgpu.im2col_ref(x_ref, window_shape=(3, 3))
        plgpu.copy_gmem_to_smem(view.at[plgpu.ds(0, 8), 0, 0], tile, barrier)
        o[...] = tile[...]
        plgpu.barrier_wait(barrier)

    out = jax.ShapeDtypeStruct((8, 64), F32)
    scratch = plgpu.SMEM((8, 64), F32), plgpu.Barrier()
    with pytest.raises(errors.RaceError, match="the copy"):
        everywhere.emulate(body, [np.ones((1, 8, 8, 64), F32)], out, *scratch)


@pytest.mark.parametrize("where", ["window", "pixel", "channel"])
def test_the_emulator_checks_indices_that_the_kernel_computes(where):
    def body(x_ref, n_ref, o, tile, barrier):
        n = {"window": 0, "pixel": 0, "channel": 0, where: n_ref[0]}
        view = plgpu.im2col_ref(x_ref, window_shape=(3, 3))
        part = plgpu.ds(n["window"], 8), n["pixel"], 0, plgpu.ds(n["channel"], 64)
        plgpu.copy_gmem_to_smem(view.at[part], tile, barrier)
        plgpu.barrier_wait(barrier)
        o[...] = tile[...]

    bad = {"window": -1, "pixel": 3, "channel": 2}[where]
    args = [np.ones((1, 8, 8, 64), F32), np.full(1, bad, np.int32)]
    scratch = plgpu.SMEM((8, 64), F32), plgpu.Barrier()
    out = jax.ShapeDtypeStruct((8, 64), F32)
    with pytest.raises(errors.OutOfBoundsError, match="windows of"):
        everywhere.emulate(body, args, out, *scratch)


# --- what is refused ------------------------------------------------------------------


def attempt(body, images=(2, 8, 8, 64), tile=(64, 64), transforms=()):
    kernel = plgpu.kernel(
        body,
        out_type=(),
        scratch_types=[plgpu.SMEM(tile, F32, transforms=transforms), plgpu.Barrier()],
    )
    kernel(jnp.zeros(images, F32))


def copies(part, /, options=None, padding=None, **how):
    """A mistake in the part of the view, or in the options of the copy."""

    def body(x, tile, barrier):
        view = plgpu.im2col_ref(x, window_shape=(3, 3), padding=padding)
        plgpu.copy_gmem_to_smem(view.at[part], tile, barrier, **options or {})  # HERE

    attempt(body, **how)


ROWS, ALL = plgpu.ds(0, 64), plgpu.ds(0, 64)
PARTS = {
    "a range of pixels": ((ROWS, 0, slice(0, 1), ALL), {"tile": (64, 1, 64)}),
    "one window": ((0, 0, 0, ALL), {"tile": (64,)}),
    "an offset outside": ((ROWS, 0, 3, ALL), {}),
    "a window before the first": ((plgpu.ds(-1, 64), 0, 0, ALL), {}),
    "a channel inside a unit": ((ROWS, 0, 0, plgpu.ds(2, 64)), {}),
    "few channels": ((ROWS, 0, 0, plgpu.ds(0, 2)), {"tile": (64, 2)}),
    "an option": ((ROWS, 0, 0, ALL), {"options": {"cache_hint": "evict_last"}}),
    "two tiles": ((ROWS, 0, 0, ALL), {"transforms": (plgpu.TilingTransform((8, 32)),)}),
}


@pytest.mark.parametrize(("part", "options"), PARTS.values(), ids=PARTS)
@refused
def test_a_part_is_one_pixel_of_each_window(part, options):
    copies(part, **options)


VIEWS = {
    "four dimensions": {"window_shape": (1, 1, 1, 1)},
    "images of another rank": {"window_shape": (3,)},
    "one pair": {"window_shape": (3, 3), "padding": ((1, 1),)},
    "a large window": {"window_shape": (300, 3)},
    "much padding": {"window_shape": (3, 3), "padding": ((200, 0), (0, 0))},
    "no window": {"window_shape": (9, 3)},
    "no pairs": {"window_shape": (3, 3), "padding": (1, 1)},
}


@pytest.mark.parametrize("options", VIEWS.values(), ids=VIEWS)
@refused
def test_windows_fit_images_and_tensor_maps(options):
    attempt(lambda x, *_: plgpu.im2col_ref(x, **options))  # HERE


USES = {
    "a part": lambda x: plgpu.im2col_ref(x.at[0:1], window_shape=(3, 3)),  # HERE
    "a read": lambda x: plgpu.im2col_ref(x, window_shape=(3, 3))[0],  # HERE
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@refused
def test_a_view_is_of_an_array_and_is_copied(use):
    attempt(lambda x, *_: use(x))


@refused
def test_channels_are_multiples_of_16_bytes():
    view = lambda x, *_: plgpu.im2col_ref(x, window_shape=(3, 3))  # noqa: E731  # HERE
    attempt(view, images=(2, 8, 8, 3))


GOOD = {
    "im2col_ref": Good(
        lambda e: {"ref": e.x.reshape(1, 64, -1), "window_shape": (1,)},
        lambda view, e: plgpu.copy_gmem_to_smem(
            view.at[:, 0, : e.s.shape[1]], e.s, e.b
        ),
    )
}
EFFECTS = {"im2col_ref.padding": ""}
FEATURES = [
    Row(
        "a pixel of each window of images (im2col)",
        upstream=("copy: im2col views",),
        operations=("copy_im2col",),
        runs="a_pixel_of_each_window",
        offline="the_instruction_adds_offsets_to_all_pixels",
        instruction=".im2col",
        omissions=omissions("load windows"),
    ),
]
