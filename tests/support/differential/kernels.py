# SPDX-License-Identifier: Apache-2.0
"""Kernels written once, in the names that `pallas_gpu` and upstream's Pallas share.

Each takes the module to write with as `plgpu` and the parameters of compilation, and
returns a function over arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as upstream_mosaic
from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu

import pallas_gpu as ours
from benchmarks.matmul import upstream_config
from pallas_gpu import mosaic, ops

F32, F16, BF16 = jnp.float32, jnp.float16, jnp.bfloat16
SEMANTICS = ("Lane", "Warpgroup")
Build = Callable[[Any, Any], Callable[..., Any]]


def array(shape: tuple[int, ...], dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel and the arguments it is compiled for.

    Attributes:
      ours: `ours(plgpu, params)` is the function over arrays.
      theirs: the same for upstream's names; of most kernels the same function.
      args: shapes and dtypes of its arguments.
      semantics: names of the semantics under which both sides take it.
    """

    ours: Build
    theirs: Build
    args: tuple[jax.ShapeDtypeStruct, ...]
    semantics: tuple[str, ...] = SEMANTICS


KERNELS: dict[str, Kernel] = {}


def _kernel(
    name: str,
    *args: jax.ShapeDtypeStruct,
    out: Any = None,
    scratch: Callable[[Any], Any] = lambda plgpu: (),
    semantics: tuple[str, ...] = SEMANTICS,
    **options: Any,
) -> Callable[[Callable[..., None]], None]:
    """Enters a body into the table: one of the names to write with, and references.

    Args:
      name: in the table.
      args: types of the arguments.
      out: that of the result, if not the first argument's.
      scratch: its declarations, of the names.
      semantics: as of `Kernel`.
      options: of the kernel.
    """

    def enter(body: Callable[..., None]) -> None:
        def build(plgpu, params):
            return plgpu.kernel(
                functools.partial(body, plgpu),
                out_type=args[0] if out is None else out,
                scratch_types=scratch(plgpu),
                compiler_params=params,
                **options,
            )

        KERNELS[name] = Kernel(build, build, args, semantics)

    return enter


