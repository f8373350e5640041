# SPDX-License-Identifier: Apache-2.0
"""Every form of a copy in one kernel, which can leave out what a copy needs.

Threads store to both sides of the copy before it, and read what it brings after it:
so a wait, a commit_smem, a commit_gmem and the right count are all necessary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_gpu as plgpu
from tests.support import everywhere

ROWS, COLUMNS = 8, 64
F32 = jnp.float32
ORDER = np.array([3, 1, 7, 5, 0, 2, 6, 4])
TILED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
CLUSTER = {"cluster": (2,), "cluster_names": ("c",)}
BLACKWELL = {"compiler_params": plgpu.CompilerParams(target="sm_100a")}
PAIR = {**CLUSTER, **BLACKWELL}
REPLICATED = plgpu.CopyPartition.REPLICATED
OMISSIONS = ("wait", "commit", "fence", "count")


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of a copy.

    Attributes:
      copy: starts it: a load takes source, destination and barrier, a store source and
        destination.
      expected: what it brings, from what the source holds; of a store that adds to what
        was there, that is 1.
      options: of the kernel.
      transforms: of the array in SMEM.
      leader_waits: whether the first CTA alone waits, and tells the other.
    """

    copy: Callable[..., None]
    expected: Callable[[np.ndarray], np.ndarray] = lambda x: x
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    transforms: tuple[Any, ...] = ()
    leader_waits: bool = False


def _load(**options: Any) -> Callable[..., None]:
    def copy(source, target, barrier):
        plgpu.copy_gmem_to_smem(source, target, barrier, **options)

    return copy


def _rows(source, target, barrier):
    plgpu.copy_gmem_to_smem(source.at[ORDER], target, barrier)


def _windows(source, target, barrier):
    images = source.reshape(1, ROWS, COLUMNS)
    view = plgpu.im2col_ref(images, window_shape=(1,))
    plgpu.copy_gmem_to_smem(view.at[:, 0], target, barrier)


def _by_threads(source, target, barrier):
    plgpu.copy_gmem_to_smem(
        source, target, barrier, implementation=plgpu.AsyncCopyImplementation.CP_ASYNC
    )


LOADS = {
    "box": Form(_load(), transforms=TILED),
    "bytes": Form(_load(oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)),
    "nan fill": Form(_load(oob_mode=plgpu.OOBFillMode.NAN), transforms=TILED),
    "hint": Form(_load(cache_hint="evict_first"), transforms=TILED),
    "rows": Form(_rows, lambda x: x[ORDER]),
    "windows": Form(_windows),
    "four rows": Form(_rows, lambda x: x[ORDER], BLACKWELL),
    "threads": Form(_by_threads, transforms=TILED),
    "multicast": Form(_load(collective_axes="c"), options=CLUSTER, transforms=TILED),
    "leader": Form(
        _load(collective_axes="c", leader_tracked=REPLICATED),
        options=PAIR,
        transforms=TILED,
        leader_waits=True,
    ),
}


def _store(**options: Any) -> Callable[..., None]:
    def copy(source, target):
        plgpu.copy_smem_to_gmem(source, target, **options)

    return copy


def _scatter(source, target):
    plgpu.copy_smem_to_gmem(source, target.at[ORDER])


def _bytes(source, target):
    for row in range(ROWS):
        part = source.at[row], target.at[row]
        plgpu.copy_smem_to_gmem(*part, commit_group=row == ROWS - 1)


def _added_bytes(source, target):
    for row in range(ROWS):
        part = source.at[row], target.at[row]
        last = row == ROWS - 1
        plgpu.copy_smem_to_gmem(*part, reduction_op="add", commit_group=last)


STORES = {
    "box": Form(_store(), transforms=TILED),
    "bytes": Form(_bytes),
    "hint": Form(_store(cache_hint="evict_last"), transforms=TILED),
    "rows": Form(_scatter, lambda x: x[np.argsort(ORDER)]),
    "four rows": Form(_scatter, lambda x: x[np.argsort(ORDER)], BLACKWELL),
    "added": Form(_store(reduction_op="add"), lambda x: x + 1, transforms=TILED),
    "added bytes": Form(_added_bytes, lambda x: x + 1),
}

# Threads copy what threads have stored, in order: it needs neither of these.
NOT_NEEDED = {("load threads", "commit"), ("load threads", "fence")}
NAMES = [*(f"load {name}" for name in LOADS), *(f"store {name}" for name in STORES)]
NEEDS = [
    (name, omission)
    for name in NAMES
    for omission in OMISSIONS
    if (name, omission) not in NOT_NEEDED
]


def _by_hand(form: Form) -> plgpu.CompilerParams:
    """Its parameters, so that the kernel has no fences but its own."""
    given = form.options.get("compiler_params", plgpu.CompilerParams())
    return dataclasses.replace(given, unsafe_no_auto_barriers=True)


def load(form: Form, omitted: str | None) -> tuple[Any, Any, Any]:
    """Returns `make`, the arguments and the result of a kernel with one load."""
    ctas = 2 if "cluster" in form.options else 1
    shape = (ROWS, COLUMNS)

    def body(x, o, work, tile, full, ready):
        cta = lax.axis_index("c") if ctas > 1 else 0

        @plgpu.when(cta == 0)
        def _():
            work[...] = x[...]

        tile[...] = jnp.zeros(shape, F32)
        if omitted != "fence":
            plgpu.commit_gmem()
        if omitted != "commit":
            plgpu.commit_smem()
        plgpu.barrier_arrive_and_wait(ready)
        form.copy(work, tile, full)
        if omitted != "wait" and not form.leader_waits:
            plgpu.barrier_wait(full)
        if omitted != "wait" and form.leader_waits:
            plgpu.when(cta == 0)(lambda: plgpu.barrier_wait(full))
            plgpu.barrier_arrive_and_wait(ready)
        o[cta] = tile[...]

    x = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(shape)
    expected = np.stack([form.expected(x)] * ctas)
    make = everywhere.kernel(
        body,
        expected,
        plgpu.GMEM(shape, F32),
        plgpu.SMEM(shape, F32, transforms=form.transforms),
        plgpu.Barrier(num_arrivals=2 if omitted == "count" else 1),
        plgpu.ClusterBarrier(collective_axes="c") if ctas > 1 else plgpu.Barrier(),
        **form.options | {"compiler_params": _by_hand(form)},
    )
    return make, [x], expected


def store(form: Form, omitted: str | None) -> tuple[Any, Any, Any]:
    """Returns `make`, the arguments and the result of a kernel with one store."""
    shape = (ROWS, COLUMNS)

    def body(x, o, work, tile):
        work[...] = jnp.ones(shape, F32)
        tile[...] = x[...]
        if omitted != "fence":
            plgpu.commit_gmem()
        if omitted != "commit":
            plgpu.commit_smem()
        form.copy(tile, work)
        if omitted != "wait":
            plgpu.wait_smem_to_gmem(1 if omitted == "count" else 0)
        o[...] = work[...]

    x = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(shape)
    tile = plgpu.SMEM(shape, F32, transforms=form.transforms)
    make = everywhere.kernel(body, x, plgpu.GMEM(shape, F32), tile, **form.options)
    return make, [x], form.expected(x)
