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
from pallas_gpu.mosaic.elements import table
from tests.support.element_programs import arity

SHAPE = (64, 16)
STRIDED = plgpu.Layout.WG_STRIDED(SHAPE, 1)


def words(text: str) -> list[str]:
    """Names, separated by spaces."""
    return text.split()


# Beside the array in GMEM: an array of SMEM and a barrier.
Operation = Callable[[Any, Any, Any], Any]
OPERATIONS: dict[str, Operation] = {}

_JNP = {
    "add_any": "add",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}
_JNP |= {"not": "bitwise_not"}
TARGETS = words(
    """
    bool int8 uint8 int32 uint32 int64 float16 bfloat16 float32 float64 float8_e4m3fn
    float8_e5m2 float8_e8m0fnu float4_e2m1fn int4 uint4 int2 uint2
    """
)


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
    function = getattr(lax, _JNP.get(name, name))
    operands = arity(name)
    return lambda x, *_: function(*[x[...]] * operands)


def _conversion(dtype: str) -> Operation:
    return lambda x, *_: x[...].astype(dtype)


def _reduction(name: str) -> Operation:
    function = getattr(lax, name)
    return lambda x, *_: jnp.broadcast_to(function(x[...], axes=(1,))[:, None], SHAPE)


def _scan(name: str) -> Operation:
    return lambda x, *_: getattr(lax, name)(x[...], axis=1)


for _name in table.TABLE:
    if _name not in OPERATIONS and _name != "convert_element_type":
        OPERATIONS[_name] = _elementwise(_name)
for _name in TARGETS:
    OPERATIONS[f"to_{_name}"] = _conversion(_name)
for _name in words(
    """
    reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or
    """
):
    OPERATIONS[_name] = _reduction(_name)
for _name in ["cumsum", "cumprod", "cummax", "cummin"]:
    OPERATIONS[_name] = _scan(_name)
