# SPDX-License-Identifier: Apache-2.0
"""Addresses in arrays of more than 2**31 elements: what threads add to a pointer.

The arrays do not exist: a kernel stores the distances of its pointers from the start.
"""

from __future__ import annotations

import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_gpu.emitters import gmem, registers
from pallas_gpu.emitters.elements import dtypes
from pallas_gpu.layouts import Layout
from pallas_gpu.layouts.window import Window

STRIDED = Layout.WG_STRIDED((128,), 1)


def distances(run_kernel, typed, shape, starts, sizes, layout, accesses):
    """The distances in elements, [threads, accesses], as emitted and as planned."""
    found, dtype = {}, np.float32

    def body(kb, source, out):
        given = [kb.i32(s.item()) if isinstance(s, np.int32) else s for s in starts]
        window = Window.whole(shape).slice(given, sizes)
        view = gmem.GmemView(source.pointer, None, np.dtype(dtype), window)
        placement = registers.place_registers(layout, view.shape)
        plan = gmem._address(view, placement, False)
        i64 = ir.IntegerType.get_signless(64)
        base = llvm.ptrtoint(i64, source.pointer)
        values = [
            dtypes.splat(arith.subi(llvm.ptrtoint(i64, pointer), base), 1)
            for pointer in gmem._pointers(view, plan)
        ]
        found["planned"] = plan.offsets()
        target = Layout.WG_STRIDED((len(values), 128), vec_size=1)
        at = registers.place_registers(target, (len(values), 128))
        gmem.store(out, registers.RegisterArray(tuple(values), at, np.dtype(np.int64)))

    result = typed((accesses, 128), np.int64)
    x = np.zeros(4, dtype)
    (out,) = run_kernel(body, [x], [result])
    strides = Window.whole(shape).array_strides
    first = sum(int(s) * stride for s, stride in zip(starts, strides, strict=True))
    return out.T // np.dtype(dtype).itemsize, found["planned"] + first


@pytest.mark.parametrize(
    ("shape", "starts", "sizes", "layout", "accesses"),
    [
        # Rows whose distance in bytes exceeds 32 bits.
        ((64, 2**28), (0, 8), (64, 8), Layout.WGMMA, 2),
        ((64, 2**28), (0, np.int32(8)), (64, 8), Layout.WGMMA, 4),
        # Starts that do.
        ((2**16, 2**20), (2**15 + 3, 128), (None, 128), STRIDED, 1),
        (
            (2**16, 2**20),
            (np.int32(2**16 - 1), np.int32(2**20 - 128)),
            (None, 128),
            STRIDED,
            1,
        ),
        ((2**31 - 2**18,), (np.int32(2**31 - 2**18 - 128),), (128,), STRIDED, 1),
    ],
)  # fmt: skip
def test_distances_have_64_bits(
    run_kernel, typed, shape, starts, sizes, layout, accesses
):
    case = shape, starts, sizes, layout, accesses
    got, planned = distances(run_kernel, typed, *case)
    np.testing.assert_array_equal(got, planned)
    assert planned.max() * 4 >= 2**31
