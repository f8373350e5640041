# SPDX-License-Identifier: Apache-2.0
"""What torch does in place of XLA: a row for each of JAX's operations that it does.

What is computed once for each shape is constant, and needs no row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import torch

from pallas_gpu import errors
from pallas_gpu.bridge.torch.tensors import torch_dtype
from pallas_gpu.program.nodes import Op

Function = Callable[..., torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of torch with its static parameters.

    Attributes:
      run: a function of tensors that returns one, contiguous if they are.
      is_view: whether the result has the memory of the first operand; else it has
        memory of its own.
    """

    run: Function
    is_view: bool = False


def operation_for(op: Op, where: str | None) -> Operation:
    """Returns what torch does for an operation of JAX."""
    name = op.name
    if name in _ELEMENTWISE:
        return Operation(_ELEMENTWISE[name])
    make = _BY_PARAMETERS.get(name)
    found = None if make is None else make(op)
    if found is not None:
        return found
    operands = ", ".join(f"{x.dtype}{list(x.shape)}" for x in op.inputs)
    rows = sorted([*_ELEMENTWISE, *_BY_PARAMETERS])
    raise errors.UnsupportedError(
        f"as_torch_kernel: {name} outside of a kernel has no counterpart in torch",
        expected="kernels, constants, and " + ", ".join(rows),
        got=f"{name}({operands})",
        hint="do it in torch before or after the function, or in a kernel",
        where=where,
    )


# What has the meaning of XLA's operation, NaN included, and the same name.
_SAME = (
    "abs add ceil cos eq erf exp exp2 expm1 floor ge gt le log log1p lt mul ne neg "
    "rsqrt sign sin sqrt square sub tan tanh"
)
_ELEMENTWISE: dict[str, Function] = {
    **{name: getattr(torch, name) for name in _SAME.split()},
    "add_any": torch.add,
    "and": torch.bitwise_and,
    "clamp": lambda low, x, high: torch.minimum(torch.maximum(x, low), high),
    "copy": torch.clone,
    "copy_p": torch.clone,
    "is_finite": torch.isfinite,
    "logistic": torch.sigmoid,
    "max": torch.maximum,
    "min": torch.minimum,
    "not": torch.bitwise_not,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}


def _div(op: Op) -> Operation:
    mode = "trunc" if op.results[0].dtype.kind in "iu" else None
    return Operation(lambda x, y: torch.div(x, y, rounding_mode=mode))


def _select_n(op: Op) -> Operation | None:
    if op.inputs[0].dtype != bool or len(op.inputs) != 3:
        return None
    return Operation(lambda which, no, yes: torch.where(which, yes, no))


def _integer_pow(op: Op) -> Operation:
    power = op.params["y"]
    return Operation(lambda x: torch.pow(x, power))


def _round(op: Op) -> Operation | None:
    is_to_even = op.params["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN
    return Operation(torch.round) if is_to_even else None


def _convert(op: Op) -> Operation | None:
    source, target = op.inputs[0].dtype, op.results[0].dtype
    dtype = torch_dtype(target)
    if target.kind not in "iu" or source.kind in "iub":
        return Operation(lambda x: x.to(dtype), is_view=source == target)
    if target.itemsize > 4 or source.itemsize > 4:
        return None
    # What does not fit, XLA clamps; in torch it becomes anything.
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return Operation(lambda x: x.double().nan_to_num(0).clamp(low, high).to(dtype))


def _reduce_precision(op: Op) -> Operation | None:
    """Rounds float32 to fewer bits of the mantissa, ties to even."""
    dropped = 23 - op.params["mantissa_bits"]
    if op.inputs[0].dtype != "float32" or op.params["exponent_bits"] != 8:
        return None
    if dropped <= 0:
        return Operation(torch.clone)

    def run(x: torch.Tensor) -> torch.Tensor:
        bits = x.view(torch.int32)
        half = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
        rounded = (bits + half) & -(1 << dropped)
        return torch.where(x.isnan(), x, rounded.view(torch.float32))

    return Operation(run)


def _shaped(op: Op) -> Operation:
    shape = op.results[0].shape
    return Operation(lambda x: x.reshape(shape), is_view=True)


def _broadcast(op: Op) -> Operation:
    shape, at = op.results[0].shape, op.params["broadcast_dimensions"]
    sizes = [1] * len(shape)
    for size, axis in zip(op.inputs[0].shape, at, strict=True):
        sizes[axis] = size
    if math.prod(sizes) == math.prod(shape):
        return Operation(lambda x: x.reshape(shape), is_view=True)
    return Operation(lambda x: x.reshape(sizes).expand(shape).contiguous())


def _transpose(op: Op) -> Operation:
    order, shape = op.params["permutation"], op.inputs[0].shape
    moved = [axis for axis in order if shape[axis] != 1]
    if moved == sorted(moved):
        return _shaped(op)
    return Operation(lambda x: x.permute(order).contiguous())


def _slice(op: Op) -> Operation:
    params, rank = op.params, len(op.inputs[0].shape)
    steps = params["strides"] or (1,) * rank
    bounds = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    index = tuple(slice(*bound) for bound in bounds)
    # A copy, also of what is contiguous: it may not be aligned.
    return Operation(lambda x: x[index].clone(memory_format=torch.contiguous_format))


def _pad(op: Op) -> Operation | None:
    config, shape = op.params["padding_config"], op.results[0].shape
    if any(min(axis) < 0 for axis in config):
        return None
    inside = tuple(
        slice(low, n - high, between + 1)
        for (low, high, between), n in zip(config, shape, strict=True)
    )

    def run(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        padded = value.expand(shape).clone(memory_format=torch.contiguous_format)
        padded[inside].copy_(x)
        return padded

    return Operation(run)


def _concatenate(op: Op) -> Operation:
    axis = op.params["dimension"]
    return Operation(lambda *xs: torch.cat(xs, axis))


def _rev(op: Op) -> Operation:
    axes = op.params["dimensions"]
    return Operation(lambda x: torch.flip(x, axes))


def _reduction(function: Callable[..., torch.Tensor]) -> Callable[[Op], Operation]:
    def make(op: Op) -> Operation:
        axes: Sequence[int] = tuple(op.params["axes"])
        if not axes:
            return Operation(torch.clone)
        return Operation(lambda x: function(x, axes))

    return make


def _sum(x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    return torch.sum(x, axes, dtype=x.dtype)


_BY_PARAMETERS: dict[str, Callable[[Op], Operation | None]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "convert_element_type": _convert,
    "div": _div,
    "expand_dims": _shaped,
    "integer_pow": _integer_pow,
    "pad": _pad,
    "reduce_max": _reduction(torch.amax),
    "reduce_min": _reduction(torch.amin),
    "reduce_precision": _reduce_precision,
    "reduce_sum": _reduction(_sum),
    "reshape": _shaped,
    "rev": _rev,
    "round": _round,
    "select_n": _select_n,
    "slice": _slice,
    "squeeze": _shaped,
    "transpose": _transpose,
}
