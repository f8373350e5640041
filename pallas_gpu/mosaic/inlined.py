# SPDX-License-Identifier: Apache-2.0
"""The handles that inline code is given, and what it returns.

`lowering/families/inline.py` asks for them: it stands below this room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref as memref_dialect

from pallas_gpu.emitters import registers as regs
from pallas_gpu.emitters.cluster import Group
from pallas_gpu.emitters.tensor_cores.tmem import TmemView
from pallas_gpu.layouts import RegisterLayout
from pallas_gpu.mosaic import memrefs
from pallas_gpu.mosaic.barriers import BarrierRef, CollectiveBarrierRef
from pallas_gpu.mosaic.fragmented_array import FragmentedArray
from pallas_gpu.mosaic.launch_context import LaunchContext
from pallas_gpu.mosaic.tcgen05 import TMEMRef


def context(recorder: Any) -> LaunchContext:
    """Returns the context of the kernel that is being lowered.

    Args:
      recorder: of a profiled kernel, else None.
    """
    return LaunchContext.current(recorder)


def memref(view: Any) -> ir.Value | TMEMRef:
    """Returns the handle of a part of an array in memory."""
    return TMEMRef.of(view) if isinstance(view, TmemView) else memrefs.memref_of(view)


def barriers(
    pointer: ir.Value,
    count: int,
    parities: ir.Value,
    groups: Sequence[Group] | None,
    leader_tracked: bool,
) -> BarrierRef | CollectiveBarrierRef:
    """Returns the handle of some adjacent barriers.

    Args:
      pointer: `!llvm.ptr<3>` of the first.
      count: how many.
      parities: i32, a bit for each, that of the next wait.
      groups: the blocks that arrive on those of a cluster; None: those of the block.
      leader_tracked: whether they arrive at the first block of the group alone.
    """
    found = BarrierRef.at(pointer, count, parities=parities)
    if groups is None:
        return found
    return CollectiveBarrierRef.of(found, groups, leader_tracked)


def parities(handle: BarrierRef | CollectiveBarrierRef) -> ir.Value:
    """Returns the bits of `barriers` after what the code has waited for."""
    barrier = handle if isinstance(handle, BarrierRef) else handle.barrier
    return memref_dialect.load(barrier.phases, [])


def array(x: regs.Array, layout: RegisterLayout | None = None) -> FragmentedArray:
    """Returns the handle of an array in registers, or of a scalar.

    Args:
      x: the array.
      layout: its layout as declared; None for a splat.
    """
    return FragmentedArray.of(x, layout)


def is_array(x: Any) -> bool:
    """Whether something is a leaf of the results of inline code."""
    return isinstance(x, FragmentedArray | ir.Value)


def registers(x: Any, dtype: np.dtype) -> regs.Array | None:
    """Returns a result of inline code as a value of the kernel; None if it is none.

    Args:
      x: the result.
      dtype: the type that is declared; it has the sign of integers.
    """
    match x:
        case FragmentedArray():
            return x.array()
        case ir.Value():
            return regs.Splat(x, dtype)
    return None
