# SPDX-License-Identifier: Apache-2.0
"""lax's operations on shapes, and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_gpu import errors
from pallas_gpu.lowering import scratch
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.rules import lane
from pallas_gpu.mosaic import reduce
from pallas_gpu.mosaic import registers as regs


@lane("broadcast_in_dim")
def _broadcast_in_dim(ctx: RuleContext, x: Any, *dynamic: Any) -> Any:
    refuse_dynamic_shape(dynamic)
    dims = tuple(ctx.eqn.params["broadcast_dimensions"])
    return regs.broadcast_in_dim(x, ctx.out_aval.shape, dims)


def refuse_dynamic_shape(dynamic: Sequence[Any]) -> None:
    """Refuses shapes that are values."""
    if dynamic:
        raise errors.UnsupportedError(
            "broadcast_in_dim: the shape is not known when the kernel is compiled",
            expected="a static shape",
            got=f"{len(dynamic)} sizes that are values",
            hint="use the sizes of references, which are static",
        )


@lane("iota")
def _iota(ctx: RuleContext, *dynamic: Any) -> Any:
    aval = ctx.out_aval
    return regs.iota(vals.numpy_dtype(aval), aval.shape, ctx.eqn.params["dimension"])


@lane("reshape")
def _reshape(ctx: RuleContext, x: Any, *dynamic: Any) -> Any:
    refuse_dimensions(ctx)
    return _to_shape(x, ctx.out_aval.shape)


def refuse_dimensions(ctx: RuleContext) -> None:
    """Refuses a reshape that also transposes."""
    dimensions = ctx.eqn.params.get("dimensions")
    if dimensions is not None:
        raise errors.UnsupportedError(
            "lax.reshape with dimensions is not supported in a kernel",
            expected="dimensions=None",
            got=dimensions,
            hint="transpose first: lax.reshape(lax.transpose(x, dimensions), sizes)",
        )


@lane("squeeze")
def _squeeze(ctx: RuleContext, x: Any) -> Any:
    return _to_shape(x, ctx.out_aval.shape)


def _to_shape(x: Any, shape: tuple[int, ...]) -> Any:
    if shape == () and not vals.is_scalar(x) and not isinstance(x, regs.Splat):
        raise one_element_error(x.shape)
    return regs.reshape(x, shape)


def one_element_error(shape: tuple[int, ...]) -> errors.UnsupportedError:
    """Returns the error for an array that should become a scalar."""
    return errors.UnsupportedError(
        "an array of one element cannot become a scalar",
        expected="a scalar read from a reference: ref[i]",
        got=f"an array of shape {shape} in registers",
        hint="read the element from SMEM or GMEM with integer indices",
    )


@lane("transpose")
def _transpose(ctx: RuleContext, x: Any) -> Any:
    permutation = tuple(ctx.eqn.params["permutation"])
    if isinstance(x, regs.Splat):
        return regs.Splat(x.value, x.dtype, ctx.out_aval.shape)
    return regs.transpose(_placed(x), permutation)


@lane("slice")
def _slice(ctx: RuleContext, x: Any) -> Any:
    return regs.static_slice(x, ctx.eqn.params["start_indices"], ctx.out_aval.shape)


def _placed(x: Any) -> regs.RegisterArray:
    """A deferred array takes the default layout where there is nothing to meet."""
    if isinstance(x, regs.Deferred):
        return x.materialize(regs.default_placement(x.shape, x.dtype))
    return x


KINDS: dict[str, reduce.Kind] = {
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
        room = scratch.for_reduction(ctx.kernel, source, axes)
        return reduce.reduce(kind, source, axes, room)

    return rule


for _name, _kind in KINDS.items():
    lane(_name)(_make_reduction(_kind))
