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
from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu

from benchmarks.matmul import upstream_config
from pallas_gpu import ops

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
    semantics: tuple[str, ...] = SEMANTICS,
) -> Callable[[Build], Build]:
    """Enters a function into the table."""

    def enter(build: Build) -> Build:
        KERNELS[name] = Kernel(build, build, args, semantics)
        return build

    return enter


def _transforms(plgpu: Any, columns: int, dtype: Any) -> tuple[Any, ...]:
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(columns * bits)
    tiling = plgpu.TilingTransform((8, swizzle * 8 // bits))
    return tiling, plgpu.SwizzleTransform(swizzle)


def _tiled(plgpu: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """SMEM as TMA and the tensor core want it."""
    return plgpu.SMEM(shape, dtype, transforms=_transforms(plgpu, shape[-1], dtype))


# --- registers and GMEM ---------------------------------------------------------------


@_kernel("elementwise", array((128, 128)), array((128, 128)))
def elementwise(plgpu, params):
    def body(x, y, o):
        o[...] = jnp.exp(x[...] * 2 + 1) + jnp.maximum(y[...], 0)

    return plgpu.kernel(body, out_type=array((128, 128)), compiler_params=params)


@_kernel("elementwise on a grid", array((512, 128), BF16))
def elementwise_on_a_grid(plgpu, params):
    def body(x, o):
        rows = plgpu.ds(lax.axis_index("i") * 64, 64)
        o[rows] = (x[rows].astype(F32) * 0.5).astype(BF16)

    return plgpu.kernel(
        body,
        out_type=array((512, 128), BF16),
        grid=(8,),
        grid_names=("i",),
        compiler_params=params,
    )


@_kernel("polynomial", array((64, 128)), array((64, 128)))
def polynomial(plgpu, params):
    def body(x, y, o):
        value = x[...]
        o[...] = ((value * 0.5 + 1) * value - 3) * value + y[...] * y[...]

    return plgpu.kernel(body, out_type=array((64, 128)), compiler_params=params)


@_kernel("softmax", array((64, 128)))
def softmax(plgpu, params):
    def body(x, o):
        row = plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False)
        spread = lambda v: lax.broadcast_in_dim(v, row.shape, [0])  # noqa: E731
        power = jnp.exp(row - spread(jnp.max(row, axis=1)))
        o[...] = power / spread(jnp.sum(power, axis=1))

    return plgpu.kernel(body, out_type=array((64, 128)), compiler_params=params)


@_kernel("mask", array((64, 128)))
def mask(plgpu, params):
    def body(x, o):
        wgmma = plgpu.Layout.WGMMA
        value = plgpu.load(x, layout=wgmma, optimized=False)
        rows = plgpu.broadcasted_iota(jnp.int32, (64, 128), 0, layout=wgmma)
        columns = plgpu.broadcasted_iota(jnp.int32, (64, 128), 1, layout=wgmma)
        o[...] = jnp.where(rows >= columns, value, -1e30)

    return plgpu.kernel(body, out_type=array((64, 128)), compiler_params=params)


@_kernel("loop over arrays", array((8, 64, 128)))
def loop_over_arrays(plgpu, params):
    def body(x, o):
        first = x[0]

        def turn(i, carry):
            total, largest = carry
            value = x[i]
            return total + value, jnp.maximum(largest, value)

        total, largest = lax.fori_loop(1, 8, turn, (first, first))
        o[...] = total * largest

    return plgpu.kernel(body, out_type=array((64, 128)), compiler_params=params)


# --- SMEM and copies ------------------------------------------------------------------


@_kernel("copy", array((512, 128), F16))
def copy(plgpu, params):
    def body(x, o, buffer, arrived):
        rows = plgpu.ds(lax.axis_index("i") * 64, 64)
        plgpu.copy_gmem_to_smem(x.at[rows], buffer, arrived)
        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(buffer, o.at[rows])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=array((512, 128), F16),
        grid=(8,),
        grid_names=("i",),
        scratch_types=[_tiled(plgpu, (64, 128), F16), plgpu.Barrier()],
        compiler_params=params,
    )


@_kernel("multicast", array((128, 128), F16))
def multicast(plgpu, params):
    def body(x, o, buffer, arrived):
        plgpu.copy_gmem_to_smem(x, buffer, arrived, collective_axes="pair")
        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(buffer, o.at[lax.axis_index("pair")])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=array((2, 128, 128), F16),
        cluster=(2,),
        cluster_names=("pair",),
        scratch_types=[_tiled(plgpu, (128, 128), F16), plgpu.Barrier()],
        compiler_params=params,
    )


@_kernel("plain SMEM", array((64, 128)))
def plain_smem(plgpu, params):
    def body(x, o, source, result, arrived):
        plgpu.copy_gmem_to_smem(x, source, arrived)
        plgpu.barrier_wait(arrived)
        value = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
        result[...] = value + 1
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, o)
        plgpu.wait_smem_to_gmem(0)

    plain = plgpu.SMEM((64, 128), F32)
    return plgpu.kernel(
        body,
        out_type=array((64, 128)),
        scratch_types=[plain, plain, plgpu.Barrier()],
        compiler_params=params,
    )


@_kernel("swizzled SMEM", array((64, 128), F16))
def swizzled_smem(plgpu, params):
    def body(x, o, source, result, arrived):
        plgpu.copy_gmem_to_smem(x, source, arrived)
        plgpu.barrier_wait(arrived)
        value = plgpu.load(source, layout=plgpu.Layout.WGMMA)
        result[...] = value * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, o)
        plgpu.wait_smem_to_gmem(0)

    tiled = _tiled(plgpu, (64, 128), F16)
    return plgpu.kernel(
        body,
        out_type=array((64, 128), F16),
        scratch_types=[tiled, tiled, plgpu.Barrier()],
        compiler_params=params,
    )


