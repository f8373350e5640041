# SPDX-License-Identifier: Apache-2.0
"""Ragged products on a GPU: ours, upstream's, XLA's, and a dense one of that size

python -m benchmarks.ragged_dot [--json] [--rounds N] [--only forward]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as upstream
from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as transposed

from benchmarks import timing
from pallas_gpu import ops
from pallas_gpu.testing import do_bench

M, K, N = 16384, 4096, 4096
GROUPS = 16, 128
XLA = "lax.ragged_dot_general"
# 8-bit floats with scales for each 1x128 and 128x128 elements.
NARROW, BLOCK, E4M3 = "e4m3, scales of blocks", 128, jnp.float8_e4m3fn
OURS, GATHERED = "pallas_gpu", "pallas_gpu, rows gathered"
# XLA multiplies all rows by the matrices of all groups.
MOST_OF_XLA = 16
# The order in which rows are gathered.
ROWS = np.random.default_rng(0).permutation(M).astype(np.int32)
UPSTREAM = {"block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 8}

PRODUCTS = "forward", "d lhs", "d rhs", NARROW


def numbers(lhs: int, rhs: int, groups: tuple[int, ...]) -> Any:
    """Returns dimension numbers: what is contracted, and the dimension of groups."""
    dims = (((lhs,), (rhs,)), ((), ()))
    return jax.lax.RaggedDotDimensionNumbers(dims, (0,), groups)


# What is computed of lhs (M, K), rhs (groups, K, N) and the cotangent (M, N).
FORWARD = numbers(1, 1, (0,))
D_LHS = numbers(1, 2, (0,))
D_RHS = numbers(0, 0, ())


def sizes_of(groups: int, kind: str, m: int = M) -> np.ndarray:
    """Returns the rows of each group: equal, or between random cuts."""
    if kind == "even":
        return np.full(groups, m // groups, np.int32)
    cuts = np.sort(np.random.default_rng(groups).integers(0, m + 1, groups - 1))
    return np.diff(cuts, prepend=0, append=m).astype(np.int32)


def candidates(what: str, groups: int) -> dict[str, Callable[..., Any]]:
    """Returns functions of the two operands and the sizes, the dense product first."""
    if what == NARROW:
        return narrow_candidates()
    dims = {"forward": FORWARD, "d lhs": D_LHS, "d rhs": D_RHS}[what]

    def upstreams(a: Any, b: Any, sizes: Any, m: int, n: int) -> Any:
        tile = {"block_m": m, "block_n": n, **UPSTREAM}
        if what == "d rhs":
            return transposed.transposed_ragged_dot(a, b, group_sizes=sizes, **tile)
        return upstream.ragged_dot(
            a, b, group_sizes=sizes, transpose_rhs=what == "d lhs", **tile
        )

    def dense(a: Any, b: Any, sizes: Any) -> Any:
        match what:
            case "forward":
                return a @ b[0]
            case "d lhs":
                return a @ b[0].T
        return a.T @ b

    found = {
        "dense, jnp.matmul": dense,
        XLA: functools.partial(
            jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=dims
        ),
        "upstream, 128x128": functools.partial(upstreams, m=128, n=128),
        OURS: functools.partial(
            ops.ragged_dot_general, ragged_dot_dimension_numbers=dims
        ),
    }
    if what == "forward":
        rows = jnp.asarray(ROWS)
        found[GATHERED] = functools.partial(ops.ragged_dot, rows=rows)
        found[f"XLA's gather, {OURS}"] = lambda a, b, sizes: ops.ragged_dot(
            a[rows], b, sizes
        )
    if groups > MOST_OF_XLA:
        del found[XLA]
    return {name: jax.jit(f) for name, f in found.items()}


def narrow_candidates() -> dict[str, Callable[..., Any]]:
    """Returns functions of the two operands, the sizes and the scales."""

    def dense(a: Any, b: Any, sizes: Any, of_a: Any, of_b: Any) -> Any:
        return ops.scaled_matmul(a, b[0], of_a, of_b[0], transpose_b=True)

    def ours(a: Any, b: Any, sizes: Any, of_a: Any, of_b: Any) -> Any:
        return ops.ragged_dot_general(
            a, b, sizes, D_LHS, lhs_scale=of_a, rhs_scale=of_b
        )

    return {"dense, ops.scaled_matmul": jax.jit(dense), OURS: jax.jit(ours)}


def compiled(problems: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Any]:
    """Returns the candidates of each problem, compiled by several threads."""
    jobs = [
        (problem, name, f)
        for problem in problems
        for name, f in candidates(*problem).items()
    ]

    def compile_one(job: Any) -> Any:
        (what, groups), _, f = job
        a, b, *scales = jax.eval_shape(functools.partial(operands, what, groups))
        sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
        return f.lower(a, b, sizes, *scales).compile()

    with ThreadPoolExecutor() as pool:
        functions = list(pool.map(compile_one, jobs))
    found: dict[tuple[str, int], Any] = {problem: {} for problem in problems}
    for (problem, name, _), f in zip(jobs, functions, strict=True):
        found[problem][name] = f
    return found


def shapes(what: str, groups: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of the operands."""
    return {
        "forward": ((M, K), (groups, K, N)),
        "d lhs": ((M, N), (groups, K, N)),
        "d rhs": ((M, K), (M, N)),
        NARROW: ((M, K), (groups, N, K)),
    }[what]


