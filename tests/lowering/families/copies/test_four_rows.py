# SPDX-License-Identifier: Apache-2.0
"""On sm_100a TMA copies rows that indices name four at a time: gather4, scatter4."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gpu as plgpu
from pallas_gpu.layouts import LinearLayout, WGStridedLayout
from pallas_gpu.layouts.registers import catalogue
from pallas_gpu.layouts.registers.fours import Fours, fours
from pallas_gpu.mosaic.copies import four_rows as emitter
from tests.support import everywhere, skipped_rows
from tests.support.lockstep import faults
from tests.support.lockstep import kernels as in_lockstep
from tests.support.lockstep.engine import KernelError
from tests.support.lockstep.not_modelled import NotModelled
from tests.support.semantics import BOTH, Warpgroup, under
from tests.support.tensor_products import BLACKWELL

F32, BF16, U8 = jnp.float32, jnp.bfloat16, jnp.uint8
WIDE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
NARROW = (plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32))


@dataclasses.dataclass(frozen=True)
class Rows:
    """A gather of rows, and a scatter of them to the same places of a result.

    Attributes:
      count: number of indices.
      shape: of the array.
      dtype: its elements.
      transforms: of the tile in SMEM.
      part: index of a part of the array, whose rows the indices name.
      columns: of each row.
      layout: of the indices; None for that of a load.
      copies: number of instructions in the code of one thread; 0: none of four rows.
    """

    count: int
    shape: tuple[int, ...]
    dtype: Any = BF16
    transforms: tuple[Any, ...] = ()
    part: Any = None
    columns: Any = None
    layout: Any = None
    copies: int = 1

    def array(self) -> np.ndarray:
        x = np.arange(np.prod(self.shape)) % 251
        return np.asarray(jnp.asarray(x.reshape(self.shape)).astype(self.dtype))

    def chosen(self, x: Any) -> Any:
        """The part of a reference or of an array whose rows are meant."""
        if isinstance(x, np.ndarray):
            return x if self.part is None else x[self.part]
        return x if self.part is None else x.at[self.part]

    @property
    def index(self) -> np.ndarray:
        of = self.chosen(self.array()).shape[0]
        order = np.random.default_rng(self.count).permutation(of)
        return order[: self.count].astype(np.int32)

    @property
    def at(self) -> tuple[Any, ...]:
        return () if self.columns is None else (self.columns,)

    def read(self, rows: Any) -> Any:
        if self.layout is None:
            return rows[...]
        return plgpu.load(rows, layout=self.layout, optimized=False)

    def gather(self, interpret: Any = None) -> Any:
        """The kernel."""

        def body(x, rows, o, tile, full):
            chosen = self.chosen(x).at[(self.read(rows), *self.at)]
            plgpu.copy_gmem_to_smem(chosen, tile, full)
            plgpu.barrier_wait(full)
            o[...] = tile[...]

        return self._kernel(body, self.expected().shape, interpret)

    def scatter(self, interpret: Any = None) -> Any:
        """The kernel: all rows that the indices name become a tile's."""

        def body(x, rows, o, tile, full):
            plgpu.copy_gmem_to_smem(x, tile, full)
            plgpu.barrier_wait(full)
            plgpu.copy_smem_to_gmem(tile, o.at[self.read(rows)])
            plgpu.wait_smem_to_gmem(0)

        return self._kernel(body, self.shape, interpret)

    def _kernel(self, body: Any, shape: tuple[int, ...], interpret: Any) -> Any:
        tile = self.expected().shape
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(shape, self.dtype),
            scratch_types=[
                plgpu.SMEM(tile, self.dtype, transforms=self.transforms),
                plgpu.Barrier(),
            ],
            compiler_params=BLACKWELL,
            interpret=interpret,
        )

    def expected(self) -> np.ndarray:
        x = self.chosen(self.array())[self.index]
        return x if self.columns is None else x[:, self.columns]


def copies(kernel, args, semantics, word):
    """How many of the instructions stand in the kernel's code."""
    (build,) = in_lockstep.lower(under(semantics, kernel), args).kernels
    return str(build.module).count(word)


GATHERS = {
    "plain": Rows(16, (64, 64), F32),
    "swizzled": Rows(16, (64, 64), transforms=WIDE),
    "tiles side by side": Rows(8, (32, 192), transforms=WIDE, copies=3),
    "many tiles": Rows(8, (16, 1024), transforms=WIDE, copies=1),
    "narrow swizzle": Rows(32, (64, 32), transforms=NARROW, copies=2),
    "columns": Rows(16, (64, 256), F32, columns=slice(64, 96)),
    "rows of two dimensions": Rows(4, (20, 4, 16), F32),
    "a part": Rows(8, (4, 32, 64), F32, part=(2, slice(8, 24))),
    "more than 256 columns": Rows(4, (16, 1024), U8),
    "more rows than threads": Rows(256, (260, 32), F32),
    "TMA_INDICES": Rows(32, (64, 64), F32, layout=plgpu.Layout.TMA_INDICES, copies=2),
    "TMA_INDICES_4": Rows(
        8, (64, 64), F32, layout=plgpu.Layout.TMA_INDICES_4, copies=2
    ),
}
ONE_BY_ONE = {
    "an odd number of rows": Rows(13, (64, 64), copies=0),
    "one row": Rows(1, (64, 64), copies=0),
    "rows of 16 bytes": Rows(16, (64, 4), F32, copies=0),
    "columns that start anywhere": Rows(8, (32, 64), columns=slice(3, 35), copies=0),
    "rows of 3 KiB": Rows(4, (8, 768), F32, copies=0),
}


