# SPDX-License-Identifier: Apache-2.0
"""Effects of the arguments of copies.

Rows of the table of tests/public/test_effects.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pallas_gpu as plgpu
from tests.support import effects as see

COPIES = "tests/lowering/families/copies"
LEADER = "tests/lowering/families/test_leader_tracked.py"


def with_predicate(call):
    """A call without and with a predicate."""
    return see.bodies(call, lambda e: call(e, predicate=e.i == 0))


def copies(**options):
    """A copy to SMEM without and with options."""
    copy = lambda e, **o: plgpu.copy_gmem_to_smem(e.x, e.s, e.b, **o)  # noqa: E731
    return see.bodies(copy, lambda e: copy(e, **options))


EFFECTS: dict[str, Callable[[], list[str]] | str] = {
    "copy_gmem_to_smem.barrier": lambda: see.bodies(
        lambda e: plgpu.copy_gmem_to_smem(e.x, e.s),
        lambda e: plgpu.copy_gmem_to_smem(e.x, e.s, e.b),
    ),
    "copy_gmem_to_smem.predicate": lambda: with_predicate(
        lambda e, **o: plgpu.copy_gmem_to_smem(e.x, e.s, e.b, **o)
    ),
    "copy_gmem_to_smem.collective_axes": lambda: copies(collective_axes="g"),
    "copy_gmem_to_smem.implementation": "tests/primitives/test_tma.py",
    "copy_gmem_to_smem.leader_tracked": LEADER,
    "copy_gmem_to_smem.partitioned_axis": LEADER,
    "copy_gmem_to_smem.oob_mode": "tests/emulator/gpu/test_tma.py",
    "copy_smem_to_gmem.predicate": lambda: with_predicate(
        lambda e, **o: plgpu.copy_smem_to_gmem(e.s, e.o, **o)
    ),
    "copy_smem_to_gmem.reduction_op": "tests/lowering/families/test_copy_reductions.py",
    "copy_gmem_to_smem.cache_hint": f"{COPIES}/test_cache_hints.py",
    "copy_smem_to_gmem.cache_hint": f"{COPIES}/test_cache_hints.py",
    "async_prefetch.collective_axes": f"{COPIES}/test_prefetch.py",
    "async_prefetch.leader_tracked": f"{COPIES}/test_prefetch.py",
    "async_prefetch.partitioned_axis": f"{COPIES}/test_prefetch.py",
    "async_prefetch.predicate": lambda: with_predicate(
        lambda e, **o: plgpu.async_prefetch(e.x, **o)
    ),
    "copy_smem_to_gmem.commit_group": lambda: see.bodies(
        *(
            lambda e, c=c: plgpu.copy_smem_to_gmem(e.s, e.o, commit_group=c)
            for c in (True, False)
        )
    ),
    "wait_smem_to_gmem.wait_read_only": lambda: see.bodies(
        *(
            lambda e, r=r: (plgpu.wait_smem_to_gmem(0, r), e.o.__setitem__((0, 0), 1.0))
            for r in (False, True)
        )
    ),
}
