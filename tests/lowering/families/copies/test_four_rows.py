# SPDX-License-Identifier: Apache-2.0
"""On sm_100a TMA copies rows that indices name four at a time: gather4, scatter4."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.emitters.copies import four_rows as emitter
from pallas_gpu.errors import PtxError
from pallas_gpu.layouts import LinearLayout
from pallas_gpu.layouts.registers.fours import fours
from pallas_gpu.lockstep.not_modelled import NotModelled
from tests.support import everywhere, named_rows
from tests.support.lockstep import kernels as in_lockstep
from tests.support.semantics import BOTH, Warpgroup, under

F32, BF16, U8 = jnp.float32, jnp.bfloat16, jnp.uint8
WIDE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
NARROW = (plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32))
INDICES, INDICES_4 = plgpu.Layout.TMA_INDICES, plgpu.Layout.TMA_INDICES_4

gather = functools.partial(named_rows.gather, target="sm_100a")
scatter = functools.partial(named_rows.scatter, target="sm_100a")


def copies(make, args, semantics, word):
    """How many of the instructions stand in the code of one thread."""
    (build,) = in_lockstep.lower(under(semantics, make()), args).kernels
    return str(build.module).count(word)


# Kernels with the number of instructions in the code of one thread.
GATHERS = {
    "plain": (1, gather(16, (64, 64), F32)),
    "swizzled": (1, gather(16, (64, 64), transforms=WIDE)),
    "tiles side by side": (3, gather(8, (32, 192), transforms=WIDE)),
    "many tiles": (1, gather(8, (16, 1024), transforms=WIDE)),
    "narrow swizzle": (2, gather(32, (64, 32), transforms=NARROW)),
    "columns": (1, gather(16, (64, 256), F32, slice(64, 96))),
    "rows of two dimensions": (1, gather(4, (20, 4, 16), F32)),
    "a part": (1, gather(8, (4, 32, 64), F32, part=(2, slice(8, 24)))),
    "more than 256 columns": (1, gather(4, (16, 1024), U8)),
    "more rows than threads": (1, gather(256, (260, 32), F32)),
    "TMA_INDICES": (2, gather(32, (64, 64), F32, layout=INDICES)),
    "TMA_INDICES_4": (2, gather(8, (64, 64), F32, layout=INDICES_4)),
    # Row by row.
    "an odd number of rows": (0, gather(13, (64, 64))),
    "one row": (0, gather(1, (64, 64))),
    "rows of 16 bytes": (0, gather(16, (64, 4), F32)),
    "columns that start anywhere": (0, gather(8, (32, 64), BF16, slice(3, 35))),
    "rows of 3 KiB": (0, gather(4, (8, 768), F32)),
}
SCATTERS = {
    "plain": (1, scatter((16, 64), F32)),
    "swizzled": (2, scatter((16, 128), transforms=WIDE)),
    "more rows than threads": (1, scatter((256, 16), F32)),
    "an odd number of rows": (0, scatter((9, 64))),
}


@pytest.mark.parametrize("name", GATHERS)
def test_rows_are_gathered(name):
    everywhere.check(*GATHERS[name][1], on_gpu=False)


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("name", GATHERS)
def test_four_rows_are_one_copy_where_they_can_be(name, semantics):
    count, (make, args, _) = GATHERS[name]
    assert copies(make, args, semantics, "tile::gather4") == count


@pytest.mark.parametrize("name", SCATTERS)
def test_rows_are_scattered(name):
    count, (make, args, expected) = SCATTERS[name]
    everywhere.check(make, args, expected, on_gpu=False)
    assert copies(make, args, Warpgroup, "tile::scatter4") == count


@pytest.mark.parametrize("wanted", [True, False])
def test_a_predicate_skips_the_rows_and_not_the_arrival(wanted):
    make, args, expected = named_rows.skipped(wanted, "sm_100a")
    everywhere.check(make, args, expected, on_gpu=False)
    assert copies(make, args, Warpgroup, "tile::gather4") == 1


def test_hopper_copies_row_by_row():
    make, args, _ = gather(16, (64, 64), transforms=WIDE, target="sm_90a")
    assert copies(make, args, Warpgroup, "gather4") == 0


def test_indices_of_several_warps_are_not_collected():
    columns = [(4,), (8,), (16,), (32,), (64,), (1,), (2,)]
    assert fours(LinearLayout.create((128,), columns, [(0,)])) is None


# --- mistakes of an emitter -----------------------------------------------------------

FAULTS = {
    "columns": lambda plan: {"columns": plan.columns // 2},
    "swizzle": lambda plan: {"swizzle": 16},
    "pieces": lambda plan: {"pieces": plan.pieces[::-1][:1] + plan.pieces[1:]},
    "a piece less": lambda plan: {"pieces": plan.pieces[:-1]},
    "between tiles": lambda plan: {"row_tile": (8, 1024, plan.row_tile[2])},
    "between rows": lambda plan: {"row_tile": (*plan.row_tile[:2], 64)},
    "rows of the map": lambda plan: {"sizes": (16, plan.sizes[1])},
    "columns of the map": lambda plan: {"sizes": (plan.sizes[0], 64)},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_plan_is_noticed(name, monkeypatch):
    make, args, expected = gather(16, (64, 192), transforms=WIDE)
    right = emitter.plan_four_rows

    def wrong(*args):
        plan = right(*args)
        return dataclasses.replace(plan, **FAULTS[name](plan))

    monkeypatch.setattr(emitter, "plan_four_rows", wrong)
    lowered = in_lockstep.lower(make(), args)
    try:
        (got,) = lowered.run()
    except (PtxError, NotModelled):
        return
    assert not np.array_equal(np.asarray(got), expected)
