# SPDX-License-Identifier: Apache-2.0
"""Kernels of plain jnp on a GPU: ours (examples/), Triton's, XLA's, a device copy.

python -m benchmarks.registers [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.beside_copy import COPY, ROUNDS, interleaved, wait
from examples import add_one, cross_entropy, cumsum, norms, softmax


@dataclasses.dataclass(frozen=True)
class Work:
    """One row of the table.

    Attributes:
      name: what is computed, with its size.
      args: the arrays, random normal.
      moved_bytes: bytes that it has to read and write.
      ours: candidates of this package, by name.
      triton: Triton's candidates: several configurations, the fastest of which counts.
      reference: the same in plain JAX, which is also XLA's candidate.
    """

    name: str
    args: tuple[Any, ...]
    moved_bytes: int
    ours: Mapping[str, Callable[..., Any]]
    triton: Sequence[Callable[..., Any]]
    reference: Callable[..., Any]


def works() -> list[Callable[[], Work]]:
    """Returns functions that make each row's arrays when it is measured."""
    from benchmarks import triton_registers as triton

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def normal(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.random.normal(jax.random.key(0), shape, dtype)

    def rows(kind: str) -> Work:
        x, scale = normal((16384, 8192)), normal((8192,))
        if kind == "softmax":
            return Work(
                "softmax of 16384x8192 bf16", (x,), 2 * x.nbytes,
                _both_ways(softmax.softmax), [triton.softmax(w) for w in (4, 8, 16)],
                _in_float32(jax.nn.softmax),
            )  # fmt: skip
        centred = kind == "layer norm"
        own = norms.layer_norm if centred else norms.rms_norm
        return Work(
            f"{kind} of 16384x8192 bf16", (x, scale), 2 * x.nbytes,
            {"pallas_gpu": own}, [triton.norm(centred, w) for w in (4, 8, 16)],
            _in_float32(functools.partial(norms.reference, centred=centred)),
        )  # fmt: skip

    def plus_one() -> Work:
        x = normal((2**30,))
        return Work(
            "x + 1 of 2 GiB bf16", (x,), 2 * x.nbytes, {"pallas_gpu": add_one.add_one},
            [triton.add_one(1024, 4), triton.add_one(2048, 4), triton.add_one(4096, 8)],
            lambda x: x + 1,
        )  # fmt: skip

    def entropy() -> Work:
        x = normal((8192, 32000))
        labels = jax.random.randint(jax.random.key(1), (8192,), 0, 32000)
        return Work(
            "cross-entropy of 8192x32000 bf16", (x, labels), x.nbytes,
            _both_ways(cross_entropy.cross_entropy),
            [triton.cross_entropy(4096, 4), triton.cross_entropy(8192, 8),
             triton.cross_entropy(32768, 32),
             *(triton.cross_entropy_in_parts(d, p, w)
               for d, p, w in ((4, 1024, 4), (8, 1024, 4), (16, 1024, 4)))],
            lambda x, labels: cross_entropy.reference(x.astype(jnp.float32), labels),
        )  # fmt: skip

    def prefix() -> Work:
        x = normal((2**27,), jnp.float32)
        return Work(
            "cumsum of 2^27 f32", (x,), 3 * x.nbytes, {"pallas_gpu": cumsum.cumsum},
            [triton.cumsum(b, w) for b, w in ((4096, 4), (8192, 8), (16384, 8))],
            jnp.cumsum,
        )  # fmt: skip

    return [
        plus_one,
        *(functools.partial(rows, k) for k in ("softmax", "RMS norm", "layer norm")),
        entropy,
        prefix,
    ]


def _both_ways(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {
        "pallas_gpu": function,
        "pallas_gpu, approx_math": functools.partial(function, approx_math=True),
    }


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        result = function(*(x.astype(jnp.float32) for x in args))
        return result.astype(args[0].dtype)

    return run


def measure(work: Work) -> list[dict[str, Any]]:
    """Checks and measures the candidates of a row, interleaved."""
    import torch

    jitted = {**work.ours, "XLA": work.reference}
    candidates: dict[str, Callable[[], Any]] = {
        name: functools.partial(wait, jax.jit(f), work.args)
        for name, f in jitted.items()
    }
    for i, f in enumerate(work.triton):
        candidates[f"Triton {i}"] = functools.partial(f, *work.args)
    expected = _float64_sample(work.reference(*work.args))
    errors = {name: _error(run(), expected) for name, run in candidates.items()}
    seconds = interleaved(candidates, torch.from_dlpack(work.args[0]))
    best = min((n for n in seconds if n.startswith("Triton")), key=seconds.__getitem__)
    rows = []
    for name in (*work.ours, best, "XLA", COPY):
        # The copy reads and writes the first array; its rate is what compares.
        moved = 2 * work.args[0].nbytes if name == COPY else work.moved_bytes
        rate = moved / seconds[name]
        copied = 2 * work.args[0].nbytes / seconds[COPY]
        rows.append(
            {
                "work": work.name,
                "by": "Triton" if name == best else name,
                "us": seconds[name] * 1e6,
                "TB/s": rate / 1e12,
                "error": errors.get(name, ""),
                "of Triton": "" if name == COPY else seconds[best] / seconds[name],
                "of the copy": rate / copied,
            }
        )
    return rows


def _float64_sample(x: Any) -> np.ndarray:
    """Returns the first and the last elements of a result."""
    flat = x.reshape(-1)
    first, last = flat[:65536], flat[-65536:]
    parts = [p.float().cpu() if hasattr(p, "cpu") else p for p in (first, last)]
    return np.concatenate([np.asarray(p).astype(np.float64) for p in parts])


def _error(got: Any, expected: np.ndarray) -> float:
    """Returns the relative error in the Euclidean norm, of a sample."""
    return float(
        np.linalg.norm(_float64_sample(got) - expected) / np.linalg.norm(expected)
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import torch
    import triton

    rows = [row for work in works() for row in measure(work())]
    notes = (
        f"torch {torch.__version__}, Triton {triton.__version__}. Random normal; "
        f"device times, medians of {ROUNDS} rounds in a shuffled order. Triton: the "
        "fastest of three or six configurations. The error is relative to XLA's result."
    )
    timing.report("Kernels of plain jnp", rows, notes, options.json)


if __name__ == "__main__":
    main()
