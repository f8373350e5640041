# SPDX-License-Identifier: Apache-2.0
"""Good calls of public callables, from which tests depart in one argument.

Those of an operation are in the table GOOD of its test file.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import layouts
from pallas_gpu.layouts import TmemLayout
from pallas_gpu.primitives import _registry as registry
from tests.support import beside

F32, F16 = jnp.float32, jnp.float16
SHAPE = (64, 128)
OUT = jax.ShapeDtypeStruct(SHAPE, F32)
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
WGMMA_TILES = ((64, 8), (16, 8), (8, 8), (2,))
SPEC = plgpu.BlockSpec((8, 128), lambda i: (i, 0))


def nothing(*_: Any) -> None:
    """A body that ignores its arguments."""


def same(*arguments: Any, carry: Any = None) -> Any:
    """A body of a loop that returns its carry."""
    return carry if carry is not None or len(arguments) < 2 else arguments[-1]


@dataclasses.dataclass(frozen=True)
class Env:
    """What a body has: references, values and traced scalars."""

    x: Any
    o: Any
    s: Any
    b: Any
    a: Any
    w: Any
    n: Any
    q: Any
    acc: Any
    i: Any
    k: Any = None
    f: Any = None
    t: Any = None
    left: Any = None
    p: Any = None
    g: Any = None
    d: Any = None

    @property
    def array(self) -> Any:
        """An array in registers."""
        return jnp.zeros(SHAPE, F32)


SCRATCH = {
    "s": plgpu.SMEM(SHAPE, F32),
    "b": plgpu.Barrier(),
    "a": plgpu.SMEM((64, 64), F16, transforms=SWIZZLED),
    "w": plgpu.SMEM((64, 64), F16, transforms=SWIZZLED),
    "n": plgpu.SMEM((8, 16), jnp.int32),
    "q": plgpu.SemaphoreType.REGULAR,
}


# As `SCRATCH`, for operations of Blackwell's tensor core.
_TILES = plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32)
BLACKWELL_SCRATCH = {
    **SCRATCH,
    "b": plgpu.Barrier(orders_tensor_core=True),
    "acc": plgpu.TMEM((64, 64), F32),
    "k": plgpu.TryClusterCancelResult(),
    "left": plgpu.SMEM((128, 16), F16, transforms=_TILES),
    "p": plgpu.TMEM((128, 16), F16, packed=True),
    "f": plgpu.SMEM((1, 1, 32, 16), jnp.float8_e8m0fnu),
    "t": plgpu.TMEM((128, 4), jnp.float8_e8m0fnu, layout=TmemLayout.scales()),
    "g": plgpu.SMEM((1, 1, 128, 64), jnp.uint2),
    "d": plgpu.TMEM((128, 64), jnp.uint2, layout=TmemLayout.sparse_metadata()),
}


def kernel(
    body: Callable[[Env], None], *, blackwell: bool = False
) -> Callable[..., Any]:
    """Returns a kernel whose body gets an `Env`, on two devices along an axis `d`."""
    mesh = jax.sharding.AbstractMesh((2,), ("d",), (jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        _kernel(body, blackwell),
        mesh=mesh,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )


def _kernel(body: Callable[[Env], None], blackwell: bool) -> Callable[..., Any]:
    if blackwell:
        return plgpu.kernel(
            lambda x, o, **refs: body(Env(x=x, o=o, i=lax.axis_index("g"), **refs)),
            out_type=OUT,
            scratch_types=BLACKWELL_SCRATCH,
            grid=(2,),
            grid_names=("g",),
            compiler_params=plgpu.CompilerParams(target="sm_100a"),
        )

    def with_env(x, o, **refs):
        def scoped(acc):
            body(Env(x=x, o=o, acc=acc, i=lax.axis_index("g"), **refs))

        plgpu.run_scoped(scoped, plgpu.ACC((64, 64)))

    return plgpu.kernel(
        with_env,
        out_type=OUT,
        scratch_types=SCRATCH,
        grid=(2,),
        grid_names=("g",),
        cluster=(1,),
        cluster_names=("c",),
    )


def _none(result: Any, env: Any) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Good:
    """A call without a mistake.

    Attributes:
      arguments: by the names of the parameters; inside a body of an `Env`.
      then: what is done with the result.
      inside: whether the call is one of a body.
      blackwell: whether that body is one of a Blackwell kernel.
    """

    arguments: Callable[[Any], dict[str, Any]]
    then: Callable[[Any, Any], Any] = _none
    inside: bool = True
    blackwell: bool = False


def top(then: Callable[[Any, Any], Any] = _none, **arguments: Any) -> Good:
    """A call outside of kernels."""
    return Good(lambda _: arguments, then, inside=False)


def _trace(kernel: Any, _: Any) -> None:
    jax.eval_shape(kernel, OUT)


def _one_kernel(run: Callable[[], Any]) -> list[tuple[str, float]]:
    run()
    return [("kernel", 1.0)]


def _tunable(x: Any, *, config: Any) -> Any:
    return x


_halves = np.zeros((256, 256), F16)
_matrices, _sizes = np.zeros((2, 256, 256), F16), np.array([100, 156], np.int32)
_ragged_numbers = jax.lax.RaggedDotDimensionNumbers(
    (((1,), (1,)), ((), ())), (0,), (0,)
)
_bytes = np.zeros((32, 32), jnp.int8)
_floats8 = np.zeros((32, 32), jnp.float8_e4m3fn)
_scales8 = np.ones((32, 1), jnp.float8_e8m0fnu)
_heads = np.zeros((1, 128, 1, 64), F16)
_choices = np.zeros((256, 1), np.int32)
_attended = np.zeros((1, 2, 1, 4), F32), np.zeros((1, 1, 2), F32)
_run = lambda decorate, _: decorate(nothing)  # noqa: E731
_loop = lambda decorate, _: decorate(same)  # noqa: E731
_size = {"block_size": 8}

OTHERS: dict[str, Good | Callable[[Env], dict[str, Any]]] = {
    # Entry points
    "kernel": top(_trace, body=nothing, out_type=OUT),
    "pallas_call": top(_trace, kernel=nothing, out_shape=OUT),
    "run_scoped": lambda e: {"f": nothing, "types": (SCRATCH["s"],)},
    "with_scoped": top(lambda f, _: f(nothing), types=(SCRATCH["s"],)),
    "MemoryRef": top(
        inner_aval=jax.ShapeDtypeStruct((8,), F32), memory_space=plgpu.SMEM
    ),
    "empty": top(shape=(8,), dtype=F32),
    "empty_like": top(x=OUT),
    "empty_ref_like": top(x=OUT),
    "alloc_semaphore": top(),
    "check": top(fn=lambda x: x),
    "explain": top(fn=lambda x: x),
    "emulate_mesh": top(fn=lambda x: x),
    "force_gpu_interpret_mode": top(),
    "set_gpu_interpret_mode": top(params=None),
    "run_state": Good(
        lambda e: {"f": nothing}, lambda f, e: f(plgpu.ACC.init(jnp.zeros((64, 64))))
    ),
    "as_torch_kernel": top(fn=lambda x: x),
    "estimate_cost": top(fun=lambda x: x, args=(OUT,)),
    "lower_as_mlir": top(f=lambda x: kernel(nothing)(x), args=(OUT,)),
    "pallas_export_experimental": top(dynamic_shapes=False),
    "enable_debug_checks": top(new_val=True),
    # Without a kernel to compile, which would need the CUDA wheels.
    "offline.compile": top(fn=lambda x: x, args=(OUT,)),
    "offline.lower": top(fn=lambda x: kernel(nothing)(x), args=(OUT,)),
    "offline.current_target": top(),
    # Measurement, with a timer of a device that has no kernels but one
    "testing.do_bench": top(
        f=nothing,
        rounds=1,
        seconds=0.01,
        warmup=0,
        pause_seconds=0,
        flush_l2=False,
        timer=_one_kernel,
    ),
    "testing.kernel_times": top(run=nothing),
    "testing.measure": top(f=nothing, iterations=2),
    "testing.profile": top(f=nothing, space=8),
    "testing.Benchmark": top(
        x_names=["n"], x_vals=[1], line_arg="of", line_vals=["ours"]
    ),
    "testing.perf_report": top(
        benchmarks=plgpu.testing.Benchmark(
            x_names=["n"], x_vals=[1], line_arg="of", line_vals=["ours"]
        )
    ),
    "testing.rank": top(f=lambda x, config: x, configs=[1], args=(OUT,)),
    "autotune": top(
        lambda decorate, _: decorate(_tunable)(jnp.zeros((8,))), configs=[1], key="x"
    ),
    # Control flow and positions
    "when": Good(lambda e: {"condition": e.i == 0}, _run),
    "loop": Good(lambda e: {"lower": 0, "upper": 4, "init_carry": 1}, _loop),
    "warp_map": lambda e: {"f": nothing},
    "nd_loop": Good(
        lambda e: {"grid": (4, 2), "collective_axes": "g", "init_carry": 1}, _loop
    ),
    "dynamic_scheduling_loop": Good(
        lambda e: {"grid_names": "g", "cluster_axes": "c", "init_carry": 1}, _loop
    ),
    "planar_snake": lambda e: {
        "lin_idx": e.i,
        "shape": (4, 4),
        "minor_dim": 0,
        "tile_width": 2,
    },
    "program_id": lambda e: {"axis": 0},
    "num_programs": lambda e: {"axis": 0},
    "ds": Good(lambda e: {"start": 0, "size": 8}, lambda part, e: e.x.at[part][...]),
    "dslice": Good(
        lambda e: {"start": 0, "size": 8}, lambda part, e: e.x.at[part][...]
    ),
    "transpose_ref": lambda e: {"ref": e.x, "permutation": (1, 0)},
    "cdiv": lambda e: {"a": 7, "b": 2},
    "align_to": lambda e: {"a": 7, "alignment": 2},
    "next_power_of_2": top(x=7),
    "strides_from_shape": top(shape=(2, 3)),
    "emit_pipeline": Good(
        lambda e: {"body": same, "grid": (8,), "in_specs": [SPEC], "init_carry": 1},
        lambda run, e: run(e.x),
    ),
    "emit_pipeline_warp_specialized": lambda e: {
        "body": nothing,
        "grid": (8,),
        "in_specs": [SPEC],
        "wg_axis": "wg",
        "num_compute_wgs": 2,
        "memory_registers": 40,
    },
    "format_tcgen05_sparse_metadata": top(
        meta=np.zeros((128, 32, 2), jnp.uint2), operand_dtype=F16
    ),
    **dict.fromkeys(
        ("compress_1_of_2", "compress_2_of_4", "compress_4_of_8"),
        top(a=np.zeros((2, 8))),
    ),
    "triton.dot": lambda e: {"a": jnp.zeros((64, 32)), "b": jnp.zeros((32, 64))},
    "triton.approx_tanh": lambda e: {"x": e.array},
    "triton.elementwise_inline_asm": lambda e: {
        "asm": "add.f32 $0, $1, $1;",
        "args": [e.array],
        "constraints": "=f,f",
        "pack": 1,
        "result_shape_dtypes": [jax.ShapeDtypeStruct(e.array.shape, e.array.dtype)],
    },
    "triton.max_contiguous": lambda e: {"x": e.i, "values": 8},
    "triton.debug_barrier": lambda e: {},
    # Declarations
    "ACC": top(shape=(64, 64), dtype=F32),
    "WGMMAAccumulatorRef": top(shape=(64, 64), dtype=F32),
    "WGMMAAccumulatorRef.init": lambda e: {"array": jnp.zeros((64, 64))},
    "ACC.init": lambda e: {"array": jnp.zeros((64, 64))},
    "GMEM": top(shape=SHAPE, dtype=F32),
    "ANY": top(shape=SHAPE, dtype=F32),
    "SMEM": top(shape=SHAPE, dtype=F32),
    "TMEM": top(shape=(128, 64), dtype=F32),
    "REGS": top(shape=SHAPE, dtype=F32),
    "RefUnion": top(refs=(plgpu.SMEM(SHAPE, F32), plgpu.SMEM(SHAPE, F32))),
    "Barrier": top(),
    "ClusterBarrier": top(collective_axes="c"),
    "SemaphoreType.REGULAR": top(shape=(4,)),
    "SemaphoreType.BARRIER": top(shape=(4,)),
    "BlockSpec": top(block_shape=(8, 128), index_map=lambda i: (i, 0)),
    "Blocked": top(**_size),
    "Element": top(**_size),
    "Squeezed": top(),
    "BoundedSlice": top(**_size),
    "GridSpec": top(),
    "PrefetchScalarGridSpec": top(num_scalar_prefetch=1),
    "Mesh": top(),
    "WarpMesh": top(axis_name="warp"),
    "TilingTransform": top(tiling=(8, 64)),
    "SwizzleTransform": top(swizzle=128),
    "find_swizzle": top(minor_dim_bits=1024),
    # Layouts
    "TiledLayout": top(
        tiling=plgpu.Tiling(WGMMA_TILES),
        warp_dims=(-7,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    ),
    "TiledLayout.draw": top(self=layouts.to_layout(plgpu.Layout.WGMMA), shape=(64, 8)),
    "TiledLayout.reduce": top(self=layouts.to_layout(plgpu.Layout.WGMMA), axes=0),
    "TiledLayout.linear": top(
        self=layouts.to_layout(plgpu.Layout.WGMMA), shape=(64, 64)
    ),
    "Tiling": top(tiles=WGMMA_TILES),
    "Tiling.tile_shape": top(self=plgpu.Tiling(WGMMA_TILES), shape=(64, 64)),
    "Replicated": top(times=2),
    "Layout.WG_STRIDED": top(shape=SHAPE, vec_size=2),
    "Layout.WG_SPLAT": top(),
    "Layout.SMEM_GMEM_COPY": top(shape=SHAPE, dtype=F32, swizzle=128),
    "Layout.TCGEN05_TMEM_NATIVE": top(),
    "Layout.TCGEN05_M64_COLLECTIVE": top(columns=32),
    "Layout.TCGEN05_M64_COLLECTIVE_NATIVE": top(columns=32),
    "Layout.MMA_LHS": top(dtype=F16),
    "Layout.MMA_RHS": top(dtype=F16),
    "Layout.MMA_ACC": top(),
    "layouts.WGStridedLayout": top(shape=SHAPE, vec_size=2),
    "layouts.WGStridedLayout.default": top(shape=SHAPE, bits=32),
    "layouts.WGSplatLayout": top(shape=SHAPE),
    "layouts.TmemLayout": top(kind=layouts.TmemKind.DEFAULT),
    "layouts.TmemLayout.default": top(),
    "layouts.TmemLayout.half_lane": top(columns=32),
    "layouts.TmemLayout.m64_collective": top(columns=32),
    "layouts.TmemLayout.scales": top(),
    "layouts.TmemLayout.scales_m64_collective": top(),
    "layouts.TmemLayout.sparse_metadata": top(),
    "layouts.TmemLayout.from_tiled": top(tiled=layouts.TmemLayout.default().tiled),
    "layouts.draw": top(layout=plgpu.Layout.WGMMA, shape=(64, 8)),
    # Parameters
    "CompilerParams": top(),
    "CostEstimate": top(flops=1, transcendentals=0, bytes_accessed=8),
    "InterpretParams": top(),
    "InterpretGPUParams": top(),
    "arch.target": top(name="sm_90a"),
    "arch.target_of_capability": top(major=9, minor=0),
    # Ready kernels
    "ops.matmul": top(a=_halves, b=_halves),
    "ops.linear": top(x=_halves, w=_halves),
    "ops.quantize": top(w=_halves),
    "ops.scaled_matmul": top(a=_bytes, b=_bytes),
    "ops.block_scaled_matmul": top(
        lhs=_floats8, rhs=_floats8, lhs_scales=_scales8, rhs_scales=_scales8
    ),
    "ops.quantize_blocks": top(x=_halves),
    "ops.attention": top(q=_heads, k=_heads, v=_heads),
    "ops.dot_product_attention": top(query=_heads, key=_heads, value=_heads),
    "ops.ragged_dot": top(lhs=_halves, rhs=_matrices, group_sizes=_sizes),
    "ops.ragged_dot_general": top(
        lhs=_halves,
        rhs=_matrices,
        group_sizes=_sizes,
        ragged_dot_dimension_numbers=_ragged_numbers,
    ),
    "ops.softmax": top(x=_halves),
    "ops.log_softmax": top(x=_halves),
    "ops.rms_norm": top(x=_halves),
    "ops.layer_norm": top(x=_halves),
    "ops.rotary_embedding": top(x=_heads),
    "ops.linear_cross_entropy": top(
        x=_halves, w=_halves, labels=np.zeros(256, np.int32)
    ),
    "ops.top_k": top(x=_halves, k=2),
    "ops.row_kernel": top(reduce=[], apply=nothing),
    # Along no axis there is one device, with or without a `jax.shard_map`.
    **{
        f"ops.collectives.{name}": top(x=_halves, axis_name=())
        for name in ("all_gather", "reduce_scatter", "all_reduce", "rotate")
    },
    "ops.collectives.all_to_all": top(
        x=_halves, axis_name=(), split_axis=0, concat_axis=0
    ),
    **{
        f"ops.collectives.{name}": top(x=_halves, w=_halves, axis_name=())
        for name in ("all_gather_matmul", "matmul_reduce_scatter")
    },
    "ops.collectives.dispatch": top(
        x=_halves, experts=_choices, axis_name=(), num_experts=1
    ),
    "ops.collectives.combine": top(
        y=_halves[None, None],
        experts=_choices,
        slots=_choices,
        weights=_choices.astype(F32),
        axis_name=(),
    ),
    "ops.collectives.ring_attention": top(q=_heads, k=_heads, v=_heads, axis_name=()),
    "ops.collectives.merge": top(a=_attended, b=_attended),
    "ops.collectives.unreachable": top(axis_name=()),
    "ops.Reduction": top(initial=0.0, step=nothing),
    "ops.decode_attention": top(q=_heads[:, 0], k=_heads, v=_heads),
    "ops.DecodeConfig": top(),
    "ops.MatmulConfig": top(),
    "ops.RaggedDotConfig": top(),
    "ops.RaggedDotConfig.default": top(groups=4),
    "ops.BlackwellMatmulConfig": top(),
    "ops.BlockScaledMatmulConfig": top(),
    "ops.SplitMatmulConfig": top(),
    "ops.LinearFewConfig": top(),
    "ops.LinearManyConfig": top(),
    "ops.ScaledMatmulConfig": top(),
    "ops.AttentionConfig": top(),
    "ops.AttentionConfig.default": top(head_dim=64),
    "ops.AttentionBackwardConfig": top(),
    "ops.AttentionBackwardConfig.default": top(head_dim=64),
    "ops.BlackwellAttentionConfig": top(),
    "ops.BlackwellAttentionConfig.default": top(head_dim=64),
    "ops.clear_cache": top(),
}


@functools.cache
def good() -> dict[str, Good]:
    """All good calls: those of the tables GOOD of test files, and others."""
    rows = beside.merged("GOOD", OTHERS)
    for name, row in rows.items():
        if not isinstance(row, Good):
            rows[name] = Good(row, blackwell=_hopper_lacks(name))
    return rows


def _hopper_lacks(name: str) -> bool:
    operation = registry.PRIMITIVES.get(name)
    feature = None if operation is None else operation.feature
    return feature is not None and not plgpu.arch.target("sm_90a").has(feature)


# Methods and operators of references: from an Env and a wrong value to a call.
METHODS: dict[str, dict[str, Callable[[Env, Any], Any]]] = {
    "at": {"idx": lambda e, v: e.x.at[v]},
    "[]": {"idx": lambda e, v: e.x[v], "second": lambda e, v: e.x[0, v]},
    "[]=": {
        "idx": lambda e, v: e.o.__setitem__(v, 0.0),
        "value": lambda e, v: e.o.__setitem__(..., v),
    },
    "get": {"idx": lambda e, v: e.x.get(v)},
    "set": {"value": lambda e, v: e.o.set(v), "idx": lambda e, v: e.o.set(0.0, v)},
    "swap": {"value": lambda e, v: e.s.swap(v), "idx": lambda e, v: e.s.swap(0.0, v)},
    "addupdate": {
        "value": lambda e, v: e.s.addupdate(v),
        "idx": lambda e, v: e.s.addupdate(0.0, v),
    },
    "transpose": {
        "permutation": lambda e, v: e.x.transpose(v),
        "second": lambda e, v: e.x.transpose(0, v),
    },
    "reshape": {"shape": lambda e, v: e.x.reshape(v)},
    "bitcast": {"dtype": lambda e, v: e.x.bitcast(v)},
    "memory_space_cast": {"space": lambda e, v: e.x.memory_space_cast(v)},
    "slices": {
        "start": lambda e, v: e.x[v:8],
        "stop": lambda e, v: e.x[0:v],
        "step": lambda e, v: e.x[0:8:v],
    },
    "barrier": {"idx": lambda e, v: plgpu.barrier_wait(e.b.at[v])},
}


@functools.cache
def plain() -> list[Any]:
    """Values that exist anywhere; in a body, too, the arrays are not traced."""
    with jax.ensure_compile_time_eval():
        arrays = [jnp.zeros((2, 2)), jnp.ones((), bool)]
    return [
        None, True, -1, 0, 3, 2**40, -(10**30), 0.5, float("nan"), float("inf"), 1j,
        "a", "", b"a", (), (1, -1), (0.5,), (None,), ("a",), [None], [[1, 2], [3]], {},
        {"a": 1}, {1: 2}, set(), object(), object, int, np.int64(3), np.float32(0.5),
        np.bool_(True), np.arange(3), np.zeros((0,)), np.array("a"), slice(None), ...,
        *arrays, jax.ShapeDtypeStruct((8,), F32), jnp.float32,
        nothing, lambda: None, lambda a, b, c, d, e, f: None, plgpu, plgpu.Barrier,
        plgpu.Barrier(), SCRATCH["s"], plgpu.SMEM, plgpu.LoweringSemantics.Lane,
        plgpu.Layout.WGMMA, plgpu.Layout.WG_STRIDED, plgpu.CompilerParams(), SPEC,
        plgpu.ds(0, 8), ValueError("a"),
    ]  # fmt: skip


def traced(env: Env) -> list[Any]:
    """Values that exist only inside a body."""
    return [
        env.i, env.i == 0, env.i * 0.5, jnp.arange(3) + env.i, env.array, env.x, env.s,
        env.b, env.acc, env.x.at[0], env.x.at[plgpu.ds(env.i, 8)], env.x.T, env.x.at,
    ]  # fmt: skip
