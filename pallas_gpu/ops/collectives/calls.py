# SPDX-License-Identifier: Apache-2.0
"""Collectives over the devices of a `jax.shard_map`, a kernel on each of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.collectives import exchange
from pallas_gpu.ops.collectives.devices import AxisName, Group, varying
from pallas_gpu.ops.collectives.exchange import REDUCTIONS, Call
from pallas_gpu.ops.rules import Array, Interpret

# Bytes up to which all devices read all of an array that they add up: it is one trip
# over the links, where the other method has two.
_ONE_SHOT_BYTES = 128 * 1024
_LAX_REDUCTIONS: dict[str, Any] = {"add": lax.psum, "min": lax.pmin, "max": lax.pmax}

# Annotations of parameters, with their rules.
Method = Annotated[
    Literal["kernel", "lax"] | None, expect.optional(expect.choice("kernel", "lax"))
]
AllReduceMethod = Annotated[
    Literal["one_shot", "two_shot", "lax"] | None,
    expect.optional(expect.choice("one_shot", "two_shot", "lax")),
]
Reduction = Annotated[str, expect.choice(*REDUCTIONS)]
Dimension = Annotated[int, expect.integer()]
Blocks = Annotated[int | None, expect.optional(expect.integer(1))]


@expect.arguments()
def all_gather(
    x: Array,
    axis_name: AxisName,
    *,
    gather_dimension: Dimension = 0,
    method: Method = None,
    num_blocks: Blocks = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Concatenates the arrays of all devices along an axis, on each of them.

    As `jax.lax.all_gather(..., tiled=True)`. Each device stores its array in the
    results of all others. Its derivative is `reduce_scatter`.

    Since: sm_90. Issued by: the host, in a function of `jax.shard_map` over all axes of
    its mesh; composes with `jax.jit`, `jax.lax.scan` and `jax.grad`. Complete when all
    devices have stored.

    Args:
      x: the device's array, of any shape. Floating-point and integer types of 8 bits
        and more are stored by the kernel.
      axis_name: name of an axis of the mesh, or a tuple of names.
      gather_dimension: dimension along which arrays are concatenated.
      method: "kernel"; "lax", the collective of `jax.lax`; None, a kernel where it
        reaches the devices, see `unreachable`.
      num_blocks: CTAs, at most; default: one per SM of an H200.
      compiler_params, interpret: see `kernel`.

    Raises:
      UnsupportedError: `method="kernel"`, and it cannot reach the devices.
      ArgumentError: the array has no such dimension.

    Example:
      >>> jax.shard_map(lambda x: ops.collectives.all_gather(x, "d"), ...)
    """
    call = Call(
        "all_gather", axis_name, method, compiler_params, interpret,
        dimension=_dimension(x, gather_dimension, "all_gather"), blocks=num_blocks,
    )  # fmt: skip
    return _all_gather(call, varying(x, call.group))


