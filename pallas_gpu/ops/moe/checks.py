# SPDX-License-Identifier: Apache-2.0
"""What ragged products accept, and what they say to the rest."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import pallas_gpu as plgpu
from pallas_gpu import errors, expect
from pallas_gpu.ops.gemm.config import BLOCK
from pallas_gpu.ops.rules import (
    FLOAT8,
    aligned,
    as_int32,
    no_types,
    result_type,
)

_PRECISIONS = (
    *(None, "default", "fastest", "high", "highest"),
    *("bfloat16", "tensorfloat32", "float32"),
    *jax.lax.Precision,
)
_WIDE = jnp.float16, jnp.bfloat16


def form(name: str, numbers: Any, group_offset: Any) -> tuple[bool, bool]:
    """Returns whether dimension numbers mean a product over the rows of each group.

    And whether the matrices of other products are (groups, n, k).
    """
    (contracting, batch) = numbers.dot_dimension_numbers
    found = tuple(
        tuple(map(int, dims))
        for dims in (
            *contracting,
            *batch,
            numbers.lhs_ragged_dimensions,
            numbers.rhs_group_dimensions,
        )
    )
    forms: dict[tuple[tuple[int, ...], ...], tuple[bool, bool]] = {
        ((1,), (1,), (), (), (0,), (0,)): (False, False),
        ((1,), (2,), (), (), (0,), (0,)): (False, True),
        ((0,), (0,), (), (), (0,), ()): (True, False),
    }
    chosen = forms.get(found)
    if chosen is None or (chosen[0] and group_offset is not None):
        raise errors.UnsupportedError(
            f"{name}: these dimension numbers are not supported",
            expected="lhs (M, K) and rhs (groups, K, N) or (groups, N, K), or both "
            "contracted over their ragged rows, without group_offset",
            got=f"{numbers}, group_offset={expect.shown(group_offset)}",
            hint="transpose or reshape the operands, or use jax.vmap for a batch",
        )
    return chosen


def rows(name: str, rows: Any) -> jax.Array | None:
    """Returns indices of rows as int32."""
    if rows is None:
        return None
    if len(rows.shape) != 1:
        raise errors.ShapeError(
            f"{name}: rows are not one index for each row",
            expected="(M,)",
            got=tuple(rows.shape),
            hint="reshape it, or use jax.vmap for a batch",
        )
    return as_int32(name, "rows", rows)


def require_gate(name: str, rhs: Any, gate: Any) -> None:
    for kind, what in ((errors.ShapeError, "shape"), (errors.DTypeError, "dtype")):
        if getattr(rhs, what) != getattr(gate, what):
            raise kind(
                f"{name}: the gate is not like rhs",
                expected=f"{rhs.dtype}{list(rhs.shape)}",
                got=f"{gate.dtype}{list(gate.shape)}",
                hint="a gate has a matrix for each group",
            )


def scales(
    name: str, lhs: Any, rhs: Any, rows: Any, lhs_scale: Any, rhs_scale: Any
) -> dict[str, jax.Array]:
    """Returns the scales of the kernel, by their names.

    A factor for each row of the product, and for each column of each group; or for each
    block of K and each row, and for each block of each group.

    Args:
      rhs: (groups, N, K).
    """
    groups, n, k = rhs.shape
    given = [0 if x is None else len(x.shape) for x in (lhs_scale, rhs_scale)]
    blocked = given[0] == 2 or given[1] == 3
    last: tuple[int, ...] = (n,)
    of_lhs = [(), lhs.shape[:1]]
    if blocked:
        last = plgpu.cdiv(n, BLOCK), plgpu.cdiv(k, BLOCK)
        of_lhs.append((*lhs.shape[:1], last[1]))
    forms = {
        "lhs_scale": (lhs_scale, of_lhs),
        "rhs_scale": (rhs_scale, [(), (groups,), (groups, *last)]),
    }
    found = []
    for what, (scale, shapes) in forms.items():
        scale = jnp.float32(1) if scale is None else scale.astype(jnp.float32)
        if tuple(scale.shape) not in shapes:
            raise errors.ShapeError(
                f"{name}: {what} has another shape",
                expected=" or ".join(map(str, shapes)),
                got=tuple(scale.shape),
                hint="a factor, one for each row or group, or for each column; or one "
                f"for each block of 1x{BLOCK} or {BLOCK}x{BLOCK}",
            )
        missing = shapes[-1][len(scale.shape) :]
        found.append(scale.reshape(scale.shape + (1,) * len(missing)))
    of_rows = jnp.broadcast_to(found[0], of_lhs[-1])
    of_rows = of_rows if rows is None else of_rows[rows]
    of_columns = jnp.broadcast_to(found[1], (groups, *last))
    if blocked:
        return {"a_blocks": aligned(of_rows.T), "b_blocks": of_columns}
    return {"row_scale": of_rows, "column_scale": of_columns}


def require_blocks(config: Any) -> None:
    """Raises ArgumentError unless a step of a tile is a block of scales."""
    if (config.tile_n, config.tile_k) != (BLOCK, BLOCK):
        raise errors.ArgumentError(
            "ragged_dot_general: the tiles do not match the blocks of scales",
            expected=f"tile_n={BLOCK}, tile_k={BLOCK}",
            got=f"tile_n={config.tile_n}, tile_k={config.tile_k}",
            hint="omit config",
        )


def require_no_scales(name: str, lhs: Any, lhs_scale: Any, rhs_scale: Any) -> None:
    if lhs_scale is not None or rhs_scale is not None:
        raise errors.UnsupportedError(
            f"{name}: this product has no scales",
            expected="scales for 8-bit floats with matrices (groups, N, K)",
            got=f"scales for {lhs.dtype}",
            hint="scale the result",
        )


def require_rows(name: str, lhs: Any, rhs: Any, rows: Any) -> None:
    height = (lhs if rows is None else rows).shape[:1]
    if len(lhs.shape) != 2 or len(rhs.shape) != 2 or height != rhs.shape[:1]:
        raise errors.ShapeError(
            f"{name}: the shapes do not form a product over rows",
            expected="(M, K) and (M, N)",
            got=f"{tuple(lhs.shape)} and {tuple(rhs.shape)}",
            hint="use jax.vmap for a batch",
        )


def types(
    name: str, lhs: Any, rhs: Any, precision: Any, preferred: Any, narrow: bool = False
) -> jnp.dtype:
    """Returns the type of the result.

    Args:
      narrow: whether operands may be 8-bit floats.
    """
    allowed = _WIDE + (FLOAT8 if narrow else ())
    if lhs.dtype != rhs.dtype or lhs.dtype not in allowed:
        # The tensor core reads 8-bit operands along K alone.
        is_narrow = lhs.dtype in FLOAT8
        wanted = f"{', '.join(jnp.dtype(x).name for x in allowed)}, the same for both "
        hint = "pass matrices (groups, N, K) to ops.ragged_dot_general"
        raise no_types(
            name, wanted + "operands", lhs, rhs, hint=hint if is_narrow else ""
        )
    both = precision if isinstance(precision, (tuple, list)) else (precision,)
    for one in both:
        if not any(
            one is p or (isinstance(one, str) and one == p) for p in _PRECISIONS
        ):
            raise errors.ArgumentError(
                f"{name}: there is no such precision",
                expected="None, a jax.lax.Precision or its name, or two of them",
                got=expect.shown(precision),
                hint="omit it: products of 16-bit types are exact in float32",
            )
    if preferred is None:
        return jnp.dtype(jnp.bfloat16 if lhs.dtype in FLOAT8 else lhs.dtype)
    return result_type(
        name,
        preferred,
        tuple(map(jnp.dtype, (*_WIDE, jnp.float32))),
        "omit preferred_element_type, and convert the result",
        expected="float16, bfloat16 or float32",
    )


def sizes(
    name: str, group_sizes: Any, matrices: int, group_offset: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns sizes and offset as int32 arrays."""
    sizes = as_int32(name, "group_sizes", group_sizes)
    offset = jnp.zeros(1, jnp.int32)
    if group_offset is not None:
        offset = as_int32(name, "group_offset", group_offset)
    number = group_sizes.shape[0] if len(group_sizes.shape) == 1 else -1
    if number < matrices or (number > matrices and group_offset is None):
        raise errors.ShapeError(
            f"{name}: group_sizes has not one size for each group",
            expected=f"({matrices},)"
            if group_offset is None
            else f"{matrices} or more",
            got=tuple(group_sizes.shape),
            hint="pass group_offset if rhs has the matrices of some groups only",
        )
    if group_offset is not None and tuple(group_offset.shape) != (1,):
        raise errors.ShapeError(
            f"{name}: group_offset is not one number",
            expected="(1,)",
            got=tuple(group_offset.shape),
            hint="jnp.array([first])",
        )
    return sizes, offset
