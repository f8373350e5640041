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

LAUNCHES, ROUNDS = 64, 41
# The rows of a CTA take longer than the host needs for a launch.
BLOCKS, ROWS, COLUMNS = 132, 64, 1024
# Whether a kernel waits for the one before, and when it lets the next one start.
CHAINS = {
    "in stream order": (False, None),
    "wait": (True, None),
    "wait, dependents at the end": (True, "end"),
    "wait, dependents at the start": (True, "start"),
}
# XLA's command buffers, which are CUDA graphs.
OPTIONS: dict[str, dict[str, str] | None] = {
    "command buffers": None,
    "none": {"xla_gpu_enable_command_buffer": ""},
}


def step(
    rows: int, waits: bool, dependents: str | None, *, interpret: Any = None
) -> Callable[[Any], Any]:
    """Returns a kernel that adds one to each element, row by row in each CTA.

    Args:
      rows: of a CTA.
      waits: whether it waits for the kernel before.
      dependents: when it lets the next one start: "start", "end" or None.
      interpret: as of `plgpu.kernel`.
    """

    def body(x: Any, o: Any, row: Any, barrier: Any) -> None:
        i = lax.axis_index("i")
        if dependents == "start":
            plgpu.griddepcontrol_launch_dependents()
        if waits:
            plgpu.griddepcontrol_wait()

        @plgpu.loop(0, rows)
        def _(k):
            plgpu.copy_gmem_to_smem(x.at[i, k], row, barrier)
            plgpu.barrier_wait(barrier)
            if dependents == "end":

                @plgpu.when(k == rows - 1)
                def _():
                    plgpu.griddepcontrol_launch_dependents()

            o[i, k] = row[...] + 1

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((BLOCKS, rows, COLUMNS), jnp.float32),
        grid=(BLOCKS,),
        grid_names=("i",),
        scratch_types=[plgpu.SMEM((COLUMNS,), jnp.float32), plgpu.Barrier()],
        interpret=interpret,
    )


def chain(
    waits: bool, dependents: str | None, options: dict[str, str] | None
) -> Callable[[Any], Any]:
    """Returns a function that calls the kernel on its own result again and again."""
    one = step(ROWS, waits, dependents)

    def run(x: Any) -> Any:
        for _ in range(LAUNCHES):
            x = one(x)
        return x

    return jax.jit(run, compiler_options=options)


def measure() -> list[dict[str, Any]]:
    """Times each chain until its result is there; checks the results."""
    shape = BLOCKS, ROWS, COLUMNS
    x = jnp.asarray(np.random.default_rng(0).integers(0, 9, shape), jnp.float32)
    chains = {
        (buffers, name): chain(*CHAINS[name], options)
        for buffers, options in OPTIONS.items()
        for name in CHAINS
    }
    for key, f in chains.items():
        np.testing.assert_array_equal(f(x), x + LAUNCHES, err_msg=str(key))
    seconds = timing.interleaved(
        {str(k): lambda f=f: jax.block_until_ready(f(x)) for k, f in chains.items()},
        rounds=ROUNDS,
    )
    rows = []
    for buffers, name in chains:
        spent = seconds[str((buffers, name))] / LAUNCHES
        first = seconds[str((buffers, next(iter(CHAINS))))] / LAUNCHES
        rows.append(
            {
                "launched by": buffers,
                "kernel": name,
                "µs a kernel": spent * 1e6,
                "µs saved": (first - spent) * 1e6,
            }
        )
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    notes = (
        f"{BLOCKS} CTAs of {ROWS} x {COLUMNS} float32; chains of {LAUNCHES} kernels, "
        f"medians of {ROUNDS} interleaved rounds."
    )
    timing.report("Dependent launches", measure(), notes, options.json)


if __name__ == "__main__":
    main()
