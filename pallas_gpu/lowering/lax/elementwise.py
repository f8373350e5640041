# SPDX-License-Identifier: Apache-2.0
"""lax's elementwise operations: a table of names and of the parameters that matter."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_gpu import errors
from pallas_gpu.lowering import values as vals
from pallas_gpu.lowering.context import RuleContext
from pallas_gpu.lowering.rules import lane, uniform
from pallas_gpu.mosaic import elementwise
from pallas_gpu.mosaic.elements import arithmetic

# Name of the primitive -> parameters that the emitter needs.
TABLE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("add", "sub", "mul", "div", "rem", "max", "min", "neg", "abs", "sign"), ()
    ),
    **dict.fromkeys(("and", "or", "xor", "not"), ()),
    **dict.fromkeys(
        ("shift_left", "shift_right_arithmetic", "shift_right_logical"), ()
    ),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), ()),
    **dict.fromkeys(("select_n", "clamp", "is_finite", "square", "floor", "ceil"), ()),
    **dict.fromkeys(
        ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "logistic"), ()
    ),
    **dict.fromkeys(("sin", "cos", "erf", "pow", "log1p", "expm1"), ()),
    "integer_pow": ("y",),
    "round": ("rounding_method",),
}


def make_rule(name: str, kept: tuple[str, ...]):
    """Returns the rule for arrays that have layouts, and for scalars."""

    def rule(ctx: RuleContext, *operands: Any) -> Any:
        shape = ctx.out_aval.shape
        # lax lets a scalar predicate or bound stand for a whole array.
        operands = tuple(vals.as_shape(x, shape) for x in operands)
        params = params_of(ctx, kept)
        return elementwise.apply(name, *operands, approx_math=ctx.approx_math, **params)

    return rule


def params_of(ctx: RuleContext, kept: tuple[str, ...]) -> dict[str, Any]:
    """Returns the parameters that the emitter needs, enumerations as numbers."""
    given = ctx.eqn.params
    return {k: getattr(given[k], "value", given[k]) for k in kept}


def available(name: str) -> bool:
    """True when the emitters have the operation for some type."""
    for dtype in (np.float32, np.int32, np.bool_):
        try:
            arithmetic.lookup(name, np.dtype(dtype))
        except errors.PallasGpuError:
            continue
        return True
    return False


for _name, _kept in TABLE.items():
    if available(_name):
        lane(_name)(make_rule(_name, _kept))


@lane("convert_element_type")
def convert(ctx: RuleContext, x: Any) -> Any:
    """Converts an array that has a layout, or a scalar."""
    return elementwise.astype(x, np.dtype(jnp.dtype(ctx.eqn.params["new_dtype"])))


@uniform("stop_gradient")
def _stop_gradient(ctx: RuleContext, x: Any) -> Any:
    return x


@uniform("copy")
def _copy(ctx: RuleContext, x: Any) -> Any:
    return x
