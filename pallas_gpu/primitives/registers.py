# SPDX-License-Identifier: Apache-2.0
"""Values in registers: loads with a layout, layout casts, iota, reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, cast

import jax
import jax.numpy as jnp

from pallas_gpu import _jax, arch, errors, expect, types
from pallas_gpu.layouts import Layout, RegisterLayout, TmemLayout, to_layout
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives import indexed
from pallas_gpu.types import values as value_rules

__all__ = [
    "multiple_of",
    "load",
    "store",
    "layout_cast",
    "broadcasted_iota",
    "set_max_registers",
    "max",
    "min",
    "prod",
    "sum",
]

load_p = registry.define(
    "load",
    "registers",
    result=lambda operands, **_: operands["src"].array_type(),
    # One warp can load single elements.
    reads=("src",),
    remote=("src",),
)
# A store whose author says whether it may have bank conflicts: JAX's has no parameters.
store_p = registry.define("store", "registers", writes=("dst",), remote=("dst",))
layout_cast_p = registry.define(
    "layout_cast",
    "registers",
    result=lambda x, **_: jax.core.ShapedArray(x.shape, x.dtype),
)
multiple_of_p = registry.define(
    "multiple_of", "registers", result=lambda x, **_: jax.core.ShapedArray((), x.dtype)
)
set_max_registers_p = registry.define(
    "set_max_registers", "registers", feature=arch.Feature.SETMAXNREG, by_warp=False
)


def check_layout(layout: Any, who: str) -> Any:
    """Returns a register layout, or None; raises for anything else.

    A layout of TMEM is that of the registers with a row of it in each thread.
    """
    types.refuse_foreign(layout, who)
    if isinstance(layout, TmemLayout):
        return layout.tiled
    if isinstance(layout, Layout):
        to_layout(layout)  # raises if it needs parameters
    if layout is None or isinstance(layout, (Layout, RegisterLayout)):
        return layout
    raise errors.ArgumentTypeError(
        f"{who}: the layout is not a register layout",
        expected="a member of plgpu.Layout, or a TiledLayout",
        got=expect.shown(layout),
        hint="e.g. plgpu.Layout.WGMMA",
    )


@expect.arguments()
def load(
    src: types.Ref,
    idx: Any = (),
    *,
    mask: Any = None,
    other: Any = None,
    layout: Any = None,
    optimized: bool | None = None,
) -> jax.Array:
    """Loads a reference into registers, in a given layout or under a mask.

    PTX: ld.shared, ldmatrix or ld.global; under a mask predicated, and a vector of
    which the mask has some elements is loaded as a whole if it is within the array.
    Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp; complete when it returns.

    Args:
      src: SMEM or GMEM reference, or a part of one.
      idx: an index applied to `src` first, as in `src[idx]`.
      mask: bools of a shape that broadcasts to the result's. Where it is False indices
        may be out of bounds, in ranges too: no memory beyond the array is accessed.
      other: the result's elements where the mask is False, of its shape or a scalar;
        zeros by default.
      layout: register layout of the result, or a `TMEMLayout`, in whose lanes threads
        then hold the elements; None means WGMMA for a reference tiled for the tensor
        core and a strided layout otherwise.
      optimized: True refuses an access with bank conflicts, False accepts it; by
        default it is a `PerformanceWarning`. An access by elements, as under a mask,
        is never refused.

    Returns:
      An array of the reference's shape and dtype.

    Raises:
      MemorySpaceError: the reference is a barrier, or is in TMEM or registers.
      LayoutError: the layout does not fit the shape or the transforms of the reference.
      ShapeError, DTypeError: the mask or `other` does not fit the reference.
      ArgumentError: `other` without a mask.

    Example:
      >>> columns = plgpu.ds(i * 1024, 1024)
      >>> x = plgpu.load(x_ref, columns, mask=position < n, other=-jnp.inf)
    """
    who = "load"
    aval = ops.require_ref(src, who, "the source")
    layout = check_layout(layout, who)
    if idx is not None:
        src = src.at[idx]
    _require_addresses(src, aval, who, "the source cannot be loaded")
    if mask is None and other is not None:
        raise errors.ArgumentError(
            f"{who}: `other` without a mask",
            expected="a mask, which says where the result is `other`",
            got="mask=None",
            hint="pass mask=..., or omit `other`",
        )
    view = types.as_view(src)
    mask = indexed.mask_of(mask, view.shape, who)
    if mask is not None or not view.is_window:
        other = None if other is None else types.stored(other, view, "`other`")
        return indexed.load(view, mask, other, layout)
    return ops.bind(load_p, {"src": src}, layout=layout, optimized=optimized)


@expect.arguments(
    None, "plgpu.store(ref, x), or plgpu.store(ref, index, x): the index is second"
)
def store(
    dst: types.Ref,
    idx: Any = None,
    value: Any = None,
    *,
    mask: Any = None,
    optimized: bool | None = None,
) -> None:
    """Stores an array to a reference, also under a mask.

    `store(dst, value)`, or `store(dst, idx, value)`.

    PTX: st.shared, stmatrix or st.global; under a mask predicated. Masks that compare
    positions to a bound store vectors as a whole, and the one that the bound cuts in
    pieces; other masks store each element, unless they are the same along a vector.
    Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp; complete when it returns, for
    the issuer.

    Args:
      dst: SMEM or GMEM reference, or a part of one.
      idx: an index applied to `dst` first, as in `dst[idx] = value`; by default all of
        it. Where it names an element twice, one of the values is stored.
      value: of the selected shape and dtype; a scalar is broadcast.
      mask: bools of a shape that broadcasts to the selected one. Where it is False no
        memory is accessed: indices may be out of bounds there, in ranges too.
      optimized: as of `load`: True refuses bank conflicts, False accepts them.

    Raises:
      ArgumentTypeError: there is no value.
      MemorySpaceError: the reference is a barrier, or is in TMEM or registers.
      LayoutError: bank conflicts that `optimized` refuses.
      ShapeError, DTypeError: the value or the mask does not fit the reference.
      KernelError: the reference is an input of the kernel.

    Example:
      >>> plgpu.store(o_ref, plgpu.ds(i * 1024, 1024), x, mask=position < n)
    """
    who = "store"
    if value is None:
        idx, value = None, idx
    if value is None:
        raise errors.ArgumentTypeError(
            f"{who}: the value is missing",
            expected="an array or a scalar",
            got="None",
            hint="plgpu.store(ref, x), or plgpu.store(ref, index, x)",
        )
    aval = ops.require_ref(dst, who, "the destination")
    _require_addresses(dst, aval, who, "the destination cannot be stored to")
    view = types.as_view(dst.at[() if idx is None else idx])
    mask = indexed.mask_of(mask, view.shape, who)
    if mask is None and (optimized is None or not view.is_window):
        view.set(value)
        return
    value = types.stored(value, view)
    if mask is not None:
        indexed.store(view, value, mask)
        return
    operands = {"dst": view, "value": value}
    ops.bind(store_p, operands, optimized=optimized)


def _require_addresses(ref: Any, aval: Any, who: str, what: str) -> None:
    if aval.memory_space not in (types.SMEM, types.GMEM):
        raise errors.MemorySpaceError(
            f"{who}: {what}",
            expected="a reference in SMEM or GMEM",
            got=types.describe(ref),
            hint="wait on a barrier with barrier_wait; read an accumulator with "
            "acc[...]",
        )


@expect.arguments()
def layout_cast(x: value_rules.Array, new_layout: Any) -> jax.Array:
    """Converts an array to a register layout.

    PTX: no instruction where the value has no layout (a constant, an iota) or each
    thread only rearranges its own registers; `shfl.sync` where data moves within warps;
    otherwise `st.shared`, `barrier.sync` and `ld.shared`, in scratch that
    `CompilerParams.reduction_scratch_bytes` reserves.
    Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp; complete when it returns.

    Args:
      x: an array.
      new_layout: a member of `Layout`, or a TiledLayout.

    Returns:
      The same values.

    Raises:
      ArgumentTypeError: `new_layout` is not a register layout.
      LayoutError: the layout does not fit the shape.
      OutOfResources: the scratch is too small; the message contains the required size.
    """
    layout = check_layout(new_layout, "layout_cast")
    if layout is None:
        raise errors.ArgumentTypeError(
            "layout_cast: not a register layout",
            expected="a member of plgpu.Layout, or a TiledLayout",
            got="None",
            hint="e.g. plgpu.Layout.WGMMA",
        )
    return ops.bind(layout_cast_p, x, layout=layout)


@expect.arguments(shape=expect.integers(0))
def broadcasted_iota(
    dtype: value_rules.ElementType,
    shape: Sequence[int],
    dimension: int,
    *,
    layout: Any = None,
) -> jax.Array:
    """Creates an array of indices along one dimension.

    PTX: integer arithmetic on %tid; no memory. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp.

    Args:
      dtype: element type.
      shape: static shape.
      dimension: the dimension along which the values are 0, 1, 2 …
      layout: register layout; None uses that of the other operands.

    Returns:
      An array of that shape and dtype.

    Raises:
      ArgumentError: the dimension does not exist.
    """
    if not -len(shape) <= dimension < len(shape):
        raise errors.ArgumentError(
            "broadcasted_iota: invalid dimension",
            expected=f"0 to {len(shape) - 1} for shape {tuple(shape)}",
            got=dimension,
            hint="choose a dimension of the shape",
        )
    if dtype == jnp.bool_:
        raise errors.DTypeError(
            "broadcasted_iota: a bool cannot count",
            expected="integers or floats",
            got="bool",
            hint="compare integers: broadcasted_iota(jnp.int32, ...) % 2 == 1",
        )
    value = jax.lax.broadcasted_iota(dtype, tuple(shape), dimension % len(shape))
    return value if layout is None else layout_cast(value, layout)


_DIVISORS = expect.integers(1)


@expect.arguments(x=value_rules.integer, values=_DIVISORS)
def multiple_of(x: Any, values: int | Sequence[int]) -> Any:
    """Promises that an index is a multiple of an integer.

    The compiler accesses memory in larger units where an index is known to be a
    multiple of them, and the emulator checks the promise.

    PTX: none. Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp.

    Args:
      x: an integer: static, or a scalar.
      values: an integer, or several, of which `x` is a multiple.

    Returns:
      `x`.

    Raises:
      ArgumentTypeError: `x` is not an integer scalar.
      ArgumentError: a static `x`, or in the emulator any `x`, is not a multiple.

    Example:
      >>> start = plgpu.multiple_of(index_ref[i], 8)
      >>> tile = x_ref[plgpu.ds(start, 64)]
    """
    divisor = math.lcm(*cast(Sequence[int], values))
    if not _jax.is_tracer(x) and expect.index(x) is not None:
        require_multiple(int(x), divisor)
        return x
    if jnp.shape(x):
        raise errors.ArgumentTypeError(
            "multiple_of: the value is not a scalar",
            expected="an integer scalar",
            got=expect.shown(x),
            hint="promise it of the index that an access uses",
        )
    return promised(x, divisor)


def promised(x: jax.Array, divisor: int, **what: str) -> jax.Array:
    """Returns a scalar that is promised to be a multiple."""
    return ops.bind(multiple_of_p, x, divisor=divisor, **what)


def require_multiple(
    x: int,
    divisor: int,
    *,
    what: str = "multiple_of: the value",
    hint: str = "promise what holds for every value of the index",
) -> None:
    """Raises ArgumentError unless `x` is a multiple of `divisor`."""
    if x % divisor:
        raise errors.ArgumentError(
            f"{what} is not a multiple",
            expected=f"a multiple of {divisor}",
            got=x,
            hint=hint,
        )


@expect.arguments(
    n=expect.anything,
    action=expect.choice(
        "increase", "decrease", hint="producers decrease, consumers increase"
    ),
)
def set_max_registers(n: int, *, action: str) -> None:
    """Releases registers of this warpgroup, or requests more.

    PTX: setmaxnreg.inc.sync.aligned, setmaxnreg.dec.sync.aligned. Since: sm_90a.

    Issued by a warpgroup. `"increase"` blocks until other warpgroups of the block have
    released enough.

    Args:
      n: registers per thread, a multiple of 8 from 24 to 256.
      action: `"increase"` or `"decrease"`.

    Raises:
      ArgumentError: an invalid number or action.
    """
    # PTX ISA, setmaxnreg: the immediate is in the range 24 to 256, a multiple of 8.
    if not isinstance(n, int) or not 24 <= n <= 256 or n % 8:
        raise errors.ArgumentError(
            "set_max_registers: invalid number of registers",
            expected="a multiple of 8 from 24 to 256",
            got=expect.shown(n),
            hint="a block of W warpgroups has 65536 / (128 W) registers per thread",
        )
    ops.bind(set_max_registers_p, {}, n=n, action=action)


# --- reductions, which `jax.numpy` has too --------------------------------------------

# An annotation of a parameter, with its rule.
Accumulators = Annotated[
    int | None, expect.optional(expect.integer(1, unit="accumulators"))
]


@expect.arguments()
def max(
    x: value_rules.Array,
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
    *,
    accumulator_ilp: Accumulators = None,
) -> jax.Array:
    """Returns the largest elements along axes.

    PTX: max in the registers of a thread, redux.sync where all lanes of a warp hold
    parts of a result, else shfl.sync, and st.shared, barrier.sync and ld.shared between
    warps, in scratch that `CompilerParams.reduction_scratch_bytes` reserves.
    Since: sm_90.

    Issued by a warpgroup, or inside `warp_map` by a warp; complete when it returns.

    Args:
      x: array of integers or floats.
      axis: the axes to reduce; None for all.
      keepdims: whether they remain, of size 1.
      accumulator_ilp: a hint that this compiler does not use: the number of partial
        results of a thread.

    Returns:
      An array of the element type of `x`.

    Raises:
      ArgumentError: an axis does not exist, or is named twice.
      DTypeError: there is no such reduction of the element type.

    Example:
      >>> o_ref[...] = plgpu.max(x_ref[...], axis=1)
    """
    return _reduced(jax.lax.reduce_max, "max", x, axis, keepdims)


def _reduction[T: Callable[..., Any]](
    like: T, name: str, does: str, ptx: str, also: str = ""
) -> T:
    """Returns another reduction with the parameters of `max`."""
    reduce = getattr(jax.lax, f"reduce_{name}")

    def reduction(
        x: value_rules.Array,
        axis: int | Sequence[int] | None = None,
        keepdims: bool = False,
        *,
        accumulator_ilp: Accumulators = None,
    ) -> jax.Array:
        return _reduced(reduce, name, x, axis, keepdims)

    reduction.__name__ = reduction.__qualname__ = name
    reduction.__doc__ = f"""Returns the {does}.

    PTX: {ptx}, and the rest as `max`. Since: sm_90.

    Issued as `max`.

    Args:
      x, axis, keepdims: as of `max`.
      accumulator_ilp: a hint, as of `max`.

    Returns:
      An array of the element type of `x`{also}.

    Raises:
      ArgumentError, DTypeError: as `max`.
    """
    made: Any = expect.arguments()(reduction)
    return made


_NARROW = ", also where `jnp.{}` has a wider one"
min = _reduction(max, "min", "smallest elements along axes", "min")
sum = _reduction(
    max, "sum", "sums of elements along axes; narrow integers wrap", "add",
    _NARROW.format("sum"),
)  # fmt: skip
prod = _reduction(
    max, "prod", "products of elements along axes; narrow integers wrap", "mul",
    _NARROW.format("prod"),
)  # fmt: skip


def _reduced(reduce: Any, who: str, x: Any, axis: Any, keepdims: bool) -> jax.Array:
    given = tuple(range(x.ndim)) if axis is None else axis
    axes = {i % x.ndim for i in given if -x.ndim <= i < x.ndim}
    if len(axes) != len(given):
        raise errors.ArgumentError(
            f"{who}: invalid axes",
            expected=f"different axes of an array of shape {x.shape}",
            got=axis,
            hint="leave axis out for all of them",
        )
    if x.dtype == jnp.bool_:
        raise errors.DTypeError(
            f"{who}: the elements are bools",
            expected="integers or floats",
            got=f"bool{list(x.shape)}",
            hint="jnp.any and jnp.all reduce bools; convert to count: "
            "x.astype(jnp.int32)",
        )
    result = reduce(x, axes=tuple(sorted(axes)))
    return jnp.expand_dims(result, tuple(sorted(axes))) if keepdims else result