@_kernel("convert and store", array((64, 128)))
def convert_and_store(plgpu, params):
    def body(x, o, result):
        value = plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False)
        result[...] = value.astype(BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, o)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=array((64, 128), BF16),
        scratch_types=[_tiled(plgpu, (64, 128), BF16)],
        compiler_params=params,
    )


# --- tensor core ----------------------------------------------------------------------


def _product(dtype: Any, transposed: bool = False, from_registers: bool = False):
    """One tile: 64 x 128 of a product of depth 64."""

    def build(plgpu, params):
        def body(a, b, o, a_smem, b_smem, result, arrived):
            plgpu.copy_gmem_to_smem(a, a_smem, arrived)
            plgpu.copy_gmem_to_smem(b, b_smem, arrived)
            plgpu.barrier_wait(arrived)

            def multiply(acc):
                left = a_smem
                if from_registers:
                    left = plgpu.load(a_smem, layout=plgpu.Layout.WGMMA) * 2
                plgpu.wgmma(acc, left, b_smem.T if transposed else b_smem)
                return acc[...]

            product = plgpu.run_scoped(multiply, plgpu.ACC((64, 128), F32))
            result[...] = product.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result, o)
            plgpu.wait_smem_to_gmem(0)

        b_shape = (128, 64) if transposed else (64, 128)
        return plgpu.kernel(
            body,
            out_type=array((64, 128), dtype),
            scratch_types=[
                _tiled(plgpu, (64, 64), dtype),
                _tiled(plgpu, b_shape, dtype),
                _tiled(plgpu, (64, 128), dtype),
                plgpu.Barrier(num_arrivals=2),
            ],
            compiler_params=params,
        )

    return build


_A, _B = array((64, 64), F16), array((64, 128), F16)
_kernel("wgmma f16", _A, _B)(_product(F16))
_kernel("wgmma bf16", array((64, 64), BF16), array((64, 128), BF16))(_product(BF16))
_kernel("wgmma transposed b", _A, array((128, 64), F16))(_product(F16, transposed=True))
_kernel("wgmma A in registers", _A, _B)(_product(F16, from_registers=True))


@_kernel("matmul with a ring", array((256, 512), F16), array((512, 256), F16))
def matmul_with_a_ring(plgpu, params, tile_m=128, tile_n=128, tile_k=64, stages=2):
    m, n, k = 256, 256, 512

    def body(a, b, o, a_ring, b_ring, result, full):
        rows = plgpu.ds(lax.axis_index("i") * tile_m, tile_m)
        columns = plgpu.ds(lax.axis_index("j") * tile_n, tile_n)

        def fetch(step, slot):
            depth = plgpu.ds(step * tile_k, tile_k)
            plgpu.copy_gmem_to_smem(a.at[rows, depth], a_ring.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(
                b.at[depth, columns], b_ring.at[slot], full.at[slot]
            )

        for slot in range(stages):
            fetch(slot, slot)

        def accumulate(acc):
            def turn(step, _):
                slot = lax.rem(step, jnp.int32(stages))
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, a_ring.at[slot], b_ring.at[slot])
                plgpu.wgmma_wait(0)

                @plgpu.when(step + stages < k // tile_k)
                def _():
                    fetch(step + stages, slot)

            lax.fori_loop(0, k // tile_k, turn, None)
            return acc[...]

        product = plgpu.run_scoped(accumulate, plgpu.ACC((tile_m, tile_n), F32))
        result[...] = product.astype(F16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, o.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=array((m, n), F16),
        grid=(m // tile_m, n // tile_n),
        grid_names=("i", "j"),
        scratch_types=[
            _tiled(plgpu, (stages, tile_m, tile_k), F16),
            _tiled(plgpu, (stages, tile_k, tile_n), F16),
            _tiled(plgpu, (tile_m, tile_n), F16),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ],
        compiler_params=params,
    )


# --- layouts and transforms inferred --------------------------------------------------


@_kernel("inferred wgmma", _A, _B, semantics=("Warpgroup",))
def inferred_wgmma(plgpu, params):
    def body(a, b, o, a_smem, b_smem, result, arrived):
        plgpu.copy_gmem_to_smem(a, a_smem, arrived)
        plgpu.copy_gmem_to_smem(b, b_smem, arrived)
        plgpu.barrier_wait(arrived)

        def multiply(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        product = plgpu.run_scoped(multiply, plgpu.ACC((64, 128), F32))
        result[...] = jnp.maximum(product, 0).astype(F16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, o)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=array((64, 128), F16),
        scratch_types=[
            plgpu.SMEM((64, 64), F16),
            plgpu.SMEM((64, 128), F16),
            plgpu.SMEM((64, 128), F16),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=params,
    )


@_kernel("inferred softmax", array((64, 128)), semantics=("Warpgroup",))
def inferred_softmax(plgpu, params):
    def body(x, o, source, result, arrived):
        plgpu.copy_gmem_to_smem(x, source, arrived)
        plgpu.barrier_wait(arrived)
        row = plgpu.layout_cast(source[...], plgpu.Layout.WGMMA)
        spread = lambda v: lax.broadcast_in_dim(v, row.shape, [0])  # noqa: E731
        power = jnp.exp(row - spread(jnp.max(row, axis=1)))
        result[...] = (power / spread(jnp.sum(power, axis=1))).astype(BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, o)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=array((64, 128), BF16),
        scratch_types=[
            plgpu.SMEM((64, 128), F32),
            plgpu.SMEM((64, 128), BF16),
            plgpu.Barrier(),
        ],
        compiler_params=params,
    )


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


_persistent_matmul(ops.MatmulConfig(cluster=None))
_persistent_matmul(ops.MatmulConfig())
