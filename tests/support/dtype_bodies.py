# SPDX-License-Identifier: Apache-2.0
"""Operations on an array of any element type, as pieces of a kernel's body.

Each takes the references of an array (`X`) and returns a value; the kernel that tries
it stores the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import types
from tests.support import element_programs as elements

SHAPE = (64, 16)
STRIDED = plgpu.Layout.WG_STRIDED(SHAPE, 1)


def words(text: str) -> list[str]:
    """Names, separated by spaces."""
    return text.split()


# Beside the array in GMEM: an array of SMEM and a barrier.
Operation = Callable[[Any, Any, Any], Any]
OPERATIONS: dict[str, Operation] = {}

# Rows of each class of the elementwise table, and types to convert to.
ROWS = words("add div sign clamp lt and shift_left clz exp erf atan2 round is_finite")
TARGETS = words("bool int8 uint32 float32 bfloat16 float8_e4m3fn float4_e2m1fn int2")


def operation(function: Operation) -> Operation:
    """Enters an operation under its function's name."""
    OPERATIONS[function.__name__.strip("_")] = function
    return function


@operation
def copy_by_tma(x: Any, smem: Any, barrier: Any) -> Any:
    plgpu.copy_gmem_to_smem(x, smem, barrier)
    plgpu.barrier_wait(barrier)
    return smem[...]


@operation
def store_to_smem(x: Any, smem: Any, barrier: Any) -> Any:
    smem[...] = x[...]
    return plgpu.load(smem, layout=STRIDED)


@operation
def element(x: Any, smem: Any, barrier: Any) -> Any:
    return jnp.broadcast_to(x[3, 5], SHAPE)


@operation
def ones_like_a_part(x: Any, smem: Any, barrier: Any) -> Any:
    return jnp.broadcast_to(jnp.ones_like(x.at[0, 0]), SHAPE)


@operation
def carry(x: Any, smem: Any, barrier: Any) -> Any:
    return lax.fori_loop(0, 2, lambda _, value: value, x[...])


@operation
def branch(x: Any, smem: Any, barrier: Any) -> Any:
    chosen = lax.axis_index("i") > 0
    return lax.cond(chosen, lambda: x[...], lambda: jnp.zeros_like(x))


@operation
def select_n(x: Any, smem: Any, barrier: Any) -> Any:
    columns = plgpu.broadcasted_iota(jnp.int32, SHAPE, 1)
    return jnp.where(columns > 7, x[...], jnp.ones_like(x))


@operation
def transpose(x: Any, smem: Any, barrier: Any) -> Any:
    return jnp.transpose(jnp.transpose(x[...]))


@operation
def reshape(x: Any, smem: Any, barrier: Any) -> Any:
    return x[...].reshape(SHAPE[::-1]).reshape(SHAPE)


@operation
def layout_cast(x: Any, smem: Any, barrier: Any) -> Any:
    return plgpu.layout_cast(x[...], plgpu.Layout.WGMMA)


@operation
def iota(x: Any, smem: Any, barrier: Any) -> Any:
    return plgpu.broadcasted_iota(x.dtype, SHAPE, 1)


@operation
def integer_pow(x: Any, smem: Any, barrier: Any) -> Any:
    return lax.integer_pow(x[...], 3)


@operation
def bitcast_convert_type(x: Any, smem: Any, barrier: Any) -> Any:
    same_width = lax.bitcast_convert_type(x[...], f"uint{types.itemsize_bits(x.dtype)}")
    return lax.bitcast_convert_type(same_width, x.dtype)


def _elementwise(name: str) -> Operation:
    function = elements.lax_function(name, "", elements.PARAMS.get(name, ({},))[0])
    operands = elements.arity(name)
    return lambda x, *_: function(*[x[...]] * operands)


def _conversion(dtype: str) -> Operation:
    return lambda x, *_: x[...].astype(dtype)


def _reduction(name: str) -> Operation:
    function = getattr(lax, name)
    return lambda x, *_: jnp.broadcast_to(function(x[...], axes=(1,))[:, None], SHAPE)


def _scan(name: str) -> Operation:
    return lambda x, *_: getattr(lax, name)(x[...], axis=1)


for _name in ROWS:
    OPERATIONS[_name] = _elementwise(_name)
for _name in TARGETS:
    OPERATIONS[f"to_{_name}"] = _conversion(_name)
for _name in words("reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or"):
    OPERATIONS[_name] = _reduction(_name)
for _name in ["cumsum", "cumprod", "cummax", "cummin"]:
    OPERATIONS[_name] = _scan(_name)