def _transforms(plgpu: Any, columns: int, dtype: Any) -> tuple[Any, ...]:
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(columns * bits)
    tiling = plgpu.TilingTransform((8, swizzle * 8 // bits))
    return tiling, plgpu.SwizzleTransform(swizzle)


def _tiled(plgpu: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """SMEM as TMA and the tensor core want it."""
    return plgpu.SMEM(shape, dtype, transforms=_transforms(plgpu, shape[-1], dtype))


def _fetch(plgpu: Any, arrived: Any, *pairs: tuple[Any, Any]) -> None:
    for source, target in pairs:
        plgpu.copy_gmem_to_smem(source, target, arrived)
    plgpu.barrier_wait(arrived)


def _store(plgpu: Any, value: Any, result: Any, o: Any) -> None:
    """Stores a value by way of SMEM."""
    result[...] = value
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(result, o)
    plgpu.wait_smem_to_gmem(0)


# --- registers and GMEM ---------------------------------------------------------------


@_kernel("elementwise", array((128, 128)), array((128, 128)))
def elementwise(plgpu, x, y, o):
    o[...] = jnp.exp(x[...] * 2 + 1) + jnp.maximum(y[...], 0)


@_kernel("elementwise on a grid", array((512, 128), BF16), grid=(8,), grid_names=("i",))
def elementwise_on_a_grid(plgpu, x, o):
    rows = plgpu.ds(lax.axis_index("i") * 64, 64)
    o[rows] = (x[rows].astype(F32) * 0.5).astype(BF16)


@_kernel("polynomial", array((64, 128)), array((64, 128)))
def polynomial(plgpu, x, y, o):
    value = x[...]
    o[...] = ((value * 0.5 + 1) * value - 3) * value + y[...] * y[...]


@_kernel("softmax", array((64, 128)))
def softmax(plgpu, x, o):
    row = plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False)
    spread = lambda v: lax.broadcast_in_dim(v, row.shape, [0])  # noqa: E731
    power = jnp.exp(row - spread(jnp.max(row, axis=1)))
    o[...] = power / spread(jnp.sum(power, axis=1))


@_kernel("mask", array((64, 128)))
def mask(plgpu, x, o):
    wgmma = plgpu.Layout.WGMMA
    value = plgpu.load(x, layout=wgmma, optimized=False)
    rows = plgpu.broadcasted_iota(jnp.int32, (64, 128), 0, layout=wgmma)
    columns = plgpu.broadcasted_iota(jnp.int32, (64, 128), 1, layout=wgmma)
    o[...] = jnp.where(rows >= columns, value, -1e30)


@_kernel("loop over arrays", array((8, 64, 128)), out=array((64, 128)))
def loop_over_arrays(plgpu, x, o):
    first = x[0]

    def turn(i, carry):
        total, largest = carry
        value = x[i]
        return total + value, jnp.maximum(largest, value)

    total, largest = lax.fori_loop(1, 8, turn, (first, first))
    o[...] = total * largest


# --- SMEM and copies ------------------------------------------------------------------


@_kernel(
    "copy",
    array((512, 128), F16),
    scratch=lambda p: [_tiled(p, (64, 128), F16), p.Barrier()],
    grid=(8,),
    grid_names=("i",),
)
def copy(plgpu, x, o, buffer, arrived):
    rows = plgpu.ds(lax.axis_index("i") * 64, 64)
    plgpu.copy_gmem_to_smem(x.at[rows], buffer, arrived)
    plgpu.barrier_wait(arrived)
    plgpu.copy_smem_to_gmem(buffer, o.at[rows])
    plgpu.wait_smem_to_gmem(0)


@_kernel(
    "multicast",
    array((128, 128), F16),
    out=array((2, 128, 128), F16),
    scratch=lambda p: [_tiled(p, (128, 128), F16), p.Barrier()],
    cluster=(2,),
    cluster_names=("pair",),
)
def multicast(plgpu, x, o, buffer, arrived):
    plgpu.copy_gmem_to_smem(x, buffer, arrived, collective_axes="pair")
    plgpu.barrier_wait(arrived)
    plgpu.copy_smem_to_gmem(buffer, o.at[lax.axis_index("pair")])
    plgpu.wait_smem_to_gmem(0)


@_kernel(
    "plain SMEM",
    array((64, 128)),
    scratch=lambda p: [*[p.SMEM((64, 128), F32)] * 2, p.Barrier()],
)
def plain_smem(plgpu, x, o, source, result, arrived):
    _fetch(plgpu, arrived, (x, source))
    value = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
    _store(plgpu, value + 1, result, o)


@_kernel(
    "swizzled SMEM",
    array((64, 128), F16),
    scratch=lambda p: [*[_tiled(p, (64, 128), F16)] * 2, p.Barrier()],
)
def swizzled_smem(plgpu, x, o, source, result, arrived):
    _fetch(plgpu, arrived, (x, source))
    value = plgpu.load(source, layout=plgpu.Layout.WGMMA)
    _store(plgpu, value * 2, result, o)


@_kernel(
    "convert and store",
    array((64, 128)),
    out=array((64, 128), BF16),
    scratch=lambda p: [_tiled(p, (64, 128), BF16)],
)
def convert_and_store(plgpu, x, o, result):
    value = plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False)
    _store(plgpu, value.astype(BF16), result, o)


# --- tensor core ----------------------------------------------------------------------


def _product(name: str, dtype: Any, transposed=False, from_registers=False) -> None:
    """One tile: 64 x 128 of a product of depth 64."""
    b_shape = (128, 64) if transposed else (64, 128)
    shapes = (64, 64), b_shape, (64, 128)

    @_kernel(
        name,
        *(array(shape, dtype) for shape in shapes[:2]),
        out=array((64, 128), dtype),
        scratch=lambda p: [
            *(_tiled(p, shape, dtype) for shape in shapes),
            p.Barrier(num_arrivals=2),
        ],
    )
    def body(plgpu, a, b, o, a_smem, b_smem, result, arrived):
        _fetch(plgpu, arrived, (a, a_smem), (b, b_smem))

        def multiply(acc):
            left = a_smem
            if from_registers:
                left = plgpu.load(a_smem, layout=plgpu.Layout.WGMMA) * 2
            plgpu.wgmma(acc, left, b_smem.T if transposed else b_smem)
            return acc[...]

        product = plgpu.run_scoped(multiply, plgpu.ACC((64, 128), F32))
        _store(plgpu, product.astype(dtype), result, o)


_product("wgmma f16", F16)
_product("wgmma bf16", BF16)
_product("wgmma transposed b", F16, transposed=True)
_product("wgmma A in registers", F16, from_registers=True)
_TILE_K, _STAGES = 64, 2


@_kernel(
    "matmul with a ring",
    array((256, 512), F16),
    array((512, 256), F16),
    out=array((256, 256), F16),
    scratch=lambda p: [
        _tiled(p, (_STAGES, 128, _TILE_K), F16),
        _tiled(p, (_STAGES, _TILE_K, 128), F16),
        _tiled(p, (128, 128), F16),
        p.Barrier(num_arrivals=2, num_barriers=_STAGES),
    ],
    grid=(2, 2),
    grid_names=("i", "j"),
)
def matmul_with_a_ring(plgpu, a, b, o, a_ring, b_ring, result, full):
    rows = plgpu.ds(lax.axis_index("i") * 128, 128)
    columns = plgpu.ds(lax.axis_index("j") * 128, 128)

    def fetch(step, slot):
        depth = plgpu.ds(step * _TILE_K, _TILE_K)
        plgpu.copy_gmem_to_smem(a.at[rows, depth], a_ring.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(b.at[depth, columns], b_ring.at[slot], full.at[slot])

    for slot in range(_STAGES):
        fetch(slot, slot)

    def accumulate(acc):
        steps = a.shape[1] // _TILE_K

        def turn(step, _):
            slot = lax.rem(step, jnp.int32(_STAGES))
            plgpu.barrier_wait(full.at[slot])
            plgpu.wgmma(acc, a_ring.at[slot], b_ring.at[slot])
            plgpu.wgmma_wait(0)

            @plgpu.when(step + _STAGES < steps)
            def _():
                fetch(step + _STAGES, slot)

        lax.fori_loop(0, steps, turn, None)
        return acc[...]

    product = plgpu.run_scoped(accumulate, plgpu.ACC((128, 128), F32))
    _store(plgpu, product.astype(F16), result, o.at[rows, columns])


# --- layouts and transforms inferred --------------------------------------------------


@_kernel(
    "inferred wgmma",
    array((64, 64), F16),
    array((64, 128), F16),
    out=array((64, 128), F16),
    scratch=lambda p: [
        p.SMEM((64, 64), F16),
        p.SMEM((64, 128), F16),
        p.SMEM((64, 128), F16),
        p.Barrier(num_arrivals=2),
    ],
    semantics=("Warpgroup",),
)
def inferred_wgmma(plgpu, a, b, o, a_smem, b_smem, result, arrived):
    _fetch(plgpu, arrived, (a, a_smem), (b, b_smem))

    def multiply(acc):
        plgpu.wgmma(acc, a_smem, b_smem)
        return acc[...]

    product = plgpu.run_scoped(multiply, plgpu.ACC((64, 128), F32))
    _store(plgpu, jnp.maximum(product, 0).astype(F16), result, o)


@_kernel(
    "inferred softmax",
    array((64, 128)),
    out=array((64, 128), BF16),
    scratch=lambda p: [p.SMEM((64, 128), F32), p.SMEM((64, 128), BF16), p.Barrier()],
    semantics=("Warpgroup",),
)
def inferred_softmax(plgpu, x, o, source, result, arrived):
    _fetch(plgpu, arrived, (x, source))
    row = plgpu.layout_cast(source[...], plgpu.Layout.WGMMA)
    spread = lambda v: lax.broadcast_in_dim(v, row.shape, [0])  # noqa: E731
    power = jnp.exp(row - spread(jnp.max(row, axis=1)))
    _store(plgpu, (power / spread(jnp.sum(power, axis=1))).astype(BF16), result, o)


# --- ready kernels --------------------------------------------------------------------


def _persistent_matmul(config: ops.MatmulConfig) -> None:
    """The ready kernels of both sides, which share tiles and schedule, not text."""

    def ours(plgpu, params):
        return lambda a, b: ops.matmul(a, b, config=config, compiler_params=params)

    def theirs(plgpu, params):
        settings = upstream_config(config)
        size = config.cluster_size
        body = functools.partial(hopper_matmul_mgpu.kernel, config=settings)
        run = plgpu.kernel(
            body,
            out_type=array((4096, 4096), BF16),
            grid=(config.blocks // size,),
            grid_names=("cluster_grid",),
            cluster=(size,),
            cluster_names=("cluster",),
            num_threads=3,
            thread_name="wg",
            compiler_params=params,
        )
        return lambda a, b: run(a, b, None)

    name = "persistent matmul"
    if config.cluster is not None:
        name += " in clusters"
    square = array((4096, 4096), BF16)
    KERNELS[name] = Kernel(ours, theirs, (square, square))


# --- inline code ----------------------------------------------------------------------


@_kernel(
    "inline code",
    array((64, 128)),
    scratch=lambda plgpu: (_tiled(plgpu, (64, 32), F32),),
)
def _inline(plgpu, x, o, smem):
    """References and arrays in, an array out: the body is the same on both sides."""
    mgpu = mosaic if plgpu is ours else upstream_mosaic
    strided = plgpu.Layout.WG_STRIDED((64, 128), vec_size=2)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), strided),
        return_type=plgpu.ShapeDtypeStruct((64, 128), F32, strided),
    )
    def multiply(ctx, ref, y):
        return mgpu.FragmentedArray.load_strided(ref, vec_size=2) * y

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(_transforms(plgpu, 32, F32)),),
        return_type=plgpu.ShapeDtypeStruct((64, 32), F32, plgpu.Layout.WGMMA),
    )
    def read(ctx, ref):
        return mgpu.FragmentedArray.load_tiled(
            ref, swizzle=128, layout=mgpu.WGMMA_LAYOUT
        )

    smem[...] = plgpu.load(x.at[:, :32], layout=plgpu.Layout.WGMMA, optimized=False)
    plgpu.commit_smem()
    o[...] = multiply(x, plgpu.load(x, layout=strided, optimized=False))
    o.at[:, :32][...] = read(smem)


_persistent_matmul(ops.MatmulConfig(cluster=None))
_persistent_matmul(ops.MatmulConfig())
