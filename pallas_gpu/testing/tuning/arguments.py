# SPDX-License-Identifier: Apache-2.0
"""Arguments of a tuned function: arrays and the rest, the key, and random inputs."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gpu import _jax, errors, expect
from pallas_gpu.testing import calling

CONFIG = "config"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}")
# Integers are drawn from 1 up to this: they may be positions in small arrays.
_LARGEST_INTEGER = 7
_MOST_CANDIDATES = 10_000


def listed(value: Any, what: str) -> tuple[Any, ...]:
    """Accepts sequences of one or more configurations."""
    found = tuple(value) if expect.is_sequence(value) else ()
    if 0 < len(found) <= _MOST_CANDIDATES:
        return found
    raise errors.ArgumentError(
        f"{what}: a wrong number of configurations",
        expected=f"1 to {_MOST_CANDIDATES}",
        got=len(found) if expect.is_sequence(value) else expect.shown(value),
        hint="list the configurations to try",
    )


def text_of(value: Any) -> str:
    """Returns a value's repr without addresses, which differ between processes."""
    return _ADDRESS.sub("", repr(value))


def is_array(value: Any) -> bool:
    """True for arrays, tracers and `jax.ShapeDtypeStruct`s, not for Python numbers."""
    return isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def _dtype(array: Any) -> Any:
    """Returns the type that JAX gives an array: of 32 bits for NumPy's of 64."""
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array.dtype  # keys of jax.random
    return jnp.dtype(jax.dtypes.canonicalize_dtype(array.dtype))


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a tuned function, without its configuration.

    Attributes:
      tree: how the arguments consist of leaves.
      leaves: all leaves; those that are arrays are passed anew in each call.
    """

    function: Callable[..., Any]
    tree: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, function: Callable[..., Any], args: Any, named: Any) -> Call:
        """Returns the call of a function with some arguments."""
        leaves, tree = jax.tree.flatten((tuple(args), dict(named)))
        return cls(function, tree, tuple(leaves))

    @property
    def arrays(self) -> list[Any]:
        """The leaves that are arrays."""
        return [x for x in self.leaves if is_array(x)]

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the arrays."""
        return [jax.ShapeDtypeStruct(x.shape, _dtype(x)) for x in self.arrays]

    @property
    def is_traced(self) -> bool:
        """Whether some arrays have no values: tracers, or types alone."""
        return any(
            _jax.is_tracer(x) or isinstance(x, jax.ShapeDtypeStruct)
            for x in self.arrays
        )

    def arguments(
        self, arrays: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the positional and the named arguments, with other arrays."""
        rest = iter(arrays)
        leaves = [next(rest) if is_array(x) else x for x in self.leaves]
        return jax.tree.unflatten(self.tree, leaves)

    def with_config(self, config: Any) -> Callable[..., Any]:
        """Returns the call with a configuration as a function of the arrays."""

        def call(*arrays: Any) -> Any:
            args, named = self.arguments(arrays)
            return self.function(*args, **named, **{CONFIG: config})

        return call


def inputs(call: Call) -> list[Any]:
    """Returns the call's arrays; random ones of the same types if they are traced.

    Floats are normal, integers from 1 to 7, so that no factor is zero.
    """
    if not call.is_traced:
        return call.arrays
    key = jax.random.key(0)
    return [_random(jax.random.fold_in(key, i), x) for i, x in enumerate(call.types)]


def _random(key: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    dtype = like.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.random.normal(key, like.shape, dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.random.normal(key, like.shape, jnp.float32).astype(dtype)
    if dtype == jnp.bool_:
        return jax.random.bernoulli(key, 0.5, like.shape)
    if jnp.issubdtype(dtype, jnp.integer):
        most = min(_LARGEST_INTEGER, int(jnp.iinfo(dtype).max))
        drawn = jax.random.randint(key, like.shape, 1, most + 1, jnp.int32)
        return drawn.astype(dtype)
    raise errors.DTypeError(
        "autotune: there are no random inputs of this type",
        expected="arrays of floats, integers or booleans",
        got=str(dtype),
        hint="call the function once outside of jax.jit, with values, or pass inputs=",
    )


# --- keys -----------------------------------------------------------------------------

Key = Sequence[str] | Callable[..., Any] | None


def key_of(key: Key, signature: inspect.Signature, args: Any, named: Any) -> str:
    """Returns what a tuned configuration depends on, as text.

    Args:
      key: names of arguments; a function of all arguments; None: all arguments.
      signature: of the tuned function.
      args, named: the arguments of a call, without the configuration.
    """
    if callable(key):
        return described(calling.call("autotune: key", key, *args, **named))
    bound = signature.bind_partial(*args, **named)
    bound.apply_defaults()
    values = {n: x for n, x in bound.arguments.items() if n != CONFIG}
    chosen = values if key is None else {n: values[n] for n in key if n in values}
    return ", ".join(f"{name}={described(x)}" for name, x in chosen.items())


def described(value: Any) -> str:
    """Returns text for a pytree: shapes and dtypes of arrays, reprs of the rest."""
    leaves, tree = jax.tree.flatten(value)
    texts = [
        f"{_dtype(x).name}{list(x.shape)}" if is_array(x) else text_of(x)
        for x in leaves
    ]
    if jax.tree.structure(0) == tree:
        return texts[0]
    return f"{tree}: {', '.join(texts)}"


# --- fingerprints ---------------------------------------------------------------------


def digest(*texts: str) -> str:
    """Returns the first 32 digits of the SHA-256 of some texts."""
    hashed = hashlib.sha256("\0".join(texts).encode())
    return hashed.hexdigest()[:32]


def source_of(function: Callable[..., Any]) -> str:
    """Returns a function's source; its bytecode where there is no source."""
    function = inspect.unwrap(function)
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return text_of(function) if code is None else code.co_code.hex()


def jaxpr_digest(closed: Any) -> str:
    """Returns the digest of a traced function, equal in every process."""
    return digest(text_of(str(closed)))
