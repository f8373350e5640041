# SPDX-License-Identifier: Apache-2.0
"""lax's operations on shapes, and reductions."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir.dialects import arith

from pallas_gpu import errors
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.rules import lane
from pallas_gpu.mosaic import addressing, reduce
from pallas_gpu.mosaic import registers as regs


@lane("broadcast_in_dim")
def _broadcast_in_dim(ctx: RuleContext, x: Any, *dynamic: Any) -> Any:
    params = ctx.eqn.params
    if dynamic:
        raise errors.UnsupportedError("broadcast_in_dim: a dynamic shape")
    return regs.broadcast_in_dim(
        x, ctx.out_aval.shape, tuple(params["broadcast_dimensions"])
    )


@lane("iota")
def _iota(ctx: RuleContext, *dynamic: Any) -> Any:
    aval = ctx.out_aval
    return regs.iota(vals.numpy_dtype(aval), aval.shape, ctx.eqn.params["dimension"])


@lane("reshape")
def _reshape(ctx: RuleContext, x: Any, *dynamic: Any) -> Any:
    if ctx.eqn.params.get("dimensions") is not None:
        raise errors.UnsupportedError("reshape with dimensions is not supported")
    return _to_shape(x, ctx.out_aval.shape)


@lane("squeeze")
def _squeeze(ctx: RuleContext, x: Any) -> Any:
    return _to_shape(x, ctx.out_aval.shape)


def _to_shape(x: Any, shape: tuple[int, ...]) -> Any:
    if shape == () and not vals.is_scalar(x) and not isinstance(x, regs.Splat):
        raise errors.UnsupportedError(
            "an array of one element cannot become a scalar",
            expected="a scalar read from a reference: ref[i]",
            hint="read the element from SMEM or GMEM with integer indices",
        )
    return regs.reshape(x, shape)


@lane("transpose")
def _transpose(ctx: RuleContext, x: Any) -> Any:
    permutation = tuple(ctx.eqn.params["permutation"])
    if isinstance(x, regs.Splat):
        return regs.Splat(x.value, x.dtype, ctx.out_aval.shape)
    return regs.transpose(_placed(x), permutation)


@lane("slice")
def _slice(ctx: RuleContext, x: Any) -> Any:
    params = ctx.eqn.params
    if any(s != 1 for s in params["strides"] or ()):
        raise errors.UnsupportedError(
            "a slice of an array in registers has a stride",
            expected="stride 1",
            got=params["strides"],
            hint="slice the reference, or mask with jnp.where",
        )
    return regs.static_slice(x, params["start_indices"], ctx.out_aval.shape)


def _placed(x: Any) -> regs.RegisterArray:
    """A deferred array takes the default layout where there is nothing to meet."""
    if isinstance(x, regs.Deferred):
        return x.materialize(regs.default_placement(x.shape, x.dtype))
    return x


_KINDS: dict[str, reduce.Kind] = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "and",
    "reduce_or": "or",
}


def _make_reduction(kind: reduce.Kind):
    def rule(ctx: RuleContext, x: Any) -> Any:
        axes = tuple(ctx.eqn.params["axes"])
        if not axes:
            return x
        source = _placed(x)
        scratch = reduction_scratch(ctx, source, axes)
        return reduce.reduce(kind, source, axes, scratch)

    return rule


def reduction_scratch(ctx: RuleContext, x: Any, axes: tuple[int, ...]) -> Any:
    """Returns this warpgroup's scratch, if the reduction crosses warps."""
    needed = reduce.scratch_bytes(x.layout, axes, x.dtype)
    if not needed:
        return None
    available = ctx.kernel.params.compiler_params.reduction_scratch_bytes
    if needed > available:
        raise errors.OutOfResources(
            "a reduction across warps needs more scratch",
            resource="SMEM",
            limit_bytes=available,
            used_bytes=needed,
            expected=f"at most reduction_scratch_bytes={available}",
            got=f"{needed} bytes for {x.dtype}{list(x.shape)} over axes {axes}",
            hint=f"pass CompilerParams(reduction_scratch_bytes={needed})",
        )
    return reduce.SmemScratch(_scratch_pointer(ctx, available), available)


def _scratch_pointer(ctx: RuleContext, bytes_each: int) -> Any:
    builder = ctx.builder
    base = builder.smem_pointer(ctx.kernel.plan.scratch_offset_bytes)
    if ctx.kernel.params.mesh.warpgroups == 1:
        return base
    offset = arith.muli(builder.threads.warpgroup, builder.i32(bytes_each))
    return addressing.offset_pointer(base, offset)


for _name, _kind in _KINDS.items():
    lane(_name)(_make_reduction(_kind))
