# SPDX-License-Identifier: Apache-2.0
"""Accesses with an index for each element: index arrays, strides, reshapes, masks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import _jax, errors, types
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.types import values as value_rules


def _loaded(operands: Any, shape: tuple[int, ...], dtype: Any, **_: Any) -> Any:
    return jax.core.ShapedArray(shape, dtype)


load_indexed_p = registry.define(
    "load_indexed", "indexed", result=_loaded, reads=("src",), remote=("src",)
)
store_indexed_p = registry.define(
    "store_indexed", "indexed", writes=("dst",), remote=("dst",)
)


def place(view: types.RefView, who: str, masked: bool) -> tuple[Any, dict, dict]:
    """Returns where the elements of a view are, as operands and parameters.

    Returns:
      The reference; the operands `indices` and `cta`, the position of another CTA of
      the cluster or None; the parameters.
    """
    own, axes, cta = ops.split_cta(view)
    split = ops.operand(own)
    aval = types.base_aval(split.ref)
    transforms = tuple(getattr(aval, "transforms", ()))
    found = types.select(
        aval.shape,
        aval.dtype,
        split.transforms,
        row_major=not transforms,
        masked=masked,
    )
    indices = tuple(np.int32(i) if isinstance(i, int) else i for i in found.indices)
    params = {
        "shape": found.shape,
        "dtype": jnp.dtype(found.dtype),
        "view_shape": found.view_shape,
        "adjacent": found.adjacent,
        "cta_axes": axes,
    }
    operands = {"indices": indices, "cta": cta}
    return ops.RefOperand(split.ref, found.window, split.owner), operands, params


def mask_of(mask: Any, shape: tuple[int, ...], who: str) -> Any:
    """Returns a mask in the shape of an access; None if it leaves out nothing."""
    if mask is None:
        return None
    mask = value_rules.array(mask, f"{who}: the mask")
    if mask.dtype != jnp.bool_:
        raise errors.DTypeError(
            f"{who}: the mask is not an array of bools",
            expected="bool",
            got=f"{mask.dtype.name}{list(mask.shape)}",
            hint="compare: mask=columns < n",
        )
    if not broadcasts(mask.shape, shape):
        raise errors.ShapeError(
            f"{who}: the mask has another shape than the elements",
            expected=f"a shape that broadcasts to {shape}",
            got=f"{mask.shape}",
            hint="index the reference as the mask, or add axes: mask[:, None]",
        )
    known = _constant(mask)
    if known is not None and known.all():
        return None
    return mask if mask.shape == shape else jnp.broadcast_to(mask, shape)


def _constant(x: Any) -> np.ndarray | None:
    """Returns a value that ranges and numbers determine, if it is not large."""
    x = _jax.known_value(x)
    if np.size(x) > _MAX_CONSTANT:
        return None
    if not _jax.is_tracer(x):
        return np.asarray(x)
    if isinstance(number := getattr(x, "val", None), _jax.Literal):
        return np.asarray(number.val)
    made = _jax.producer(x)
    if made is None or made.primitive.name not in _OF_CONSTANTS:
        return None
    operands = []
    for operand in made.operands:
        value = _constant(operand)
        if value is None:
            return None
        operands.append(value)
    with jax.ensure_compile_time_eval():
        return np.asarray(made.primitive.bind(*operands, **made.params))


_MAX_CONSTANT = 4096
_OF_CONSTANTS = ("iota", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "add",
                 "sub", "mul", "convert_element_type", "reshape",
                 "broadcast_in_dim")  # fmt: skip


def broadcasts(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """True if a shape broadcasts to another one."""
    try:
        return np.broadcast_shapes(given, shape) == shape
    except ValueError:
        return False


def load(
    view: types.RefView, mask: Any = None, other: Any = None, layout: Any = None
) -> jax.Array:
    """Loads elements; where the mask is False, those of `other`, by default zeros."""
    src, where, params = place(view, "load", mask is not None)
    return ops.bind(
        load_indexed_p,
        {"src": src, **where, "mask": mask, "other": other},
        layout=layout,
        mask_edges=None,
        **params,
    )


def store(view: types.RefView, value: jax.Array, mask: Any = None) -> None:
    """Stores elements where the mask is True."""
    dst, where, params = place(view, "store", mask is not None)
    ops.bind(
        store_indexed_p,
        {"dst": dst, **where, "value": value, "mask": mask},
        mask_edges=None,
        **params,
    )


class _ByElement:
    """The accesses that index expressions of references use."""

    load = staticmethod(load)
    store = staticmethod(store)


types.access_by_element(_ByElement())
