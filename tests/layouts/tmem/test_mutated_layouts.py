# SPDX-License-Identifier: Apache-2.0
"""A wrong definition of a TMEM layout gives wrong products in lockstep, or no code.

Mutants have dimensions of a definition exchanged, or tiles of other sizes. Scales are
not loaded by threads: the model of their copy tells where they are.
"""

from __future__ import annotations

import numpy as np
import pytest

from pallas_gpu import errors
from pallas_gpu.errors import PtxError
from pallas_gpu.layouts import Replicated, TiledLayout, Tiling, TmemLayout
from pallas_gpu.layouts.tmem import access, sparsity, transfer
from pallas_gpu.layouts.tmem.layout import TmemKind
from tests.support import tmem_layouts
from tests.support.lockstep import faults
from tests.support.semantics import BOTH, under
from tests.support.sparse_products import SparseProduct
from tests.support.tensor_pairs import PairProduct
from tests.support.tensor_products import E4M3, F16, F32, Product

DEFAULT, HALF, M64 = TmemKind.DEFAULT, TmemKind.HALF_LANE, TmemKind.M64_COLLECTIVE
SCALES, SCALES_M64 = TmemKind.SCALES, TmemKind.SCALES_M64_COLLECTIVE
CASES = {
    DEFAULT: [
        Product(n=32, k=16, swizzle=32),
        Product(n=16, k=16, swizzle=32, a_in_tmem=True),
    ],
    HALF: [Product(m=64, n=32, k=16, swizzle=32)],
    M64: [PairProduct(m=64)],
}
# Of each kind its mutants: tiles, warps, lanes, and the dimension of the vector. p is
# the number of elements of a column, c that of columns of the tile, h is half of them.
MUTANTS = {
    (DEFAULT, "warps have every fourth row"): (
        lambda p, c, h: ([(128, p), (4, p)], (-2,), (-4,), -1)
    ),
    (DEFAULT, "warps 1 and 2 exchanged"): (
        lambda p, c, h: ([(128, p), (64, p), (32, p)], (-4, -6), (-2,), -1)
    ),
    (DEFAULT, "bits of lanes exchanged"): (
        lambda p, c, h: ([(128, p), (32, p), (16, p)], (-6,), (-2, -4), -1)
    ),
    (HALF, "half of the columns in every other lane"): (
        lambda p, c, h: ([(64, c), (16, h), (p,)], (-5,), (-3, -4), -1)
    ),
    (HALF, "warps 1 and 2 exchanged"): (
        lambda p, c, h: ([(64, c), (32, h), (16, h), (p,)], (-5, -7), (-6, -3), -1)
    ),
    (HALF, "that of M64"): (
        lambda p, c, h: ([(64, c), (32, h), (p,)], (-4, -5), (-3,), -1)
    ),
    (HALF, "every other column in the other lanes"): (
        lambda p, c, h: ([(64, c), (16, 2 * p), (p,)], (-5,), (-2, -3), -1)
    ),
    (M64, "half of the columns in every other warp"): (
        lambda p, c, h: ([(64, c), (32, h), (p,)], (-5, -4), (-3,), -1)
    ),
    (M64, "that of half-lane"): (
        lambda p, c, h: ([(64, c), (16, h), (p,)], (-5,), (-4, -3), -1)
    ),
    (M64, "every other column in the other warps"): (
        lambda p, c, h: ([(64, c), (32, 2 * p), (p,)], (-2, -5), (-3,), -1)
    ),
    (SCALES, "half of the copies"): (
        lambda p, c, h: ([(128, 4), (64, 1), (32, 1)], (Replicated(2), -4), (-2,), -5)
    ),
    (SCALES, "lanes have every fourth row"): (
        lambda p, c, h: ([(128, 4), (4, 1)], (Replicated(4),), (-4,), -3)
    ),
    (SCALES_M64, "halves in every other warp"): (
        lambda p, c, h: ([(256, 4), (128, 4), (32, 4)], (Replicated(2), -6), (-2,), -1)
    ),
    (SCALES_M64, "columns and warps exchanged"): (
        lambda p, c, h: ([(256, 4), (64, 4), (32, 4)], (-4, Replicated(2)), (-2,), -1)
    ),
}


@pytest.fixture
def mutated(monkeypatch):
    """Gives a kind another definition; plans made with it are forgotten at the end."""

    def forget():
        access.find_access.cache_clear()
        transfer.plan_transfer.cache_clear()

    def change(changed, mutant):
        right = TmemLayout.tiled.func

        def tiled(layout):
            if layout.kind is not changed:
                return right(layout)
            columns = layout.tile_columns
            tiles, *dims = mutant(layout.packing, columns, columns // 2)
            return TiledLayout(Tiling(tuple(tiles)), *dims)

        monkeypatch.setattr(TmemLayout, "tiled", property(tiled))
        forget()

    yield change
    forget()


def is_right(case):
    operands = case.operands()
    result = faults.run(under(BOTH[0], case.make()), operands)
    return (result == case.expected(*operands)).all()


@pytest.mark.parametrize("kind", CASES)
def test_without_a_mutation_products_are_right(kind):
    assert all(map(is_right, CASES[kind]))


@pytest.mark.parametrize(("kind", "name"), MUTANTS)
def test_a_wrong_definition_is_noticed(kind, name, mutated):
    mutated(kind, MUTANTS[kind, name])
    if kind not in CASES:
        layout = TmemLayout.scales() if kind is SCALES else TmemLayout(kind, 4)
        assert not tmem_layouts.is_as_copied(layout)
        return
    for case in CASES[kind]:
        try:
            assert not is_right(case)
        except (errors.PallasGpuError, PtxError):
            continue


# The lanes of 64 rows of metadata: [halves of N, rows].
HALVES = sparsity.lanes_of(64, 0), sparsity.lanes_of(64, 1)
LANES = {
    "those of 128 rows": np.arange(128).reshape(2, 64),
    "halves of 8 lanes": np.arange(128).reshape(8, 2, 8).swapaxes(0, 1).reshape(2, 64),
    "rows 15 and 16 exchanged": [
        x[[*range(15), 16, 15, *range(17, 64)]] for x in HALVES
    ],
}


@pytest.mark.parametrize("width", [E4M3, F16, F32])
@pytest.mark.parametrize("lanes", LANES.values(), ids=LANES)
def test_wrong_lanes_of_the_metadata_of_64_rows_are_noticed(lanes, width, monkeypatch):
    monkeypatch.setattr(sparsity, "lanes_of", lambda rows, half=0: lanes[half])
    case = SparseProduct(m=64, n=16, k=128, a=width, b=width, a_swizzle=64)
    assert not is_right(case)