@expect.arguments()
def reduce_scatter(
    x: Array,
    axis_name: AxisName,
    *,
    scatter_dimension: Dimension = 0,
    reduction: Reduction = "add",
    method: Method = None,
    num_blocks: Blocks = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Combines the arrays of all devices along an axis; each device gets a part.

    As `jax.lax.psum_scatter(..., tiled=True)`. Each device reads its part of all
    arrays, and combines them in the order of the devices; sums of 16-bit types are
    added in float32 and rounded once. The derivative of a sum is `all_gather`.

    Since: sm_90. Issued by: the host, as `all_gather`. Complete when all devices have
    read.

    Args:
      x: the device's array.
      axis_name: name of an axis of the mesh, or a tuple of names.
      scatter_dimension: dimension that is divided, a multiple of the number of devices.
      reduction: "add", "min", "max"; for integers also "and", "or", "xor".
      method, num_blocks, compiler_params, interpret: see `all_gather`.

    Raises:
      UnsupportedError: `method="kernel"`, and it cannot reach the devices.
      ShapeError: the dimension is not a multiple of the number of devices.
      ArgumentError: the array has no such dimension.
      DTypeError: bits of floating-point numbers.
    """
    what = "reduce_scatter"
    call = Call(
        what, axis_name, method, compiler_params, interpret, reduction=reduction,
        dimension=_dimension(x, scatter_dimension, what), blocks=num_blocks,
    )  # fmt: skip
    _require_divisible(x, call.dimension, call.group, what)
    return _reduced(_reduce_scatter, call, varying(x, call.group))


@expect.arguments()
def all_reduce(
    x: Array,
    axis_name: AxisName,
    *,
    reduction: Reduction = "add",
    method: AllReduceMethod = None,
    num_blocks: Blocks = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Combines the arrays of all devices along an axis, on each of them.

    As `jax.lax.psum`, but that JAX's types call the result one that varies over the
    axis. The results of all devices are equal bit by bit. Its derivative is the sum of
    those of all devices.

    Since: sm_90. Issued by: the host, as `all_gather`. Complete when all devices have
    read and stored.

    Args:
      x: the device's array.
      axis_name: name of an axis of the mesh, or a tuple of names.
      reduction: see `reduce_scatter`.
      method: "one_shot": each device reads all arrays, for small ones; "two_shot": each
        device reads its part of all arrays, and stores the result of it at all devices;
        "lax"; None chooses.
      num_blocks, compiler_params, interpret: see `all_gather`.

    Raises:
      UnsupportedError: the method needs a kernel, which cannot reach the devices.
      DTypeError: bits of floating-point numbers.
    """
    call = Call(
        "all_reduce", axis_name, method, compiler_params, interpret,
        reduction=reduction, blocks=num_blocks,
    )  # fmt: skip
    return _reduced(_all_reduce, call, varying(x, call.group))


@expect.arguments()
def all_to_all(
    x: Array,
    axis_name: AxisName,
    split_axis: Dimension,
    concat_axis: Dimension,
    *,
    method: Method = None,
    num_blocks: Blocks = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Divides the array of each device, and sends each device its part.

    As `jax.lax.all_to_all(..., tiled=True)`. Its derivative is `all_to_all` with the
    axes exchanged.

    Since: sm_90. Issued by: the host, as `all_gather`. Complete when all devices have
    stored.

    Args:
      x: the device's array.
      axis_name: name of an axis of the mesh, or a tuple of names.
      split_axis: dimension that is divided, a multiple of the number of devices.
      concat_axis: dimension along which the parts of all devices are concatenated.
      method, num_blocks, compiler_params, interpret: see `all_gather`.

    Raises:
      UnsupportedError: `method="kernel"`, and it cannot reach the devices.
      ShapeError: the dimension is not a multiple of the number of devices.
      ArgumentError: the array has no such dimension.
    """
    what = "all_to_all"
    call = Call(
        what, axis_name, method, compiler_params, interpret, blocks=num_blocks
    )  # fmt: skip
    split, concat = (_dimension(x, i, what) for i in (split_axis, concat_axis))
    _require_divisible(x, split, call.group, what)
    return _all_to_all(call, split, concat, varying(x, call.group))


@expect.arguments()
def rotate(
    x: Array,
    axis_name: AxisName,
    distance: Annotated[int, expect.integer()] = 1,
    *,
    method: Method = None,
    num_blocks: Blocks = None,
    compiler_params: plgpu.CompilerParams | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Sends the array of each device to the one at a distance along an axis.

    As `jax.lax.ppermute` from each position i to i + distance, modulo the number of
    devices. Its derivative is the rotation by -distance.

    Since: sm_90. Issued by: the host, as `all_gather`. Complete when all devices have
    stored.

    Args:
      x: the device's array.
      axis_name: name of an axis of the mesh, or a tuple of names.
      distance: positions, also negative.
      method, num_blocks, compiler_params, interpret: see `all_gather`.

    Raises:
      UnsupportedError: `method="kernel"`, and it cannot reach the devices.
    """
    call = Call(
        "rotate", axis_name, method, compiler_params, interpret,
        distance=distance, blocks=num_blocks,
    )  # fmt: skip
    return _rotate(call, varying(x, call.group))


# --- what the functions do, and their derivatives -------------------------------------


def _with_derivative(f: Any, backward: Any, n_static: int = 1) -> Any:
    """Connects a function of static arguments and an array with its transpose."""
    rule = jax.custom_vjp(f, nondiff_argnums=tuple(range(n_static)))
    rule.defvjp(
        lambda *args: (f(*args), None),
        lambda *args: (backward(*args[:n_static], args[-1]),),
    )
    return rule


def _gathered(call: Call, x: jax.Array) -> jax.Array:
    n = call.group.size
    if call.takes_kernel(x.dtype):
        moved, (before, size, behind), back = _in_rows(x, call.dimension)
        out = call.run("gather", moved)
        return back(out.reshape(*before, n * size, *behind))
    if n == 1:
        return x
    return lax.all_gather(x, call.axis_name, axis=call.dimension, tiled=True)


def _scattered(call: Call, x: jax.Array) -> jax.Array:
    n, dimension = call.group.size, call.dimension
    if call.takes_kernel(x.dtype):
        moved, (before, size, behind), back = _in_rows(x, dimension, n)
        out = call.run("scatter", moved)
        return back(out.reshape(*before, size // n, *behind))
    if n == 1:
        return x
    if call.reduction == "add":
        options = {"scatter_dimension": dimension, "tiled": True}
        return lax.psum_scatter(x, call.axis_name, **options)
    size = x.shape[dimension] // n
    start = call.group.me() * size
    return lax.dynamic_slice_in_dim(_folded(call, x), start, size, dimension)


def _folded(call: Call, x: jax.Array) -> jax.Array:
    """Combines as no collective of `jax.lax` does."""
    gathered = lax.all_gather(x, call.axis_name, axis=0, tiled=False)
    return functools.reduce(REDUCTIONS[call.reduction], gathered)


def _in_rows(x: jax.Array, dimension: int, parts: int = 1) -> Any:
    """Returns an array as (rows, parts, length), its shape, and a way back.

    The shape is in front of, at, and behind the dimension. Where parts of rows are not
    tiles, the dimension becomes the first one, and the array is one row.
    """
    before, behind = x.shape[:dimension], x.shape[dimension + 1 :]
    length = x.shape[dimension] // parts * math.prod(behind)
    if math.prod(before) == 1 or length % exchange.quantum(x.dtype) == 0:
        rows = x.reshape(math.prod(before), parts, length)
        return rows, (before, x.shape[dimension], behind), lambda y: y
    first = jnp.moveaxis(x, dimension, 0)
    return (
        first.reshape(1, parts, -1),
        ((), x.shape[dimension], (*before, *behind)),
        lambda y: jnp.moveaxis(y, 0, dimension),
    )


def _combined(call: Call, x: jax.Array) -> jax.Array:
    n, method = call.group.size, call.method
    if not call.takes_kernel(x.dtype):
        if n == 1:
            return x
        if call.reduction not in _LAX_REDUCTIONS:
            return _folded(call, x)
        total = _LAX_REDUCTIONS[call.reduction](x, call.axis_name)
        return varying(total, call.group)
    if method is None:
        # Of two devices, both methods send an array over each link.
        few = n == 2 or x.nbytes <= _ONE_SHOT_BYTES
        method = "one_shot" if few else "two_shot"
    if method == "one_shot":
        return call.run("reduce", x.reshape(1, 1, -1)).reshape(x.shape)
    # The parts are equal, and multiples of a tile.
    size = n * exchange.quantum(x.dtype)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % size))
    out = call.run("allreduce", flat.reshape(1, n, -1))
    return out.reshape(-1)[: x.size].reshape(x.shape)


def _exchanged(call: Call, split: int, concat: int, x: jax.Array) -> jax.Array:
    if not call.takes_kernel(x.dtype):
        if call.group.size == 1:
            return x
        return lax.all_to_all(x, call.axis_name, split, concat, tiled=True)
    n = call.group.size
    shape = *x.shape[:split], n, x.shape[split] // n, *x.shape[split + 1 :]
    parts = jnp.moveaxis(x.reshape(shape), split, 0)
    out = call.run("exchange", parts.reshape(1, n, -1)).reshape(parts.shape)
    shape = parts.shape[1:]
    together = *shape[:concat], n * shape[concat], *shape[concat + 1 :]
    return jnp.moveaxis(out, 0, concat).reshape(together)


def _rotated(call: Call, x: jax.Array) -> jax.Array:
    n = call.group.size
    if not call.takes_kernel(x.dtype):
        if n == 1:
            return x
        pairs = [(i, (i + call.distance) % n) for i in range(n)]
        return lax.ppermute(x, call.axis_name, pairs)
    return call.run("shift", x.reshape(1, 1, -1)).reshape(x.shape)


_all_gather = _with_derivative(_gathered, _scattered)
_reduce_scatter = _with_derivative(_scattered, _gathered)
_all_reduce = _with_derivative(_combined, _combined)
_all_to_all = _with_derivative(
    _exchanged, lambda call, split, concat, g: _exchanged(call, concat, split, g), 3
)
_rotate = _with_derivative(
    _rotated,
    lambda call, g: _rotated(dataclasses.replace(call, distance=-call.distance), g),
)


def _reduced(f: Any, call: Call, x: jax.Array) -> jax.Array:
    """Combines; only sums have a derivative.

    Raises:
      DTypeError: bits of floating-point numbers.
    """
    bitwise = call.reduction in ("and", "or", "xor")
    if bitwise and not jnp.issubdtype(x.dtype, jnp.integer):
        raise errors.DTypeError(
            f"{call.what}: the reduction is one of integers",
            expected=f"integers for reduction={call.reduction!r}",
            got=x.dtype,
            hint="use add, min or max",
        )
    if call.reduction == "add":
        return f(call, x)
    return (_scattered if f is _reduce_scatter else _combined)(call, x)


def _dimension(x: Any, value: int, what: str) -> int:
    if -x.ndim <= value < x.ndim:
        return value % x.ndim
    raise errors.ArgumentError(
        f"{what}: the array has no dimension {value}",
        expected=f"a dimension of an array of shape {tuple(x.shape)}",
        got=value,
        hint="the last one is -1",
    )


def _require_divisible(x: Any, dimension: int, group: Group, what: str) -> None:
    if x.shape[dimension] % group.size:
        raise errors.ShapeError(
            f"{what}: dimension {dimension} cannot be divided among the devices",
            expected=f"a multiple of {group.size} elements",
            got=f"{x.shape[dimension]}, of an array of shape {tuple(x.shape)}",
            hint="pad it with jnp.pad",
        )