@pytest.mark.parametrize("name", [*GATHERS, *ONE_BY_ONE])
def test_rows_are_gathered(name):
    case = {**GATHERS, **ONE_BY_ONE}[name]
    args = [case.array(), case.index]
    everywhere.check(case.gather, args, case.expected(), on_gpu=False)


@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize("name", [*GATHERS, *ONE_BY_ONE])
def test_four_rows_are_one_copy_where_they_can_be(name, semantics):
    case = {**GATHERS, **ONE_BY_ONE}[name]
    args = [case.array(), case.index]
    assert copies(case.gather(), args, semantics, "tile::gather4") == case.copies


SCATTERS = {
    "plain": Rows(16, (16, 64), F32),
    "swizzled": Rows(16, (16, 128), transforms=WIDE, copies=2),
    "more rows than threads": Rows(256, (256, 16), F32),
    "an odd number of rows": Rows(9, (9, 64), copies=0),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_rows_are_scattered(name):
    case = SCATTERS[name]
    x, rows = args = [case.array(), case.index]
    expected = np.empty_like(x)
    expected[rows] = x
    everywhere.check(case.scatter, args, expected, on_gpu=False)
    assert copies(case.scatter(), args, Warpgroup, "tile::scatter4") == case.copies


@pytest.mark.parametrize("wanted", [True, False])
def test_a_predicate_skips_the_rows_and_not_the_arrival(wanted):
    make = skipped_rows.kernel(BLACKWELL)
    args, expected = skipped_rows.operands(wanted)
    everywhere.check(make, args, expected, on_gpu=False)
    assert copies(make(), args, Warpgroup, "tile::gather4") == 1


def test_hopper_copies_row_by_row():
    case = GATHERS["swizzled"]
    hopper = plgpu.CompilerParams(target="sm_90a")
    kernel = plgpu.kernel(
        lambda x, rows, o, tile, full: plgpu.copy_gmem_to_smem(
            x.at[rows[...]], tile, full
        ),
        out_type=jax.ShapeDtypeStruct((16, 64), BF16),
        scratch_types=[plgpu.SMEM((16, 64), BF16), plgpu.Barrier()],
        compiler_params=hopper,
    )
    assert copies(kernel, [case.array(), case.index], Warpgroup, "gather4") == 0


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
    case = Rows(16, (64, 192), transforms=WIDE)
    right = emitter.plan_four_rows

    def wrong(*args):
        plan = right(*args)
        return dataclasses.replace(plan, **FAULTS[name](plan))

    monkeypatch.setattr(emitter, "plan_four_rows", wrong)
    lowered = in_lockstep.lower(case.gather(), [case.array(), case.index])
    try:
        (got,) = lowered.run()
    except (KernelError, NotModelled):
        return
    assert not np.array_equal(np.asarray(got), case.expected())


@pytest.mark.parametrize("semantics", BOTH)
def test_without_the_copies_their_bytes_never_arrive(semantics):
    case = GATHERS["swizzled"]
    fault = faults.edit_text(r"cp\.async\.bulk\.tensor\.2d\.shared::cta.*", "")
    with pytest.raises(KernelError, match="deadlock"):
        faults.run(under(semantics, case.gather()), [case.array(), case.index], fault)


# --- who has four indices -------------------------------------------------------------


def test_indices_of_a_vector_are_in_one_thread():
    found = fours(catalogue.TMA_INDICES.linear((64,)))
    assert found == Fours(
        tuple(tuple((r, i, 0) for i in range(4)) for r in range(4)), ()
    )


def test_indices_of_four_lanes_are_collected():
    found = fours(WGStridedLayout((256,), 1).linear())
    assert found is not None and found.lane_bits == (0, 1)
    assert found.groups[0] == ((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3))


def test_pairs_of_indices_of_two_lanes_are_collected():
    found = fours(WGStridedLayout((256,), 2).linear())
    assert found == Fours((((0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)),), (0,))


def test_indices_of_several_warps_are_not():
    columns = [(4,), (8,), (16,), (32,), (64,), (1,), (2,)]
    assert fours(LinearLayout.create((128,), columns, [(0,)])) is None


@pytest.mark.offline
@pytest.mark.parametrize("semantics", BOTH)
@pytest.mark.parametrize(
    "cases, kind",
    [(GATHERS, "gather"), (SCATTERS, "scatter")],
    ids=["gather", "scatter"],
)
@pytest.mark.parametrize("name", ["plain", "swizzled"])
def test_ptxas_takes_the_copies(name, cases, kind, semantics):
    case = cases[name]
    kernel = under(semantics, getattr(case, kind)())
    args = [case.array(), case.index]
    (report,) = plgpu.offline.compile(kernel, *args, target="sm_100a")
    assert f"tile::{kind}4" in report.ptx
    assert report.resources.spill_store_bytes == 0
