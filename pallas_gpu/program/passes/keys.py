# SPDX-License-Identifier: Apache-2.0
"""Random keys in kernels: a key of threefry is a pair of 32-bit words.

Kernels have no arrays of keys. When a body is traced, `entry.plain` replaces each by
the pair of its words, two arrays of the key array's shape, and operations on keys by
these functions, which are defined as in JAX: the bits of results are equal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gpu import _jax, errors
from pallas_gpu.program.bodies import bodies
from pallas_gpu.program.rewrite import Deferred, Retrace, settled


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Key:
    """An array of keys.

    Attributes:
      high, low: the words, uint32 arrays of the keys' shape.
    """

    high: Any
    low: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array of keys."""
        return tuple(self.low.shape)

    def map(self, function: Callable[[Any], Any]) -> Key:
        """Returns the keys whose words a function gives."""
        return Key(function(self.high), function(self.low))


@dataclasses.dataclass(frozen=True)
class KeyData(Deferred):
    """The words of keys as an array with one more axis, which is made if it is used."""

    key: Key

    def array(self) -> Any:
        """Returns the array of shape (..., 2)."""
        high, low = (
            jnp.expand_dims(word, -1) for word in (self.key.high, self.key.low)
        )
        shape = (*self.key.shape, 2)
        word = lax.broadcasted_iota(np.int32, shape, len(shape) - 1)
        high, low = (jnp.broadcast_to(x, shape) for x in (high, low))
        return jnp.where(word == 0, high, low)


def of_array(keys: Any) -> Key:
    """Returns the words of an array of keys."""
    require_threefry(jax.random.key_impl(keys))
    words = jax.random.key_data(keys)
    return Key(words[..., 0], words[..., 1])


def is_key(aval: Any) -> bool:
    """True for an array of keys, and for its type."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype):
        return False
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def element(x: Any, axis: int, index: int) -> Any:
    """Returns an element along an axis, which it drops."""
    at = lax.broadcasted_iota(np.int32, x.shape, axis) == index
    return lax.reduce_or(jnp.where(at, x, jnp.zeros_like(x)), axes=(axis,))


# --- operations -----------------------------------------------------------------------


def require_threefry(impl: Any) -> None:
    """Raises UnsupportedError for keys of another generator."""
    name = getattr(impl, "name", str(impl))
    if "threefry" in name and jax.config.jax_threefry_partitionable:
        return
    raise errors.UnsupportedError(
        "a kernel has random numbers of threefry alone",
        expected="impl='threefry2x32', and jax_threefry_partitionable=True",
        got=f"impl={name!r}, and jax_threefry_partitionable="
        f"{jax.config.jax_threefry_partitionable}",
        hint="draw the numbers outside the kernel and pass them as an argument",
    )


def _threefry(key: Key, high: Any, low: Any) -> Key:
    """Hashes a counter; all words have one shape, or are scalars."""
    return Key(*_jax.threefry2x32(key.high, key.low, high, low))


def _counters(shape: Sequence[int]) -> Key:
    """The row-major index of each element."""
    if math.prod(shape) >= 1 << 32:
        raise errors.UnsupportedError(
            "too many random numbers for one array", expected="less than 2**32"
        )
    zero, index, stride = jnp.zeros(shape, np.uint32), None, 1
    for axis in reversed(range(len(shape))):
        along = lax.broadcasted_iota(np.uint32, shape, axis) * np.uint32(stride)
        index = along if index is None else index + along
        stride *= shape[axis]
    return Key(zero, zero if index is None else index)


def _spread(key: Key, shape: Sequence[int]) -> tuple[Key, Key]:
    """Returns keys and counters in the keys' shape followed by another one."""
    counters = _counters(shape)
    if not key.shape:
        return key, counters
    whole = (*key.shape, *shape)
    return (
        key.map(lambda x: lax.broadcast_in_dim(x, whole, range(len(key.shape)))),
        counters.map(lambda x: jnp.broadcast_to(x, whole)),
    )


def seed(params: dict[str, Any], seeds: Any) -> Key:
    """`random_seed`."""
    require_threefry(params["impl"])
    low = seeds.astype(np.uint32)
    if seeds.dtype.itemsize <= 4:
        return Key(jnp.zeros_like(low), low)
    high = lax.shift_right_logical(seeds, np.asarray(32, seeds.dtype))
    return Key(high.astype(np.uint32), low)


def wrap(params: dict[str, Any], data: Any) -> Key:
    """`random_wrap`."""
    require_threefry(params["impl"])
    if isinstance(data, KeyData):
        return data.key
    return Key(*(element(data, data.ndim - 1, i) for i in range(2)))


def unwrap(params: dict[str, Any], key: Key) -> KeyData:
    """`random_unwrap`."""
    return KeyData(key)


def split(params: dict[str, Any], key: Key) -> Key:
    """`random_split`."""
    keys, counters = _spread(key, params["shape"])
    return _threefry(keys, counters.high, counters.low)


