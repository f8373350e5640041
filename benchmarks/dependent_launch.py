# SPDX-License-Identifier: Apache-2.0
"""Time of a kernel in a chain, with and without programmatic dependent launch.

python -m benchmarks.dependent_launch [--json]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from benchmarks import timing

LAUNCHES, ROUNDS = 64, 21
BLOCKS, COLUMNS = 132, 1024
ROWS = jax.ShapeDtypeStruct((BLOCKS, COLUMNS), jnp.float32)
# Whether a kernel waits for the one before, and when it lets the next one start.
CHAINS = {
    "in stream order": (False, None),
    "wait": (True, None),
    "wait, dependents at the end": (True, "end"),
    "wait, dependents at the start": (True, "start"),
}


def step(waits: bool, dependents: str | None) -> Callable[[Any], Any]:
    """Returns a kernel that adds one to each element, a row in each CTA, by TMA."""

    def body(x: Any, o: Any, row: Any, barrier: Any) -> None:
        i = lax.axis_index("i")
        if dependents == "start":
            plgpu.griddepcontrol_launch_dependents()
        if waits:
            plgpu.griddepcontrol_wait()
        plgpu.copy_gmem_to_smem(x.at[i], row, barrier)
        plgpu.barrier_wait(barrier)
        if dependents == "end":
            plgpu.griddepcontrol_launch_dependents()
        o[i] = row[...] + 1

    return plgpu.kernel(
        body, out_type=ROWS, grid=(BLOCKS,), grid_names=("i",),
        scratch_types=[plgpu.SMEM((COLUMNS,), jnp.float32), plgpu.Barrier()],
    )  # fmt: skip


def chain(waits: bool, dependents: str | None) -> Callable[[Any], Any]:
    """Returns a function that calls the kernel on its own result again and again."""
    one = step(waits, dependents)

    def run(x: Any) -> Any:
        for _ in range(LAUNCHES):
            x = one(x)
        return x

    return jax.jit(run)


def measure() -> list[dict[str, Any]]:
    """Times each chain until its result is there; checks the results."""
    x = jnp.asarray(np.random.default_rng(0).integers(0, 9, ROWS.shape), jnp.float32)
    chains = {name: chain(*options) for name, options in CHAINS.items()}
    for name, f in chains.items():
        np.testing.assert_array_equal(f(x), x + LAUNCHES, err_msg=name)
    seconds = timing.interleaved(
        {name: lambda f=f: jax.block_until_ready(f(x)) for name, f in chains.items()},
        rounds=ROUNDS,
    )
    first = seconds[next(iter(seconds))]
    return [
        {"launch": name, "µs a kernel": t / LAUNCHES * 1e6, "of the first": t / first}
        for name, t in seconds.items()
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    notes = (
        f"{BLOCKS} x {COLUMNS} float32, a row in each CTA; chains of {LAUNCHES} "
        f"kernels, medians of {ROUNDS} interleaved rounds."
    )
    timing.report("Dependent launches", measure(), notes, options.json)


if __name__ == "__main__":
    main()
