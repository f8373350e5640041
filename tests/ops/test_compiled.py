# SPDX-License-Identifier: Apache-2.0
"""Each configuration of the ready kernels is compiled once: ptxas spills nothing.

It also says nothing: where a product is not asynchronous, it remarks that it has to
wait for it by itself. Types, kinds and lowering semantics that do not depend on each
other take turns over the rows, so that each occurs with each size of a kernel's tiles.
test_compiled.txt has the registers and the blocks per SM of each kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_gpu as plgpu
from pallas_gpu import ops
from pallas_gpu.ops.gemm import choice
from tests.ops.gemm.test_few_heuristic import PROBLEMS
from tests.support import golden

BF16, F16, F32, I32 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32
E4M3, E2M1, E8M0 = jnp.float8_e4m3fn, jnp.float4_e2m1fn, jnp.float8_e8m0fnu
Lane, Warpgroup = plgpu.LoweringSemantics.Lane, plgpu.LoweringSemantics.Warpgroup


@dataclasses.dataclass(frozen=True)
class Row:
    """A call to compile.

    Attributes:
      call: the function.
      args: types and shapes of its arguments.
      kernels: that it consists of.
      spilled: bytes that a kernel may spill, where registers are known to be too few.
      target: of the compilation.
      also: checks the report of the first kernel.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kernels: int = 1
    spilled: int = 0
    target: str = "sm_90a"
    also: Callable[[Any], None] = lambda report: None


