# SPDX-License-Identifier: Apache-2.0
"""Epilogues of a product, in registers: scale, bias, activation, gate, residual.

result = activation(scale * product + bias) + residual
result = activation(scale * gate) * (scale * product) + residual       (gated)
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import errors, expect

type Activation = str | Callable[[Any], Any]


def _gelu(x: Any) -> Any:
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * (x * x * x))
    return np.float32(0.5) * x * (np.float32(1) + lax.tanh(inner))


def _gelu_exact(x: Any) -> Any:
    return np.float32(0.5) * x * (np.float32(1) + lax.erf(x * np.float32(np.sqrt(0.5))))


def _silu(x: Any) -> Any:
    return x * lax.logistic(x)


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": jax.nn.relu,
    "gelu": _gelu,
    "gelu_exact": _gelu_exact,
    "silu": _silu,
}


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What a kernel does to a float32 tile before it stores it; hashable, static.

    Attributes:
      activation: a name of `ACTIVATIONS`, an elementwise function of a float32 array,
        or None.
      scale: factor of the product.
      bias: whether there is a value for each column.
      residual: whether there is an array of the result's shape to add.
      gated: whether there is a second product, whose activation is a factor.
    """

    activation: Activation | None = None
    scale: float = 1.0
    bias: bool = False
    residual: bool = False
    gated: bool = False

    @property
    def is_identity(self) -> bool:
        """True if the tile is stored as it is."""
        return self == PLAIN

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of a kernel's operands after A and B, in order."""
        return tuple(
            name
            for name, present in (
                ("gate", self.gated),
                ("bias", self.bias),
                ("residual", self.residual),
            )
            if present
        )

    @property
    def buffers(self) -> int:
        """SMEM buffers of a consumer's results: a residual, which has two, leaves one.

        The next part is computed while the last one is copied from the buffer. With two
        a tile of 256x192 has two stages: 218 us instead of 139 at 1536x4096x8192.
        """
        return 1 if self.residual else 2

    def function(self) -> Callable[[Any], Any]:
        if self.activation is None:
            return lambda x: x
        if isinstance(self.activation, str):
            return ACTIVATIONS[self.activation]
        return self.activation

    def apply(
        self, product: Any, *, bias: Any = None, gate: Any = None, residual: Any = None
    ) -> Any:
        """Returns the tile as it is stored, in float32.

        Args:
          product: (rows, columns), float32 or int32; in registers, or an array of JAX.
          bias: (columns,) or of the product's shape, float32.
          gate: the second product, like the first.
          residual: (rows, columns) of any floating type.
        """
        tile, function = product.astype(jnp.float32), self.function()
        gate = None if gate is None else gate.astype(jnp.float32)
        if self.scale != 1.0:
            tile = tile * np.float32(self.scale)
            gate = None if gate is None else gate * np.float32(self.scale)
        if bias is not None:
            if bias.ndim == 1:
                bias = lax.broadcast_in_dim(bias, tile.shape, (tile.ndim - 1,))
            tile = tile + bias
        tile = function(tile) if gate is None else function(gate) * tile
        return tile if residual is None else tile + residual.astype(jnp.float32)

    def of_arrays(self, product: jax.Array, dtype: Any, *others: jax.Array) -> Any:
        """Returns the result of an array of JAX and the operands, in order."""
        if self.is_identity:
            return product.astype(dtype)
        named = dict(zip(self.operands, others, strict=True))
        if self.bias:
            named["bias"] = named["bias"][: product.shape[-1]].astype(jnp.float32)
        return self.apply(product, **named).astype(dtype)


PLAIN = Epilogue()
# Operands of a product that are factors of all of it.
FACTORS = ("a_scale", "b_scale", "factor")


def scaled(
    part: Any, operands: Mapping[str, Any], row: Any, column: Any, factors: Any = None
) -> Any:
    """Returns a part of a product, times its scales and with its bias.

    Args:
      part: in registers.
      operands: references by names: `factor`, `a_scale` and `b_scale`, (1,);
        `row_scale`, `column_scale` and `bias`, with an element for each row or column
        of all tiles.
      row, column: where the part starts.
      factors: the values of the former, if they are loaded already.
    """

    def vector(name: str, start: Any, axis: int) -> Any:
        values = operands[name][plgpu.ds(start, part.shape[axis])]
        return lax.broadcast_in_dim(values, part.shape, (axis,)).astype(jnp.float32)

    if not operands:
        return part
    part = part.astype(jnp.float32)
    if factors is None:
        factors = [operands[x][0] for x in FACTORS if x in operands]
    for factor in factors:
        part = part * factor
    if "row_scale" in operands:
        part = part * vector("row_scale", row, 0)
    if "column_scale" in operands:
        part = part * vector("column_scale", column, 1)
    return part + vector("bias", column, 1) if "bias" in operands else part


def load_columns(
    ref: Any, start: Any, width: int, layout: Any = plgpu.Layout.WGMMA_COL
) -> Any:
    """Returns `width` values for the columns of a tile, as float32 in registers."""
    values = plgpu.load(ref.at[plgpu.ds(start, width)], layout=layout, optimized=False)
    return values.astype(jnp.float32)


def check_activation(activation: Any, who: str) -> None:
    if activation is None:
        return
    names = ", ".join(map(repr, ACTIVATIONS))
    if isinstance(activation, str):
        if activation in ACTIVATIONS:
            return
        raise errors.ArgumentError(
            f"{who}: unknown activation",
            expected=f"{names}, a function or None",
            got=repr(activation),
            hint="a function of a float32 array computes any other",
        )
    if not callable(activation) or inspect.isclass(activation):
        raise errors.ArgumentTypeError(
            f"{who}: activation is neither a name nor a function",
            expected=f"{names}, a function or None",
            got=expect.shown(activation),
            hint="pass an elementwise function of a float32 array",
        )
    tile = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    try:
        out = jax.eval_shape(activation, tile)
    except Exception as error:  # a user's function may raise anything
        out = error
    if getattr(out, "shape", None) != tile.shape:
        raise errors.ArgumentTypeError(
            f"{who}: activation is not an elementwise function",
            expected="a result of the argument's shape",
            got=expect.shown(out),
            hint="it is applied to a part of the result at a time",
        )
