# SPDX-License-Identifier: Apache-2.0
"""tcgen05: Blackwell's tensor core instruction and the arrival when it is complete.

What is particular to pairs of CTAs is in `pairs.py`, to block scaling in `scales.py`,
to sparse operands in `sparsity.py`, to several tiles of rows in `tiles.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, arch, errors, expect, types
from pallas_gpu.layouts.smem import tcgen05_descriptor as descriptors
from pallas_gpu.layouts.smem.layout import SmemLayout
from pallas_gpu.layouts.smem.wgmma_descriptor import WgmmaOperand
from pallas_gpu.layouts.tmem import mma_instruction as instructions
from pallas_gpu.layouts.tmem.layout import TmemKind
from pallas_gpu.layouts.window import Window
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.copies import views
from pallas_gpu.primitives.tensor_cores import pairs, products, scales, sparsity, tiles

__all__ = ["tcgen05_mma", "tcgen05_commit_arrive"]


def _needs_of_bytes(op: Any) -> Iterator[tuple[arch.Feature, str]]:
    # Where 8-bit integers are multiplied: they are no scales or metadata.
    dtypes = {x.dtype for x in op.inputs}
    if not dtypes.isdisjoint({jnp.dtype(jnp.int8), jnp.dtype(jnp.uint8)}):
        yield arch.Feature.TCGEN05_INT8, "a tcgen05_mma of 8-bit integers"


tcgen05_mma_p = registry.define(
    "tcgen05_mma",
    "tcgen05",
    reads=("acc", "a", "b", "a_scale", "b_scale", "a_sparse_metadata"),
    writes=("acc", "barrier"),
    asynchronous=True,
    feature=arch.Feature.TCGEN05,
    needs=_needs_of_bytes,
)
tcgen05_commit_arrive_p = registry.define(
    "tcgen05_commit_arrive",
    "tcgen05",
    writes=("barrier",),
    atomic=True,
    asynchronous=True,
    feature=arch.Feature.TCGEN05,
)

# JAX's names of element types, and PTX's; float32 operands are read as tf32.
_OPERANDS = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "tf32",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "s8",
    "uint8": "u8",
}
_ACCUMULATORS = {"float32": "f32", "float16": "f16", "int32": "s32"}
_MAX_COLUMNS = 512
_WHO = "tcgen05_mma"


@expect.arguments()
def tcgen05_mma(
    acc: types.Ref,
    a: types.Ref,
    b: types.Ref,
    barrier: types.Ref | None = None,
    *,
    a_scale: types.Ref | None = None,
    b_scale: types.Ref | None = None,
    a_sparse_metadata: types.Ref | None = None,
    accumulate: bool | jax.Array = True,
    collective_axis: str | None = None,
) -> None:
    """Starts `acc += a @ b`, or `acc = a @ b`, on the tensor core.

    PTX: tcgen05.mma.cta_group::1, with collective_axis cta_group::2, and with a barrier
    tcgen05.commit.mbarrier::arrive::one. Since: sm_100a.

    Issued by a warpgroup, or inside `warp_map` by a warp; one elected lane issues it.
    It is asynchronous: a wait for `barrier`, or for a later `tcgen05_commit_arrive`,
    completes it, and until then nobody may read `acc` or overwrite `a` and `b`. Calls
    on one accumulator are in order, those of two threads if a barrier with
    `orders_tensor_core` is between them. Values that threads stored to SMEM need a
    `commit_smem()` before, values stored to TMEM a `commit_tmem()`. float32 operands
    are read as tf32 (10 bits of mantissa).

    With `collective_axis` two CTAs multiply together. Each passes its M rows of `a` and
    of the accumulator, and its N / 2 columns of `b`, at the same place of the same
    declarations. The CTA of index 0 issues, which must know that the operands of both
    are complete; in the other one the call does nothing. The arrival comes on the
    barrier of both.

    Args:
      acc: (M, N) TMEM reference with one element per column, M = 64 or 128; float32,
        float16 or int32. Of a pair it is declared with collective=True, and N is at
        most 256. Of T tiles of rows it is (T, M, N): the tiles are next to each other
        in the columns. Then `a` is (T * M, K) or (T, M, K), `a_scale` and
        `a_sparse_metadata` have T in front, and each tile is a product of its own,
        all before one arrival.
      a: (M, K) SMEM reference, or a packed TMEM reference with M = 128.
      b: (K, N) SMEM reference, of a pair (K, N / 2). SMEM operands need
        TilingTransform((8, swizzle width)) and a SwizzleTransform of 32, 64 or 128
        bytes; Warpgroup semantics infers them for arrays declared without. A reference
        stored transposed is passed as `ref.T`; float32 requires K in the minor
        dimension.
      barrier: barrier with `orders_tensor_core` that receives one arrival when this and
        all earlier calls of the issuer are complete.
      a_scale, b_scale: scales of blocks along K, (128, K / block) and (N rounded up to
        128, K / block) TMEM references in the layout of scales, which
        `async_copy_scales_to_tmem` writes. Each scales a row of `a`, or a column of
        `b`: of 8-bit floats float8_e8m0fnu for 32 elements, of float4_e2m1fn also for
        16, or float8_e4m3fn for 16. M is 128, N up to 256, the accumulator float32. Of
        a pair, each CTA has the scales of its rows of `a`, and those of all N of `b`;
        M may then be 64, N a multiple of 64, with (128, K / block) scales of `a`, of
        which the first 64 rows count, and (256, K / block) scales of `b` in the layout
        `TmemLayout.scales_m64_collective()`, 128 rows for each half of N.
      a_sparse_metadata: which half of the elements along K `a`, then (M, K / 2),
        stores: two of each four of 8 or 16 bits, one of each two of float32, and of
        float4_e2m1fn two of each four pairs. A (128, indices) uint2 TMEM reference with
        layout=TmemLayout.sparse_metadata(), which `async_copy_sparse_metadata_to_tmem`
        writes. M is 128, or of one CTA without scales 64, N a multiple of 16, K of 128,
        of float32 of 64, and of float4_e2m1fn of 256. With scales, a scale is that of
        twice as many elements along K, in `a` and in `b`, as without metadata. Of a
        pair, each CTA has the metadata of its rows.
      accumulate: whether to add to `acc`, a Python bool or a scalar bool; False
        overwrites it.
      collective_axis: the last axis of the cluster, of size 2; None for one CTA.

    Raises:
      MemorySpaceError: an operand is in another space.
      ArgumentError: the barrier does not order the tensor core, or an array in TMEM is
        that of one CTA and the product that of two, or the other way round.
      AxisNameError: the cluster has no such axis.
      ShapeError, DTypeError: the tensor core does not support the shapes or types.
      LayoutError: an operand is not stored as the tensor core reads it.
      ArgumentError: only one operand has scales.
      UnsupportedError: metadata of operands of a type, or of rows, that no sparse
        instruction has; CTAs along the axis that are not a pair.

    Example:
      >>> plgpu.tcgen05_mma(acc, a_smem, b_smem, done, accumulate=False)
      >>> plgpu.barrier_wait(done)
    """
    who = _WHO
    ops.require_space(acc, types.TMEM, who, "the accumulator")
    aval = ops.require_ref(a, who, "a")
    if aval.memory_space is not types.TMEM:
        ops.require_space(a, types.SMEM, who, "a")
        a = views.plain(a, f"{who}: a")
    ops.require_space(b, types.SMEM, who, "b")
    b = views.plain(b, f"{who}: b")
    parts = tiles.split(acc, a, a_scale, a_sparse_metadata)
    for tile in parts:
        _require_product(tile, b, b_scale, collective=collective_axis is not None)
    if not isinstance(accumulate, bool):
        accumulate = ops.require_scalar_bool(accumulate, f"{who}: accumulate")
    done = None if barrier is None else one_barrier(barrier, who)
    for tile in parts:
        ops.bind(
            tcgen05_mma_p,
            {
                "acc": tile.acc,
                "a": tile.a,
                "b": b,
                "a_scale": tile.a_scale,
                "b_scale": b_scale,
                "a_sparse_metadata": tile.metadata,
                # The commit behind the last tile is one for all of them.
                "barrier": done if tile is parts[-1] else None,
                "accumulate": jnp.asarray(accumulate),
            },
            collective_axis=collective_axis,
        )


@expect.arguments()
def tcgen05_commit_arrive(
    barrier: types.Ref,
    collective_axis: str | None = None,
    *,
    predicate: ops.Predicate = None,
) -> None:
    """Arrives on a barrier when all earlier tcgen05 work of the issuer is complete.

    PTX: tcgen05.commit.cta_group::1.mbarrier::arrive::one, with collective_axis
    cta_group::2 and .multicast::cluster. Since: sm_100a.

    Issued by the warpgroup, or the warp, that has called `tcgen05_mma`; one elected
    lane issues it. It is asynchronous: the arrival comes when the work is complete, and
    `barrier_wait` makes the accumulators readable and the operands free.

    Args:
      barrier: one barrier with `orders_tensor_core`.
      collective_axis: that of the pair of CTAs whose work it is, the last axis of the
        cluster; None for one CTA. The CTA of index 0 issues it, and the arrival comes
        on the barrier of both; in the other one the call does nothing.
      predicate: scalar bool, uniform in the issuer: False for no arrival.

    Raises:
      MemorySpaceError: the operand is not a barrier.
      ArgumentTypeError: the predicate is not a scalar bool.
      ArgumentError: the barrier does not order the tensor core.
      AxisNameError: the cluster has no such axis.
      UnsupportedError: the CTAs along the axis are not a pair.
    """
    who = "tcgen05_commit_arrive"
    one = one_barrier(barrier, who)

    def arrive() -> None:
        ops.bind(
            tcgen05_commit_arrive_p, {"barrier": one}, collective_axis=collective_axis
        )

    if predicate is None:
        arrive()
        return
    with _jax.trace_without_ref_rules():
        jax.lax.cond(predicate, arrive, lambda: None)


def one_barrier(barrier: Any, who: str) -> ops.RefOperand:
    """Returns the operand of a barrier that orders the tensor core."""
    one = ops.one_barrier(barrier, who)
    declaration = types.base_aval(barrier).barrier
    if not declaration.orders_tensor_core:
        raise errors.ArgumentError(
            f"{who}: the barrier does not order the tensor core",
            expected="a barrier declared with orders_tensor_core=True",
            got=types.describe(barrier),
            hint="declare it with plgpu.Barrier(orders_tensor_core=True)",
        )
    return one


# --- checks ---------------------------------------------------------------------------


def _require_product(
    tile: tiles.Tile, b: Any, b_scale: Any, *, collective: bool
) -> None:
    """Raises unless an instruction multiplies a tile."""
    acc, a, a_scale = tile.acc, tile.a, tile.a_scale
    scaled = a_scale is not None or b_scale is not None
    if not scaled:
        _require_types(acc, a, b)
    left_in_tmem = types.base_aval(a).memory_space is types.TMEM
    for array in [acc, a_scale, b_scale, a if left_in_tmem else None]:
        if getattr(types.base_aval(array), "memory_space", None) is types.TMEM:
            pairs.require_allocation(array, collective=collective, who="tcgen05_mma")
    if tile.metadata is not None:
        sparsity.require(acc, a, b, tile.metadata, scaled=scaled, collective=collective)
    else:
        require_shapes = pairs.require_shapes if collective else _require_shapes
        require_shapes(acc, a, b)
        products.require_depth(a, _WHO)
    if scaled:
        scales.require(acc, a, b, a_scale, b_scale, collective=collective)
    _require_accumulator(acc, collective=collective)
    if left_in_tmem:
        _require_packed(a)
    else:
        _readable(a, "a")
    right = _readable(b, "b")
    if not collective:
        _require_halves(acc, right)
    if tile.metadata is not None:
        sparsity.require_storage(right)


def _name(ref: Any) -> str:
    return jnp.dtype(ref.dtype).name


def _require_types(acc: Any, a: Any, b: Any) -> None:
    names = _name(acc), _name(a), _name(b)
    got = f"{names[1]} @ {names[2]} into {names[0]}"
    for name in names[1:]:
        if name not in _OPERANDS:
            raise errors.DTypeError(
                "tcgen05_mma: the tensor core does not support this operand type",
                expected=", ".join(_OPERANDS),
                got=got,
                hint="pass scales of blocks, a_scale and b_scale"
                if name in scales.OPERANDS
                else "convert the operands",
            )
    try:
        instructions.require_types(
            _ACCUMULATORS.get(names[0], names[0]), *(_OPERANDS[x] for x in names[1:])
        )
    except errors.DTypeError as error:
        raise errors.DTypeError(
            "tcgen05_mma: no instruction has these element types",
            expected=error.expected,
            got=got,
            hint="operands have equal types, or are two 8-bit floats or two 8-bit "
            "integers; accumulate in float32, or int32 for integers",
        ) from None


def _require_shapes(acc: Any, a: Any, b: Any) -> None:
    products.require_shapes(acc, a, b, _WHO)
    m, n = acc.shape
    steps = 16 if _name(a) in ("int8", "uint8") and n > 32 else 8
    steps *= 2 if m == 64 else 1
    if m not in instructions.ROWS or n % steps or n > _MAX_COLUMNS:
        raise errors.ShapeError(
            "tcgen05_mma: the tensor core has no instruction of this shape",
            expected=f"M = 64 or 128, N a multiple of {steps} up to {_MAX_COLUMNS}",
            got=f"M = {m}, N = {n}",
            hint="split N into parts: acc.at[:, :n] and b.at[:, :n]",
        )


def _require_accumulator(acc: Any, *, collective: bool) -> None:
    layout = types.base_aval(acc).storage.layout
    rows, columns = acc.shape
    half = TmemKind.M64_COLLECTIVE if collective else TmemKind.HALF_LANE
    expected = TmemKind.DEFAULT if rows == instructions.ROWS[1] else half
    whole = not layout.tile_columns or layout.tile_columns == columns
    if layout.kind is expected and layout.packing == 1 and whole:
        return
    raise errors.LayoutError(
        "tcgen05_mma: the accumulator does not lie as the tensor core leaves it",
        expected=f"one element per column in the {expected.value} layout"
        + (f" of {columns} columns" if expected is half else ""),
        got=str(layout),
        hint="declare it with plgpu.TMEM(shape, dtype), and packed=False if it has 16 "
        "bits; of 64 rows, pass the whole array",
    )


def _require_packed(a: Any) -> None:
    if a.shape[0] != instructions.ROWS[1]:
        raise errors.UnsupportedError(
            f"tcgen05_mma: a left operand in TMEM cannot have {a.shape[0]} rows",
            expected=f"{instructions.ROWS[1]} rows",
            got=types.describe(a),
            hint="pass the left operand in SMEM",
        )
    products.require_packed(a, f"{_WHO}: the left operand in TMEM")


def _require_halves(acc: Any, right: Sequence[WgmmaOperand]) -> None:
    """Raises LayoutError where half of the columns of b start inside an atom.

    An accumulator of 64 rows has its left and right halves in different lanes, which
    are results of different instructions.
    """
    rows, columns = acc.shape
    granules = [operand.mn_granule for operand in right]
    if rows == instructions.ROWS[1] or any(columns // 2 % g == 0 for g in granules):
        return
    raise errors.LayoutError(
        "tcgen05_mma: half of the columns of b are not whole tiles",
        expected=f"N a multiple of {2 * min(granules)}, for an accumulator of {rows} "
        "rows",
        got=f"N = {columns}",
        hint="store b with a narrower swizzle, or transposed: (N, K), passed as ref.T",
    )


def _readable(operand: Any, name: Literal["a", "b"]) -> list[WgmmaOperand]:
    """Returns how an SMEM operand may be read, or raises LayoutError."""

    def plan(layout: SmemLayout, window: Window) -> WgmmaOperand:
        return descriptors.plan(layout, window, name)

    return products.readable(operand, plan, f"{_WHO}: {name}")