def of(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def product(m, n, k, dtype=BF16, **options):
    args = of(m, k, dtype=dtype), of(k, n, dtype=dtype)
    return Row(functools.partial(ops.matmul, **options), args)


def epilogue(*names, **options):
    x, bias = of(4096, 4096), of(4096)

    def call(a, b, *others):
        return ops.matmul(a, b, **dict(zip(names, others, strict=True)), **options)

    return Row(call, (x, x, *(bias if n == "bias" else x for n in names)))


def few_rows(p):
    a = (p.batch, p.k, p.m) if p.transpose_a else (p.batch, p.m, p.k)
    b = (p.batch, p.n, p.k) if p.transpose_b else (p.batch, p.k, p.n)
    gate = [of(*b, dtype=p.dtype)] if p.epilogue.gated else []

    def call(a, b, *gate):
        return ops.matmul(
            a,
            b,
            gate=gate[0] if gate else None,
            activation=p.epilogue.activation,
            transpose_a=p.transpose_a,
            transpose_b=p.transpose_b,
            config=choice.best_of_few(p),
        )

    return Row(call, (of(*a, dtype=p.dtype), of(*b, dtype=p.dtype), *gate))


def blackwell(size, semantics, out, **changes):
    config = ops.BlackwellMatmulConfig(**changes)
    params = plgpu.CompilerParams(target="sm_100a", lowering_semantics=semantics)
    options = {"config": config, "out_dtype": out, "compiler_params": params}

    def also(report):
        assert report.resources.tmem_columns == 512
        # One buffer of K = 64 is four instructions.
        assert report.instruction_counts["tcgen05.mma"] == 4
        assert report.instruction_counts["tcgen05.commit"] == 2
        assert f"tcgen05.mma.cta_group::{config.ctas}.kind::f16" in report.ptx
        requests = report.ptx.count("clusterlaunchcontrol.try_cancel.async")
        assert requests == int(config.dynamic)

    row = product(size, size, size, **options)
    return dataclasses.replace(row, target="sm_100a", also=also)


PAIRS = {"collective": True, "stages": 6}
GEMM = {
    "matmul": product(4096, 4096, 4096),
    "matmul, tiles of edges": product(1000, 6144, 4096),
    "matmul, rows that TMA cannot address": product(4095, 4097, 4099),
    "matmul, float32": product(2048, 2048, 2048, F32),
    **{
        f"matmul, float32 transposed in registers, cluster {cluster}": product(
            512, 512, 512, F32,
            config=ops.MatmulConfig(
                tile_m=64, tile_n=256, tile_k=32, epilogue_n=32,
                cluster=cluster, transposed=True,
            ),
        )
        for cluster in (None, "m")
    },
    "matmul, bias": epilogue("bias", activation="gelu"),
    "matmul, residual": epilogue("bias", "residual", activation="gelu_exact"),
    "matmul, gate": epilogue("gate", "residual"),
    **{
        f"matmul, few rows, {p.batch}x{p.m}x{p.n}x{p.k}, {p.dtype}": few_rows(p)
        for p in PROBLEMS
    },
    **{
        f"matmul on Blackwell, {name}, {out}": blackwell(size, semantics, out, **c)
        for name, size, c in (
            ("one CTA", 4096, {}), ("edges", 1000, {}), ("pairs", 4096, PAIRS),
            ("dynamic", 4096, {**PAIRS, "dynamic": True}),
        )
        for semantics, out in ((Lane, "float32"), (Warpgroup, "bfloat16"))
    },
}  # fmt: skip


def attention(d, dtype=F16, shape=(4, 4096, 16), **options):
    x = of(*shape, d, dtype=dtype)
    return Row(functools.partial(ops.attention, **options), (x, x, x))


def with_options(d, arrays, **static):
    """Attention with arrays for some of its options."""
    shape = (1000, 4, d) if "cu_seqlens_q" in arrays else (2, 1000, 4, d)
    types = {"bias": F32, "alibi_slopes": F32}
    given = {n: of(*s, dtype=types.get(n, I32)) for n, s in arrays.items()}

    def call(q, k, v, given):
        return ops.attention(q, k, v, **given, **static)

    return Row(call, (*[of(*shape)] * 3, given))


SEGMENTS = {"q_segment_ids": (2, 1000), "kv_segment_ids": (2, 1000)}
STARTS = {"cu_seqlens_q": (9,), "cu_seqlens_kv": (9,)}
# Options, and the sizes of heads: those leave other registers.
OPTIONS = {
    "window": ((64, 256), {}, {"window": (100, 0), "return_logsumexp": True}),
    "soft cap": ((128,), {}, {"soft_cap": 30.0, "causal": True}),
    "bias": ((64, 128), {"bias": (1, 4, 1000, 1000)}, {}),
    "bias of columns": ((256,), {"bias": (2, 1, 1, 1000)}, {}),
    "ALiBi": ((128,), {"alibi_slopes": (4,)}, {}),
    "segments": ((128, 256), SEGMENTS, {"causal": True}),
    "lengths": ((64,), {"kv_lengths": (2,)}, {}),
    "packed": ((128, 256), STARTS, {"causal": True}),
}


def blackwell_attention(d, semantics, length, causal):
    params = plgpu.CompilerParams(
        target="sm_100a", approx_math=True, lowering_semantics=semantics
    )

    def also(report):
        assert report.resources.stack_bytes == 0
        counts = report.instruction_counts
        # Rows are in single threads: maxima and sums exchange nothing between lanes.
        assert counts["shfl"] == 1
        assert {"tcgen05.mma", "tcgen05.ld", "tcgen05.st"} <= counts.keys()

    options = {"causal": causal, "compiler_params": params}
    row = attention(d, BF16, (4, length, 16), **options)
    return dataclasses.replace(row, target="sm_100a", also=also)


def derivatives(row, kernels, out=None, spilled=0):
    """Those of a row's operands but for the last ones, which are integers."""
    floats = [x for x in row.args if x.dtype != I32]
    out = out or row.args[0]

    def call(*args):
        *operands, cotangent = args
        integers = operands[len(floats) :]
        _, pullback = jax.vjp(
            lambda *x: row.call(*x, *integers), *operands[: len(floats)]
        )
        return pullback(cotangent)

    return Row(call, (*row.args, out), kernels, spilled)


def backward(d, length=4096, heads=8, batch=2, spilled=0, **options):
    row = attention(d, BF16, (batch, length, heads), **options)
    kernels = 3 + options.get("deterministic", False)
    return derivatives(row, kernels, spilled=spilled)


def biased_backward(d, shape, dtype):
    def call(q, k, v, bias):
        return ops.attention(q, k, v, bias=bias, causal=True)

    row = Row(call, (*[of(2, 2048, 8, d)] * 3, of(*shape, dtype=dtype)))
    return derivatives(row, 5)


def packed_backward(d, deterministic, spilled):
    def call(q, k, v, starts):
        return ops.attention(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts,
            causal=True, deterministic=deterministic,
        )  # fmt: skip

    row = Row(call, (*[of(4096, 8, d)] * 3, of(9, dtype=I32)))
    return derivatives(row, 3 + deterministic, spilled=spilled)


def decode(batch, cache=BF16, q_len=1, d=128):
    def call(q, k, v, lengths):
        return ops.decode_attention(q, k, v, lengths=lengths)

    kv = of(batch, 8192, 8, d, dtype=cache)
    args = of(batch, q_len, 32, d), kv, kv, of(batch, dtype=I32)
    # Five warpgroups have 96 registers a thread, and lengths take some: a few words are
    # spilled. With fewer warpgroups 8-bit caches are slower.
    return Row(call, args, spilled=0 if cache == BF16 else 64)


FULL = 1, 8, 2048, 2048
FLASH = {
    "attention, 64": attention(64, causal=True),
    "attention, 128": attention(128),
    "attention, 256": attention(256, causal=True),
    "attention, blocks of 144": attention(
        128, causal=True, config=ops.AttentionConfig(block_kv=144)
    ),
    "attention, maxima are kept": attention(
        128, config=ops.AttentionConfig(blocks=132, keep_maxima=True)
    ),
    **{
        f"attention, {name}, {d}": with_options(d, arrays, **static)
        for name, (sizes, arrays, static) in OPTIONS.items()
        for d in sizes
    },
    **{
        f"attention, float8, {d}": attention(
            d, E4M3, (2, 4096, 8), causal=d != 128, q_scale=0.5
        )
        for d in (64, 128, 256)
    },
    **{
        f"attention on Blackwell, {d}, {semantics.name}, {length}": blackwell_attention(
            d, semantics, length, causal=(d == 64) == (semantics is Lane)
        )
        for d in (64, 128)
        for semantics, length in ((Lane, 4096), (Warpgroup, 4096), (Warpgroup, 256))
    },
    # Spilled are numbers that a tile begins or ends with, of persistent blocks; with
    # head_dims of 64 five of them are loaded in each step.
    "derivatives, 64": backward(64, causal=True, spilled=40),
    "derivatives, 128": backward(128, causal=True, spilled=24),
    "derivatives, 128, whole": backward(128),
    "derivatives, 256": backward(256, causal=True),
    "derivatives, deterministic, 128": backward(128, deterministic=True),
    "derivatives, deterministic, 256": backward(256, deterministic=True),
    # Lengths that are not powers of 2: see `AttentionBackwardConfig.blocks`.
    "derivatives, 64, length 1000": backward(64, 1000, 16, 4, 16, causal=True),
    "derivatives, 128, length 1000": backward(128, 1000, 16, 4, 32, causal=True),
    "derivatives, 128, length 700": backward(128, 700, 16, 4, 160, causal=True),
    "derivatives, bias, 64": biased_backward(64, FULL, F32),
    "derivatives, bias, 128": biased_backward(128, FULL, BF16),
    "derivatives, bias, 256": biased_backward(256, FULL, F32),
    "derivatives, bias of columns, 256": biased_backward(256, (2, 1, 1, 2048), F32),
    "derivatives, packed, 64": packed_backward(64, False, 0),
    "derivatives, packed, 128": packed_backward(128, False, 16),
    # Bounds of the sequences do not fit beside rows of K or of dV, which leave no
    # registers; ptxas stores them around the loop.
    "derivatives, packed, deterministic, 128": packed_backward(128, True, 32),
    "derivatives, packed, 256": packed_backward(256, False, 96),
    "decode_attention": decode(1),
    "decode_attention, eight queries": decode(16, q_len=8),
    "decode_attention, eight queries, 256": decode(16, q_len=8, d=256),
    "decode_attention, float8": decode(1, E4M3),
    "decode_attention, float8, batch": decode(16, E4M3),
}


def numbers(lhs, rhs, groups):
    dims = ((lhs,), (rhs,)), ((), ())
    return jax.lax.RaggedDotDimensionNumbers(dims, (0,), groups)


RAGGED = {
    "plain": (numbers(1, 1, (0,)), lambda g: (of(16384, 4096), of(g, 4096, 4096))),
    "transposed": (numbers(1, 2, (0,)), lambda g: (of(16384, 4096), of(g, 4096, 4096))),
    "contracted": (numbers(0, 0, ()), lambda g: (of(16384, 4096), of(16384, 4000))),
}


def ragged(kind, groups):
    dims, operands = RAGGED[kind]
    call = functools.partial(ops.ragged_dot_general, ragged_dot_dimension_numbers=dims)
    return Row(call, (*operands(groups), of(groups, dtype=I32)))


def gathered(activation, gated):
    def call(x, w, gate, sizes, rows):
        gate = gate if gated else None
        return ops.ragged_dot(x, w, sizes, rows=rows, activation=activation, gate=gate)

    w = of(16, 4096, 4096)
    integers = of(16, dtype=I32), of(16384, dtype=I32)
    return Row(call, (of(8192, 4096), w, w, *integers))


def ragged_floats(n, of_rows=(16384,), of_columns=None):
    of_columns = (128, n) if of_columns is None else of_columns

    def call(a, b, sizes, left, right):
        return ops.ragged_dot_general(
            a, b, sizes, numbers(1, 2, (0,)), lhs_scale=left, rhs_scale=right
        )

    return Row(
        call,
        (
            *(of(16384, 4096, dtype=E4M3), of(128, n, 4096, dtype=E4M3)),
            of(128, dtype=I32),
            *(of(*shape, dtype=F32) for shape in (of_rows, of_columns)),
        ),
    )


def linear(tokens, dtype, grouped):
    def call(x, w, scale, bias):
        return ops.linear(
            x, w, w_scale=scale, bias=bias, activation="silu", transpose_w=True
        )

    scale = of(*((64, 4096) if grouped else (4096,)), dtype=F32)
    return Row(call, (of(tokens, 4096), of(4096, 4096, dtype=dtype), scale, of(4096)))


def scaled(m, dtype, kinds, target="sm_90a"):
    def call(a, b, sa, sb, bias):
        return ops.scaled_matmul(a, b, sa, sb, bias=bias, transpose_b=True)

    shapes = ((m,), (4096,)) if kinds == "rows" else ((m, 32), (32, 32))
    a, b = of(m, 4096, dtype=dtype), of(4096, 4096, dtype=dtype)
    others = (of(*shape, dtype=F32) for shape in (*shapes, (4096,)))
    return Row(call, (a, b, *others), target=target)


def block_scaled(dtype, held, block, kind, copies, collective, semantics):
    """In a step: an instruction for each 32 bytes of K, a copy for each 512 scales."""
    x, scales = of(4096, 4096, dtype=dtype), of(4096, 4096 // block, dtype=held)
    call = functools.partial(
        ops.block_scaled_matmul,
        preferred_element_type=BF16,
        config=ops.BlockScaledMatmulConfig(collective=collective),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )

    def also(report):
        group = f"cta_group::{1 + collective}"
        found = re.findall(rf"tcgen05\.mma\.{group}\.kind::([\w.:]+)", report.ptx)
        assert found == [kind] * 4
        assert report.ptx.count(f"tcgen05.cp.{group}.32x128b.warpx4 ") == copies
        assert report.instruction_counts["tcgen05.commit"] == 2

    return Row(call, (x, x, scales, scales), target="sm_100a", also=also)


BLOCKS = {
    "mxf8": (E4M3, E8M0, 32, "mxf8f6f4.block_scale.scale_vec::1X", 3),
    "mxf4": (E2M1, E8M0, 32, "mxf4nvf4.block_scale.scale_vec::2X", 6),
    "nvf4": (E2M1, E4M3, 16, "mxf4nvf4.block_scale.scale_vec::4X", 12),
}
OTHERS = {
    "ragged_dot, 16 groups": ragged("plain", 16),
    "ragged_dot_general, 128 groups": ragged("transposed", 128),
    "ragged_dot_general, contracted, 16 groups": ragged("contracted", 16),
    "ragged_dot_general, contracted, 128 groups": ragged("contracted", 128),
    "ragged_dot, gathered, silu": gathered("silu", False),
    "ragged_dot, gathered, gate": gathered("silu", True),
    "ragged_dot, gathered, gate, gelu": gathered("gelu", True),
    "ragged_dot_general, float8": ragged_floats(4096),
    # The last tile of a row ends beyond it.
    "ragged_dot_general, float8, edges": ragged_floats(4160),
    "ragged_dot_general, float8, blocks": ragged_floats(
        4096, (16384, 32), (128, 32, 32)
    ),
    **{
        f"linear, {tokens} tokens, {dtype}, groups {grouped}": linear(
            tokens, dtype, grouped
        )
        for (i, tokens), (j, dtype) in itertools.product(
            enumerate((16, 64, 4096)), enumerate(("int8", "int4", "float8_e4m3fn"))
        )
        for grouped in [(i + j) % 2 == 0]
    },
    "scaled_matmul, rows, 64": scaled(64, E4M3, "rows"),
    "scaled_matmul, rows, 4096": scaled(4096, jnp.int8, "rows"),
    "scaled_matmul, rows, Blackwell": scaled(4096, E4M3, "rows", "sm_100a"),
    "scaled_matmul, integers, Blackwell": scaled(64, jnp.int8, "rows", "sm_100a"),
    "scaled_matmul, blocks, 64": scaled(64, jnp.int8, "blocks"),
    "scaled_matmul, blocks, 4096": scaled(4096, E4M3, "blocks"),
    **{
        f"block_scaled_matmul, {name}, CTAs {1 + collective}": block_scaled(
            *kinds, collective, (Lane, Warpgroup)[(i + collective) % 2]
        )
        for i, (name, kinds) in enumerate(BLOCKS.items())
        for collective in (False, True)
    },
}


def rows(columns, dtype):
    def loss(x, scale):
        y = ops.layer_norm(ops.log_softmax(x), scale, scale)
        return jnp.sum(ops.softmax(y).astype(F32))

    return Row(
        jax.grad(loss, (0, 1)),
        (of(256, columns, dtype=dtype), of(columns, dtype=dtype)),
    )


def cross_entropy():
    def loss(x, w, labels):
        return ops.linear_cross_entropy(x, w, labels).sum()

    args = of(512, 1024), of(1024, 5000), of(512, dtype=I32)
    return Row(jax.grad(loss, (0, 1)), args)


ROWS = {
    "rows, 64": rows(64, F32),
    "rows, 4096": rows(4096, BF16),
    "rows, 16384": rows(16384, BF16),
    "rows, 20000": rows(20000, F32),
    "linear_cross_entropy": cross_entropy(),
}


def collective(function, devices, *args, specs=((("d",),), ("d",)), **options):
    """A call of the devices of a `jax.shard_map`."""
    ins, out = specs
    mesh = jax.sharding.AbstractMesh(
        (devices,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    call = jax.shard_map(
        lambda *args: function(*args, "d", **options),
        mesh=mesh, in_specs=tuple(jax.P(*x) for x in ins), out_specs=jax.P(*out),
    )  # fmt: skip
    return Row(call, args)


def exchanged(x, axis, **options):
    return ops.collectives.all_to_all(x, axis, 0, 0, **options)


COLLECTIVES = {
    f"{name}, {devices} devices, {dtype.__name__}": collective(
        function, devices, of(devices * devices * 65536, dtype=dtype), method=method
    )
    for (i, devices), (j, (name, function, method)) in itertools.product(
        enumerate((2, 4, 8, 16)),
        enumerate((
            ("all_gather", ops.collectives.all_gather, "kernel"),
            ("reduce_scatter", ops.collectives.reduce_scatter, "kernel"),
            ("all_reduce, one shot", ops.collectives.all_reduce, "one_shot"),
            ("all_reduce, two shots", ops.collectives.all_reduce, "two_shot"),
            ("all_to_all", exchanged, "kernel"),
            ("rotate", ops.collectives.rotate, None),
        )),
    )
    for dtype in [(BF16, F32, jnp.int8)[(i + j) % 3]]
}  # fmt: skip
OVER_ROWS, OVER_COLUMNS = ("d",), (None, "d")
COLLECTIVE_PRODUCTS = {
    f"{function.__name__}, {devices} devices, {n} columns": collective(
        function, devices, *args, specs=specs, method="kernel"
    )
    for devices, n in ((2, 4096), (4, 3584), (8, 1024))
    for function, args, specs in (
        (
            ops.collectives.all_gather_matmul,
            (of(devices * 1024, 4096), of(4096, devices * n)),
            ((OVER_ROWS, OVER_COLUMNS), OVER_COLUMNS),
        ),
        (
            ops.collectives.matmul_reduce_scatter,
            (of(devices * 1024, devices * n), of(devices * n, 4096)),
            ((OVER_COLUMNS, OVER_ROWS), OVER_ROWS),
        ),
    )
}
TABLE = {**GEMM, **FLASH, **OTHERS, **ROWS, **COLLECTIVES, **COLLECTIVE_PRODUCTS}


@pytest.mark.offline
@pytest.mark.filterwarnings("ignore:.*spills")
@pytest.mark.parametrize("name", TABLE)
def test_nothing_spills(request, name):
    row = TABLE[name]
    reports = plgpu.offline.compile(row.call, *row.args, target=row.target)
    assert len(reports) == row.kernels or name in ROWS
    for report in reports:
        used = report.resources
        assert used.spill_store_bytes <= row.spilled
        assert row.spilled or used.spill_load_bytes == 0
        assert all(row.spilled and "spilled" in remark for remark in used.remarks)
    row.also(reports[0])
    # Another jaxlib has another LLVM, which leaves other registers.
    if jax.__version_info__[:2] == (0, 11):
        golden.compare(request, "\n".join(occupancy(r.resources) for r in reports))


def occupancy(used):
    registers, blocks = used.registers_per_thread, used.occupancy_blocks_per_sm
    return f"{registers} registers, blocks per SM: {blocks}"


test_nothing_spills.has_golden_text = True
