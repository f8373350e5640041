# SPDX-License-Identifier: Apache-2.0
"""For each rule that a run can break, small kernels that break it, and a correct one.

The lines of a finding are those that end with its `# at:` and `# other:`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu

F32, N = jnp.float32, 128
X = np.arange(2 * N, dtype=np.float32).reshape(2, N)
ROW, BARRIER = plgpu.SMEM((N,), F32), plgpu.Barrier()
Body = Callable[..., None]


class Case(NamedTuple):
    """The body of a kernel from X to an array of X's shape.

    Attributes:
      rule: what it breaks; of a right one, what it does not break.
      body: the function.
      scratch, options: of the kernel, and of the check.
    """

    rule: str
    body: Body
    scratch: tuple[Any, ...]
    options: dict[str, Any]


WRONG: list[Case] = []
# The correct kernel beside the first wrong one of a rule.
RIGHT: dict[str, Case] = {}


def breaks(rule: str, *scratch: Any, **options: Any) -> Callable[[Body], Body]:
    """Adds a body that breaks a rule."""

    def add(body: Body) -> Body:
        WRONG.append(Case(rule, body, scratch, options))
        return body

    return add


def corrects(*scratch: Any, **options: Any) -> Callable[[Body], Body]:
    """Adds the correct form of the latest body, with its scratch unless given."""

    def add(body: Body) -> Body:
        rule, _, before, same = WRONG[-1]
        RIGHT[rule] = Case(rule, body, scratch or before, same | options)
        return body

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


@corrects(ROW, BARRIER, threads={"wg": 2})
def ordered(x, o, row, stored):
    @plgpu.when(lax.axis_index("wg") == 0)
    def _():
        row[...] = x[0]
        plgpu.barrier_arrive(stored)

    @plgpu.when(lax.axis_index("wg") == 1)
    def _():
        plgpu.barrier_wait(stored)
        o[0] = row[...]
        o[1] = x[1]


@breaks("missing-wait", ROW, BARRIER)
def copy_in(x, o, row, barrier):
    o[...] = x[...]
    plgpu.copy_gmem_to_smem(x.at[0], row, barrier)  # other
    o[0] = row[...]  # at
    plgpu.barrier_wait(barrier)


@corrects()
def waited(x, o, row, barrier):
    o[1] = x[1]
    plgpu.copy_gmem_to_smem(x.at[0], row, barrier)
    plgpu.barrier_wait(barrier)
    o[0] = row[...]


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


@corrects()
def fenced(x, o, row):
    o[0] = x[0]
    row[...] = x[0]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(row, o.at[1])
    plgpu.wait_smem_to_gmem(0)


@breaks("race-between-ctas", grid={"i": 2})
def one_row(x, o):
    o[0] = x[lax.axis_index("i")]  # at and other
    o[1] = x[1]


@corrects()
def a_row_each(x, o):
    i = lax.axis_index("i")
    o[i] = x[i]


@breaks("early-launch")
def before_the_wait(x, o):
    o[0] = x[0]  # at
    plgpu.griddepcontrol_wait()
    o[1] = x[1]


@corrects()
def behind_the_wait(x, o):
    plgpu.griddepcontrol_wait()
    o[...] = x[...]


@breaks("repeated-index")
def same_column(x, o):
    o[...] = x[...]
    o[0, jnp.zeros(N, jnp.int32)] = x[0]  # at


@corrects()
def each_column(x, o):
    o[...] = x[...]
    o[0, jnp.arange(N)] = x[0]


@breaks("out-of-bounds", grid={"i": 2})
def read(x, o):
    i = lax.axis_index("i")
    o[i] = x[i * 2]  # at


@corrects()
def inside(x, o):
    i = lax.axis_index("i")
    o[i] = x[i]


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


@corrects()
def stored_before(x, o, row):
    row[...] = x[1]
    o[0] = x[0] + row[...]
    o[1] = x[1]


@breaks("unwritten-result")
def half(x, o):
    o[0] = x[0]  # at


@corrects()
def whole(x, o):
    o[...] = x[...]


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


@corrects()
def all_warps_wait(x, o, barrier):
    for _ in range(2):
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
    o[...] = x[...]


@breaks("too-many-arrivals", plgpu.SMEM((2, N), F32), BARRIER, asynchrony="late")
def two_copies(x, o, rows, barrier):
    for i in range(2):
        plgpu.copy_gmem_to_smem(x.at[i], rows.at[i], barrier)  # at
    plgpu.barrier_wait(barrier)
    o[...] = x[...]


@corrects(plgpu.SMEM((2, N), F32), plgpu.Barrier(num_arrivals=2))
def counted(x, o, rows, barrier):
    for i in range(2):
        plgpu.copy_gmem_to_smem(x.at[i], rows.at[i], barrier)
    plgpu.barrier_wait(barrier)
    o[...] = rows[...]


@breaks("missed-phase", BARRIER)
def two_phases(x, o, barrier):
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)  # at
    o[...] = x[...]


@corrects()
def a_wait_for_each(x, o, barrier):
    for _ in range(2):
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
    o[...] = x[...]


@breaks("unfinished-copy", ROW, BARRIER)
def forgotten(x, o, row, barrier):
    o[...] = x[...]
    plgpu.copy_gmem_to_smem(x.at[0], row, barrier)  # at


@corrects()
def remembered(x, o, row, barrier):
    o[...] = x[...]
    plgpu.copy_gmem_to_smem(x.at[0], row, barrier)
    plgpu.barrier_wait(barrier)


@breaks("freed-memory")
def source(x, o):
    o[1] = x[1]

    def scope(row):
        row[...] = x[0]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(row, o.at[0])  # at

    plgpu.run_scoped(scope, ROW)
    plgpu.run_scoped(lambda row: plgpu.commit_smem(), ROW)


@corrects()
def source_is_read(x, o):
    o[1] = x[1]

    def scope(row):
        row[...] = x[0]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(row, o.at[0])
        plgpu.wait_smem_to_gmem(0)

    plgpu.run_scoped(scope, ROW)


@breaks("semaphore-not-zero", plgpu.SemaphoreType.REGULAR)
def signal(x, o, semaphore):
    o[...] = x[...]
    plgpu.semaphore_signal(semaphore)  # at


@corrects()
def signal_and_wait(x, o, semaphore):
    o[...] = x[...]
    plgpu.semaphore_signal(semaphore)
    plgpu.semaphore_wait(semaphore)


@breaks("deadlock", BARRIER)
def no_arrival(x, o, barrier):
    o[...] = x[...]
    plgpu.barrier_wait(barrier)  # at


@corrects()
def an_arrival(x, o, barrier):
    o[...] = x[...]
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


@breaks("livelock", max_steps=100)
def forever(x, o):
    o[...] = x[...]
    lax.while_loop(lambda i: i >= 0, lambda i: i * 0, 0)  # at


@corrects()
def ends(x, o):
    o[...] = x[...]
    lax.while_loop(lambda i: i < 4, lambda i: i + 1, 0)


@breaks("debug-check")
def condition(x, o):
    o[...] = x[...]
    plgpu.debug_check(x[0, 0] > 0, "positive")  # at


@corrects()
def holds(x, o):
    o[...] = x[...]
    plgpu.debug_check(x[0, 0] >= 0, "not negative")


@breaks("resources", threads={"wg": 3})
def registers(x, o):
    plgpu.set_max_registers(240, action="increase")  # at
    plgpu.when(lax.axis_index("wg") == 0)(lambda: o.__setitem__(..., x[...]))


@corrects()
def fewer_registers(x, o):
    @plgpu.when(lax.axis_index("wg") == 0)
    def _():
        plgpu.set_max_registers(40, action="decrease")

    @plgpu.when(lax.axis_index("wg") > 0)
    def _():
        plgpu.set_max_registers(216, action="increase")

    plgpu.when(lax.axis_index("wg") == 0)(lambda: o.__setitem__(..., x[...]))


@breaks("invalid")
def other_way(x, o):
    o[...] = x[...]
    plgpu.set_max_registers(64, action="decrease")
    plgpu.set_max_registers(32, action="increase")  # at


@corrects()
def down_and_up(x, o):
    o[...] = x[...]
    plgpu.set_max_registers(32, action="decrease")
    plgpu.set_max_registers(64, action="increase")
