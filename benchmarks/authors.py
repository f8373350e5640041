# SPDX-License-Identifier: Apache-2.0
"""Eight kernels written from the documentation alone, and their rivals in Triton.

python -m benchmarks.authors [NAME ...] [--all] [--json]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import multiprocessing
import os
import statistics
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.beside_copy import COPY, interleaved, wait

NAMES = (
    "kmeans", "sink_attention", "block_sparse", "hadamard", "swiglu_fp8", "causal_conv",
    "moe_combine", "moe_slots",
)  # fmt: skip
# Of the norm of the result; float8 rounds to four bits.
TOLERANCES = {"kmeans": 1e-5, "swiglu_fp8": 1e-2, "moe_slots": 0.0}


def module(name: str) -> Any:
    """Returns the module of a kernel."""
    return importlib.import_module(f"benchmarks.author_kernels.{name}")


def comparable(name: str, args: Any, got: Any) -> Any:
    """Returns results as arrays that every right kernel has alike."""
    got = jax.tree.leaves(got)
    if hasattr(module(name), "comparable"):
        got = module(name).comparable(args, *got)
    return [x.astype(jnp.float32) for x in got]


def error(got: Any, expected: Any) -> float:
    """Returns the largest relative error of the results in the Euclidean norm."""
    norms = [
        jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())
        for a, b in zip(got, expected, strict=True)
    ]
    return max(map(float, norms))


def _triton(name: str, args: Any) -> dict[str, Any]:
    """Returns Triton's candidates, which wait for their results."""
    import torch

    from benchmarks import triton_authors

    launch, configs = triton_authors.CANDIDATES[name]
    arrays = [torch.from_dlpack(x) for x in args]
    if name == "hadamard":
        arrays.append(torch.from_dlpack(module(name).matrix()))

    def run(config: Any) -> Any:
        given = list(arrays)
        if name == "moe_slots":
            given.append(torch.zeros(256, dtype=torch.int32, device="cuda"))
        result = launch(config, *given)
        torch.cuda.synchronize()
        return result

    return {f"Triton {c}": functools.partial(run, c) for c in configs}


def _from_torch(x: Any) -> jax.Array:
    import torch

    if x.dtype == torch.float8_e4m3fn:
        bits = jnp.from_dlpack(x.view(torch.uint8))
        return jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
    return jnp.from_dlpack(x)


def measure(
    name: str, every: bool, turn: Callable[[], AbstractContextManager[Any]]
) -> list[dict[str, Any]]:
    """Checks and times the candidates for one kernel.

    Args:
      name: of its module.
      every: whether to return all candidates, or the fastest of each kind.
      turn: called when all candidates are compiled; the context in which to measure.
    """
    import torch

    own = module(name)
    args = tuple(map(jnp.asarray, own.arrays(*own.FULL)))
    expected = comparable(name, args, jax.jit(own.reference)(*args))
    runs = {
        f"pallas_gpu {c}": functools.partial(
            wait, jax.jit(functools.partial(own.function, config=c)), args
        )
        for c in own.CONFIGS
    }
    runs |= _triton(name, args)
    errors = {}
    for label, run in list(runs.items()):
        try:
            got = run()
            if not isinstance(jax.tree.leaves(got)[0], jax.Array):
                got = jax.tree.map(_from_torch, got)
            errors[label] = error(comparable(name, args, got), expected)
        except Exception as problem:
            text = "".join(traceback.format_exception_only(problem))
            print(f"{name}, {label}: {text[:300]}", flush=True)
            del runs[label]
            continue
        assert errors[label] <= TOLERANCES.get(name, 5e-3), (name, label, errors[label])
    with turn():
        seconds = interleaved(runs, torch.from_dlpack(args[0]))
    del seconds[COPY]
    best = {
        by: min((n for n in seconds if n.startswith(by)), key=seconds.__getitem__)
        for by in ("pallas_gpu", "Triton")
    }
    return [
        {
            "kernel": name,
            "by": label,
            "us": t * 1e6,
            "of Triton": seconds[best["Triton"]] / t,
            "error": errors[label],
        }
        for label, t in seconds.items()
        if every or label in best.values()
    ]


def _process(
    name: str, every: bool, all_compiled: Any, measures: Any, results: Any
) -> None:
    """Compiles beside the other processes, and measures alone."""

    def turn() -> Any:
        all_compiled.wait()
        return measures

    try:
        results.put(measure(name, every, turn))
    except BaseException:
        all_compiled.abort()
        results.put([])
        raise


def in_processes(names: Sequence[str], every: bool) -> list[dict[str, Any]]:
    """Measures kernels, which are compiled in a process each."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    spawn = multiprocessing.get_context("spawn")
    shared = spawn.Barrier(len(names)), spawn.Lock(), spawn.Queue()
    processes = [
        spawn.Process(target=_process, args=(name, every, *shared)) for name in names
    ]
    for process in processes:
        process.start()
    found = [row for _ in names for row in shared[-1].get()]
    for process in processes:
        process.join()
    return sorted(found, key=lambda row: names.index(row["kernel"]))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--all", action="store_true", help="print all candidates")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import torch
    import triton

    rows = in_processes(options.names, options.all)
    best: dict[str, float] = {}
    for row in rows:
        if row["by"].startswith("pallas_gpu"):
            best[row["kernel"]] = max(best.get(row["kernel"], 0), row["of Triton"])
    ratios = list(best.values())
    mean = statistics.geometric_mean(ratios)
    notes = (
        f"torch {torch.__version__}, Triton {triton.__version__}. Device times, medians"
        " in a shuffled order, of the fastest configuration of each. Errors are "
        f"relative to float32. Geometric mean: {mean:.3f}, least {min(ratios):.3f}."
    )
    timing.report("Kernels written from the documentation", rows, notes, options.json)


if __name__ == "__main__":
    main()