@functools.partial(jax.jit, static_argnums=(0, 1))
def operands(what: str, groups: int) -> tuple[Any, ...]:
    """Returns random normal operands, and random scales where there are some."""
    keys = jax.random.split(jax.random.key(groups), 4)
    pair = zip(keys, shapes(what, groups), strict=False)
    a, b = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in pair)
    if what != NARROW:
        return a, b
    sides = (M, K // BLOCK), (groups, N // BLOCK, K // BLOCK)
    scales = (
        jax.random.uniform(key, shape, jnp.float32, 0.5, 2)
        for key, shape in zip(keys[2:], sides, strict=True)
    )
    return a.astype(E4M3), b.astype(E4M3), *scales


@jax.jit
def scaled(a: Any, b: Any, of_a: Any, of_b: Any) -> tuple[Any, Any]:
    """Returns the operands that are meant, in float32."""
    of_a, of_b = jnp.repeat(of_a, BLOCK, 1), jnp.repeat(of_b, BLOCK, 1)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return a * of_a, b * jnp.repeat(of_b, BLOCK, 2)


def error(what: str, got: Any, a: Any, b: Any, sizes: np.ndarray) -> float:
    """Returns the largest relative error of some groups, against float32."""
    ends = np.cumsum(sizes)
    groups = {0, 1, len(sizes) // 2, len(sizes) - 1}
    check = _error_of_columns if what == "d rhs" else _error_of_last_rows
    return max(
        float(
            check(got, a, b, g, ends[g] - sizes[g], ends[g], what in (NARROW, "d lhs"))
        )
        for g in groups
    )


def _relative(got: Any, expected: Any) -> Any:
    norm = jnp.linalg.norm(expected)
    difference = jnp.linalg.norm(got.astype(jnp.float32) - expected)
    return jnp.where(norm > 0, difference / norm, difference)


@functools.partial(jax.jit, static_argnums=6)
def _error_of_last_rows(got, a, b, group, start, end, transposed, rows=64):
    """Compares the last rows of a group, up to 64."""
    first = jnp.maximum(end - rows, 0)
    row = first + jnp.arange(rows)
    inside = ((row >= start) & (row < end))[:, None]
    x, part = (
        jax.lax.dynamic_slice_in_dim(y, first, rows).astype(jnp.float32)
        for y in (a, got)
    )
    matrix = b[group].astype(jnp.float32)
    matrix = matrix.T if transposed else matrix
    expected = jnp.matmul(x, matrix, precision="highest")
    return _relative(jnp.where(inside, part, 0), jnp.where(inside, expected, 0))


@functools.partial(jax.jit, static_argnums=6)
def _error_of_columns(got, a, b, group, start, end, _, columns=64):
    """Compares the first rows of a group's matrix."""
    row = jnp.arange(a.shape[0])
    inside = ((row >= start) & (row < end))[:, None]
    x = jnp.where(inside, a[:, :columns], 0).astype(jnp.float32)
    expected = jnp.matmul(x.T, b.astype(jnp.float32), precision="highest")
    return _relative(got[group, :columns], expected)


def measure(
    what: str, groups: int, functions: Any, rounds: int
) -> Iterator[dict[str, Any]]:
    """Times the candidates with even and uneven groups; checks them before."""
    a, b, *scales = operands(what, groups)
    dense = next(iter(functions))
    gathered = a[ROWS] if what == "forward" else a
    for kind in ("even", "uneven"):
        sizes = sizes_of(groups, kind)
        args = a, b, jnp.asarray(sizes), *scales
        meant = scaled(a, b, *scales) if scales else (a, b)
        errors = {}
        for name, f in functions.items():
            if name != dense:
                left = gathered if "gather" in name else meant[0]
                errors[name] = error(what, f(*args), left, meant[1], sizes)
                assert errors[name] < 1e-2, f"{name}: relative error {errors[name]}"
        times = do_bench(functions, *args, rounds=rounds)
        for name, milliseconds in times.items():
            yield {
                "product": what,
                "groups": f"{groups}, {kind}",
                "kernel": name,
                "µs": milliseconds * 1e3,
                "TFLOP/s": 2 * M * N * K / milliseconds / 1e9,
                "rel. error": errors.get(name, ""),
                "of dense": times[dense] / milliseconds,
            }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", choices=PRODUCTS, nargs="*", default=PRODUCTS)
    options = parser.parse_args()
    problems = [(what, n) for what in options.only for n in GROUPS]
    rows = [
        row
        for problem, functions in compiled(problems).items()
        for row in measure(*problem, functions, options.rounds)
    ]
    notes = (
        f"bfloat16, random normal, M={M}, K={K}, N={N}; device times, medians of "
        f"{options.rounds} rounds in a shuffled order."
    )
    timing.report("Ragged products", rows, notes, options.json)


if __name__ == "__main__":
    main()