def fold_in(params: dict[str, Any], key: Key, message: Any) -> Key:
    """`random_fold_in`."""
    message = message.astype(np.uint32)
    shape = np.broadcast_shapes(key.shape, message.shape)
    key = key.map(lambda x: jnp.broadcast_to(x, shape))
    message = jnp.broadcast_to(message, shape)
    return _threefry(key, jnp.zeros_like(message), message)


def clone(params: dict[str, Any], key: Key) -> Key:
    """`random_clone`."""
    return key


def bits(params: dict[str, Any], key: Key) -> Any:
    """`random_bits`."""
    keys, counters = _spread(key, params["shape"])
    words = _threefry(keys, counters.high, counters.low)
    dtype = np.dtype(f"uint{params['bit_width']}")
    if dtype.itemsize == 8:
        high = words.high.astype(dtype) << np.asarray(32, dtype)
        return high | words.low.astype(dtype)
    return (words.high ^ words.low).astype(dtype)


def unstack(params: dict[str, Any], key: Key) -> list[Key]:
    """`unstack`."""
    axis = params["axis"]
    return [_element(key, axis, i) for i in range(key.shape[axis])]


def _element(key: Key, axis: int, index: int) -> Key:
    return key.map(lambda x: element(x, axis, index))


def slice_(params: dict[str, Any], key: Key) -> Key:
    """`slice`; one element along an axis is read without moving the others."""
    starts, limits = list(params["start_indices"]), list(params["limit_indices"])
    for axis, (start, limit) in enumerate(zip(starts, limits, strict=True)):
        if limit - start == 1 and key.shape[axis] > 1:
            one = _element(key, axis, start)
            key = Key(*(jnp.expand_dims(x, axis) for x in (one.high, one.low)))
            starts[axis], limits[axis] = 0, 1
    if tuple(limits) == key.shape and not any(starts):
        return key
    strides = params["strides"]
    return key.map(lambda x: lax.slice(x, starts, limits, strides))


def squeeze(params: dict[str, Any], key: Key) -> Key:
    """`squeeze`; one that leaves no axis gives a scalar."""
    axes = tuple(params["dimensions"])
    if len(axes) == len(key.shape):
        return key.map(lambda x: lax.reduce_or(x, axes=axes))
    return key.map(lambda x: lax.squeeze(x, axes))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "random_seed": seed,
    "random_wrap": wrap,
    "random_unwrap": unwrap,
    "random_split": split,
    "random_fold_in": fold_in,
    "random_clone": clone,
    "random_bits": bits,
}
# On arrays of keys, which are those on their words.
SHAPES: dict[str, Callable[..., Any]] = {
    "unstack": unstack,
    "slice": slice_,
    "squeeze": squeeze,
}


def results(
    trace: Retrace, eqn: _jax.JaxprEqn, operands: Sequence[Any]
) -> list[Any] | None:
    """Returns the results of an operation that may be on keys; None if it is not."""
    if not any(isinstance(x, (Key, KeyData)) for x in operands):
        return None
    if bodies(eqn) and eqn.primitive.name not in SHAPES:
        raise errors.UnsupportedError(
            f"{eqn.primitive.name} of random keys is not supported in a kernel",
            expected="loops, branches and functions of keys",
            got=eqn.primitive.name,
            hint="split the key outside of it",
        )
    name, params = eqn.primitive.name, eqn.params
    if isinstance(operands[0], KeyData) and name == "unstack":
        data = operands[0].key
        if params["axis"] < len(data.shape):
            return [KeyData(key) for key in unstack(params, data)]
    elif isinstance(operands[0], KeyData):
        key = _of_data(name, params, operands[0].key)
        if key is not None:
            return [KeyData(key)]
    operands = settled(operands)
    if name in SHAPES and isinstance(operands[0], Key):
        shaped = SHAPES[name](params, *operands)
        return shaped if isinstance(shaped, list) else [shaped]
    if not any(isinstance(x, Key) for x in operands):
        return None
    words = [
        trace.equation(eqn, [_word(x, part) for x in operands])
        for part in ("high", "low")
    ]
    return [Key(high, low) for high, low in zip(*words, strict=True)]


def _word(x: Any, part: str) -> Any:
    return getattr(x, part) if isinstance(x, Key) else x


def _of_data(name: str, params: dict[str, Any], key: Key) -> Key | None:
    """An operation on the array of words, if it leaves the words together."""
    rank = len(key.shape)
    match name:
        case "slice" if params["strides"] is None:
            starts, limits = params["start_indices"], params["limit_indices"]
            if (starts[rank], limits[rank]) == (0, 2):
                whole = {
                    "start_indices": starts[:rank],
                    "limit_indices": limits[:rank],
                    "strides": None,
                }
                return slice_(whole, key)
        case "squeeze" if rank not in params["dimensions"]:
            return squeeze(params, key)
    return None
