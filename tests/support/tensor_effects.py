# SPDX-License-Identifier: Apache-2.0
"""Effects of the arguments of tcgen05 and TMEM, for tests/public/test_effects.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pallas_gpu as plgpu
from pallas_gpu import layouts
from tests.support import effects as see
from tests.support import public_calls as calls
from tests.support.public_calls import F16, F32

# Needs a cluster.
_PAIRS = "tests/lowering/families/tensor_cores/test_tcgen05_pairs.py"
_SCALED_PAIRS = "tests/lowering/families/tensor_cores/test_scaled_pairs.py"
_OPERAND_COPIES = "tests/lowering/families/tensor_cores/test_operand_copy.py"
_SPARSE_PAIRS = "tests/lowering/families/tensor_cores/test_sparse_pairs.py"


def _product(e: calls.Env, **options: Any) -> None:
    plgpu.tcgen05_mma(e.acc, e.a, e.w.T, **options)


def _tmem(*options: dict[str, Any], dtype: Any = F32) -> list[str]:
    """Declarations of arrays in TMEM."""
    declare = lambda **o: plgpu.TMEM((128, 64), dtype, **o).storage  # noqa: E731
    return see.values(declare, *options)


EFFECTS: dict[str, Callable[[], list[str]] | str] = {
    "tcgen05_mma.collective_axis": _PAIRS,
    "tcgen05_commit_arrive.collective_axis": _PAIRS,
    "async_copy_scales_to_tmem.collective_axis": _SCALED_PAIRS,
    "async_copy_sparse_metadata_to_tmem.collective_axis": (
        f"{_SPARSE_PAIRS}::test_the_metadata_of_a_pair_is_allocated_by_it"
    ),
    "async_copy_smem_to_tmem.collective_axis": (
        f"{_OPERAND_COPIES}::test_a_pair_copies_operands"
    ),
    "TMEM.packed": lambda: _tmem({"packed": False}, {"packed": True}, dtype=F16),
    "TMEM.collective": lambda: _tmem({}, {"collective": True}),
    "TMEM.layout": lambda: _tmem({}, {"layout": layouts.TmemLayout.default(2)}),
    "tcgen05_mma.barrier": lambda: see.bodies(
        *(lambda e, n=n: _product(e, barrier=e.b if n else None) for n in (0, 1)),
        blackwell=True,
    ),
    "tcgen05_mma.accumulate": lambda: see.bodies(
        *(lambda e, v=v: _product(e, accumulate=v) for v in (True, False)),
        blackwell=True,
    ),
    **{
        f"tcgen05_mma.{name}": lambda name=name: see.bodies(
            *(lambda e, n=n: _product(e, **({name: e.t} if n else {})) for n in (0, 1)),
            blackwell=True,
        )
        for name in ("a_scale", "b_scale", "a_sparse_metadata")
    },
    "async_load_tmem.reduce": lambda: see.bodies(
        *(lambda e, v=v: plgpu.async_load_tmem(e.acc, reduce=v) for v in (None, "max")),
        blackwell=True,
    ),
    "async_load_tmem.layout": lambda: see.bodies(
        *(
            lambda e, v=v: plgpu.async_load_tmem(e.acc, layout=v)
            for v in (None, layouts.TmemLayout.half_lane(64).tiled)
        ),
        blackwell=True,
    ),
}
