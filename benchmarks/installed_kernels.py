# SPDX-License-Identifier: Apache-2.0
"""Upstream's own Hopper and Triton kernels, by both packages, in one run on a GPU.

python -m benchmarks.installed_kernels [--json]

The kernels are those of `jax.experimental.pallas.ops.gpu` as they are installed; for
this package their import lines are changed, and nothing else.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import timing
from tests.support.installed_kernels import PLACE, ported

INPUTS = 3
ROUNDS = 30
Function = Callable[..., Any]
# The largest difference of the two, relative in the Euclidean norm: bfloat16 rounds so.
LARGEST_ERROR = 4e-3


def kernels() -> Iterator[tuple[str, str, Callable[[Any], Function], list[Any]]]:
    """Yields a name, upstream's module, a function of the module, and array types."""
    f16, bf16, i8 = jnp.float16, jnp.bfloat16, jnp.int8
    square = (4096, 4096)

    def product(module: Any, name: str, **given: Any) -> Function:
        dims = module.MatmulDimension
        config = module.TuningConfig(
            128, 128, 64, 4, grid_tile_width=8, wg_dimension=dims.M,
            cluster_dimension=dims.N,
        )  # fmt: skip
        return functools.partial(getattr(module, name), config=config, **given)

    yield (
        "matmul 4096, bfloat16", "hopper_matmul_mgpu",
        lambda m: lambda a, b: product(m, "matmul")(a, b, None),
        [(square, bf16), (square, bf16)],
    )  # fmt: skip
    yield (
        "matmul 4096, int8 by bfloat16", "hopper_mixed_type_matmul_mgpu",
        lambda m: product(m, "mixed_matmul_kernel", out_dtype=bf16),
        [(square, i8), (square, bf16)],
    )  # fmt: skip
    groups = jnp.full((16,), 1024, jnp.int32)
    blocks = {"block_m": 128, "block_n": 128, "block_k": 64}
    yield (
        "ragged dot, 16 groups", "ragged_dot_mgpu",
        lambda m: lambda a, b: m.ragged_dot(
            a, b, group_sizes=groups, max_concurrent_steps=5, grid_block_n=4, **blocks
        ),
        [((16384, 2048), f16), ((16, 2048, 4096), f16)],
    )  # fmt: skip
    yield (
        "transposed ragged dot, 16 groups", "transposed_ragged_dot_mgpu",
        lambda m: lambda a, b: m.transposed_ragged_dot(
            a, b, group_sizes=groups, max_concurrent_steps=4, grid_block_n=2, **blocks
        ),
        [((16384, 2048), f16), ((16384, 2048), f16)],
    )  # fmt: skip
    heads = [((4, 4096, 16, 128), f16)] * 3
    for name in ("attention", "attention_with_pipeline_emitter"):
        for causal in (False, True) if name == "attention" else (False,):
            yield (
                f"{name}{', causal' * causal}", "attention_mgpu",
                functools.partial(_attention, name=name, causal=causal), heads,
            )  # fmt: skip
    yield "attention with derivatives", "attention_mgpu", _derivatives, heads
    yield from _for_triton()


def _for_triton() -> Iterator[tuple[str, str, Callable[[Any], Function], list[Any]]]:
    """Yields kernels that upstream compiles by Triton."""
    bf16, f16 = jnp.bfloat16, jnp.float16
    rows = ((16384, 4096), bf16)
    yield "softmax (Triton)", "softmax", lambda m: m.softmax, [rows]
    for name in ("rms_norm", "layer_norm"):
        yield (
            f"{name} (Triton)", name, functools.partial(_norm, name=name),
            [((16, 1024, 4096), bf16), *[((4096,), bf16)] * 2],
        )  # fmt: skip
    heads = [((4, 4096, 16, 64), f16)] * 3
    for causal in (False, True):
        yield (
            f"mha{', causal' * causal} (Triton)", "attention",
            functools.partial(_mha, causal=causal), heads,
        )  # fmt: skip
    yield (
        "gqa decode (Triton)", "decode_attention", lambda m: m.gqa,
        [((32, 32, 128), f16), *[((32, 4096, 8, 128), f16)] * 2],
    )  # fmt: skip


def _norm(module: Any, *, name: str) -> Function:
    return getattr(module, name)


def _mha(module: Any, *, causal: bool) -> Function:
    sizes = module.BlockSizes(block_q=64, block_k=64)
    return lambda q, k, v: module.mha(
        q, k, v, None, sm_scale=0.125, causal=causal, block_sizes=sizes
    )


def _attention(module: Any, *, name: str, causal: bool) -> Function:
    config = module.TuningConfig(64, 128, 2, causal=causal)
    return functools.partial(getattr(module, name), config=config)


def _derivatives(module: Any) -> Function:
    config = module.TuningConfig(
        64, 128, 2, compute_wgs_bwd=2, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64,
        block_kv_dq=64,
    )  # fmt: skip

    def both(q: Any, k: Any, v: Any) -> Any:
        out, vjp = jax.vjp(lambda *x: module.attention(*x, config), q, k, v)
        return out, *vjp(out)

    return both


def make_inputs(types: list[Any]) -> list[tuple[Any, ...]]:
    """Returns sets of random normal arrays; of int8 times 16."""

    def normal(seed: int, shape: Any, dtype: Any) -> Any:
        x = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
        return (x * 16 if dtype == jnp.int8 else x).astype(dtype)

    return [
        tuple(normal(10 * i + j, *t) for j, t in enumerate(types))
        for i in range(INPUTS)
    ]


def relative_error(candidates: dict[str, Function], inputs: tuple[Any, ...]) -> float:
    """Returns the largest difference of the results of the two packages."""
    ours, theirs = (
        [x.astype(jnp.float32) for x in jax.tree.leaves(jax.jit(f)(*inputs))]
        for f in candidates.values()
    )
    return max(
        float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
        for a, b in zip(ours, theirs, strict=True)
    )


def measure(
    name: str, module: str, make: Callable[[Any], Function], types: list[Any]
) -> dict[str, Any]:
    """Returns the row of a kernel."""
    candidates = {
        "pallas_gpu": make(ported(module)),
        "upstream": make(importlib.import_module(f"{PLACE}.{module}")),
    }
    inputs = make_inputs(types)
    error = relative_error(candidates, inputs[0])
    if not error <= LARGEST_ERROR:
        raise SystemExit(f"{name}: the results differ by {error:.2e}")
    times = timing.on_device(candidates, inputs, rounds=ROUNDS)
    return {
        "kernel": name,
        **{f"{key} us": 1e6 * value for key, value in times.items()},
        "upstream/pallas_gpu": times["upstream"] / times["pallas_gpu"],
        "error": error,
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(*kernel) for kernel in kernels()]
    notes = f"Random normal; device times, medians of {ROUNDS} rounds."
    timing.report("Kernels that JAX installs", rows, notes, options.json)


if __name__ == "__main__":
    main()
