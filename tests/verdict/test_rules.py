# SPDX-License-Identifier: Apache-2.0
"""For each rule that a run can break, a small kernel that breaks it.

The lines of a finding are those that end with its `# at:` and `# other:`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import findings
from tests.support import everywhere

F32, N = jnp.float32, 128
X = np.arange(2 * N, dtype=np.float32).reshape(2, N)
ROW, BARRIER = plgpu.SMEM((N,), F32), plgpu.Barrier()
CASES: list[Any] = []


def breaks(rule: str, *scratch: Any, **options: Any) -> Callable[..., None]:
    """Adds a body of a kernel from X to an array of X's shape."""

    def add(body: Callable[..., None]) -> None:
        case = (body, scratch, options)
        CASES.append(pytest.param(rule, *case, id=f"{rule}-{body.__name__}"))

    return add


@breaks("race", ROW, threads={"wg": 2})
def unordered(x, o, row):
    @plgpu.when(lax.axis_index("wg") == 0)
    def _():
        row[...] = x[0]  # at: or other

    @plgpu.when(lax.axis_index("wg") == 1)
    def _():
        o[0] = row[...]  # at: or other
        o[1] = x[1]


@breaks("missing-wait", ROW, BARRIER)
def copy_in(x, o, row, barrier):
    o[...] = x[...]
    plgpu.copy_gmem_to_smem(x.at[0], row, barrier)  # other
    o[0] = row[...]  # at
    plgpu.barrier_wait(barrier)


@breaks("missing-wait", ROW)
def copy_out(x, o, row):
    o[1] = x[1]
    row[...] = x[0]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(row, o.at[0])  # other
    row[...] = x[1]  # at
    plgpu.wait_smem_to_gmem(0)


@breaks("missing-fence", ROW)
def unfenced(x, o, row):
    o[...] = x[...]
    row[...] = x[0]  # other
    plgpu.copy_smem_to_gmem(row, o.at[1])  # at
    plgpu.wait_smem_to_gmem(0)


@breaks("race-between-ctas", grid={"i": 2})
def one_row(x, o):
    o[0] = x[lax.axis_index("i")]  # at and other
    o[1] = x[1]


@breaks("early-launch")
def before_the_wait(x, o):
    o[0] = x[0]  # at
    plgpu.griddepcontrol_wait()
    o[1] = x[1]


@breaks("repeated-index")
def same_column(x, o):
    o[...] = x[...]
    o[0, jnp.zeros(N, jnp.int32)] = x[0]  # at


@breaks("out-of-bounds", grid={"i": 2})
def read(x, o):
    i = lax.axis_index("i")
    o[i] = x[i * 2]  # at


@breaks("out-of-bounds", grid={"i": 2})
def write(x, o):
    i = lax.axis_index("i")
    o[i] = x[i]
    o[i + 1] = x[1]  # at


@breaks("out-of-bounds", ROW, BARRIER, grid={"i": 2})
def copied(x, o, row, barrier):
    i = lax.axis_index("i")
    plgpu.copy_gmem_to_smem(x.at[i * 2], row, barrier)  # at
    plgpu.barrier_wait(barrier)
    o[i] = row[...]


@breaks("out-of-bounds", grid={"i": 2})
def wrapped(x, o):
    i = lax.axis_index("i")
    large = (i + 1) * (2**31 - 1)  # at
    o[i] = x[lax.rem(large, 1)]


@breaks("uninitialized-read", ROW)
def fresh(x, o, row):
    o[0] = x[0] + row[...]  # at
    o[1] = x[1]


@breaks("unwritten-result")
def half(x, o):
    o[0] = x[0]  # at


@breaks("barrier", BARRIER)
def one_warp_waits(x, o, barrier):
    plgpu.barrier_arrive(barrier)

    @plgpu.warp_map
    def _(warp):
        @plgpu.when(warp == 0)
        def _():
            plgpu.barrier_wait(barrier)

    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)  # at
    o[...] = x[...]


@breaks("too-many-arrivals", plgpu.SMEM((2, N), F32), BARRIER, asynchrony="late")
def two_copies(x, o, rows, barrier):
    for i in range(2):
        plgpu.copy_gmem_to_smem(x.at[i], rows.at[i], barrier)  # at
    plgpu.barrier_wait(barrier)
    o[...] = x[...]


@breaks("missed-phase", BARRIER)
def two_phases(x, o, barrier):
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)  # at
    o[...] = x[...]


@breaks("unfinished-copy", ROW, BARRIER)
def forgotten(x, o, row, barrier):
    o[...] = x[...]
    plgpu.copy_gmem_to_smem(x.at[0], row, barrier)  # at


@breaks("freed-memory")
def source(x, o):
    o[1] = x[1]

    def scope(row):
        row[...] = x[0]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(row, o.at[0])  # at

    plgpu.run_scoped(scope, ROW)
    plgpu.run_scoped(lambda row: plgpu.commit_smem(), ROW)


@breaks("semaphore-not-zero", plgpu.SemaphoreType.REGULAR)
def signal(x, o, semaphore):
    o[...] = x[...]
    plgpu.semaphore_signal(semaphore)  # at


@breaks("deadlock", BARRIER)
def no_arrival(x, o, barrier):
    o[...] = x[...]
    plgpu.barrier_wait(barrier)  # at


@breaks("livelock", max_steps=100)
def forever(x, o):
    o[...] = x[...]
    lax.while_loop(lambda i: i >= 0, lambda i: i * 0, 0)  # at


@breaks("debug-check")
def condition(x, o):
    o[...] = x[...]
    plgpu.debug_check(x[0, 0] > 0, "positive")  # at


@breaks("resources", threads={"wg": 3})
def registers(x, o):
    plgpu.set_max_registers(240, action="increase")  # at
    plgpu.when(lax.axis_index("wg") == 0)(lambda: o.__setitem__(..., x[...]))


@breaks("invalid")
def other_way(x, o):
    o[...] = x[...]
    plgpu.set_max_registers(64, action="decrease")
    plgpu.set_max_registers(32, action="increase")  # at


def lines_of(body: Callable[..., None], what: str) -> set[int]:
    lines, first = inspect.getsourcelines(body)
    marks = re.compile(rf"# .*\b{what}\b")
    return {first + i for i, text in enumerate(lines) if marks.search(text)}


@pytest.mark.parametrize(("rule", "body", "scratch", "options"), CASES)
def test_a_kernel_breaks_a_rule(rule, body, scratch, options):
    of_check = {n: x for n, x in options.items() if n in everywhere.OF_EMULATOR}
    of_kernel = {n: x for n, x in options.items() if n not in of_check}
    kernel = everywhere.kernel(body, X, *scratch, **of_kernel)(None)
    verdict = plgpu.check(kernel, **of_check)(X)
    first = verdict.findings[0]
    assert (first.rule.id, first.after) == (rule, 0), verdict
    assert first.at.line in lines_of(body, "at"), verdict
    other = lines_of(body, "other")
    assert (first.other.line if first.other else None) in (other or {None}), verdict


def test_each_rule_that_a_run_can_break_has_a_kernel():
    # The others are those of a kernel that does not start; schedule-dependent and the
    # three that are not modelled are in test_check.py.
    run = {case.values[0] for case in CASES} | {"schedule-dependent"}
    starts = [rule.id for rule in findings.RULES]
    assert set(starts[: starts.index("debug-check") + 1]) <= run
