# SPDX-License-Identifier: Apache-2.0
"""Operations on rows on a GPU: `pallas_gpu.ops` and XLA, forward and backward.

python -m benchmarks.rows [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import timing
from examples.transformer import Plain
from pallas_gpu import ops

INPUTS = 3
ROUNDS = 20


@dataclasses.dataclass(frozen=True)
class Work:
    """One row of the table.

    Attributes:
      name: what is computed, with its size.
      shapes: of the arrays, random normal bfloat16; an int is a number of classes: of
        labels for the rows of the first array.
      ours, plain: functions of the arrays.
      tolerance: largest relative error in the Euclidean norm, against plain JAX.
    """

    name: str
    shapes: tuple[Any, ...]
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    tolerance: float = 1e-2


def works() -> Iterator[Work]:
    """Yields the rows of the table, forward and with backward."""
    big, column = (16384, 8192), (8192,)
    heads = (8, 4096, 32, 128)
    hidden, head, classes = (8192, 4096), (4096, 32000), 32000
    table = [
        ("softmax of 16384x8192", (big,), ops.softmax, _softmax),
        ("log_softmax of 16384x8192", (big,), ops.log_softmax, _log_softmax),
        ("rms_norm of 16384x8192", (big, column), ops.rms_norm, Plain.norm),
        ("layer_norm of 16384x8192", (big, column, column), ops.layer_norm, _layer),
        ("rotary of 8x4096x32x128", (heads,), ops.rotary_embedding, Plain.rotary),
        (
            "linear_cross_entropy of 8192x4096x32000", (hidden, head, classes),
            ops.linear_cross_entropy, Plain.losses,
        ),
    ]  # fmt: skip
    for name, shapes, ours, plain in table:
        yield Work(name, shapes, ours, plain)
        yield Work(f"{name}, with backward", shapes, *map(_gradients, (ours, plain)))


def _softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)


def _log_softmax(x: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)


def _layer(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)
    return (y * scale + bias).astype(x.dtype)


def _gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns value and derivatives, for the first result's cotangent of its values.

    A cotangent of ones would be no work for a softmax.
    """

    def run(*args: Any) -> Any:
        floats = [i for i, x in enumerate(args) if x.dtype == jnp.bfloat16]

        def of_floats(*given: Any) -> Any:
            return function(*given, *args[len(floats) :])

        value, pull = jax.vjp(of_floats, *(args[i] for i in floats))
        return value, pull(value / value.size if value.ndim == 1 else value)

    return run


def arrays(work: Work, seed: int) -> tuple[Any, ...]:
    """Returns random arrays."""
    keys = jax.random.split(jax.random.key(seed), len(work.shapes))

    def make(key: Any, shape: Any) -> jax.Array:
        if isinstance(shape, int):
            return jax.random.randint(key, work.shapes[0][:-1], 0, shape)
        x = jax.random.normal(key, shape, jnp.bfloat16)
        is_matrix = len(work.shapes) > 1 and shape == (4096, 32000)
        return x / 64 if is_matrix else x

    return tuple(map(make, keys, work.shapes))


def measure(work: Work) -> dict[str, Any]:
    """Checks and times one row."""
    inputs = [arrays(work, seed) for seed in range(INPUTS)]
    ours, plain = (jax.jit(f) for f in (work.ours, work.plain))
    pairs = zip(
        jax.tree.leaves(ours(*inputs[0])),
        jax.tree.leaves(plain(*inputs[0])),
        strict=True,
    )
    error = max(float(_error(a, b)) for a, b in pairs)
    assert error < work.tolerance, f"{work.name}: relative error {error}"
    seconds = timing.on_device({"ours": ours, "XLA": plain}, inputs, rounds=ROUNDS)
    return {
        "work": work.name,
        "pallas_gpu, us": seconds["ours"] * 1e6,
        "XLA, us": seconds["XLA"] * 1e6,
        "of XLA": seconds["XLA"] / seconds["ours"],
        "rel. error": error,
    }


@jax.jit
def _error(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = (x.astype(jnp.float32) for x in (a, b))
    return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(work) for work in works()]
    notes = (
        "bfloat16, random normal (weights of the last layer: /64); device times, "
        f"medians of {ROUNDS} rounds. Errors are relative to plain JAX, which XLA "
        "compiles."
    )
    timing.report("Operations on rows", rows, notes, options.json)


if __name__ == "__main__":
    main()
