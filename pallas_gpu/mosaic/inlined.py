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
from pallas_gpu.mosaic.barriers import BarrierRef, CollectiveBarrierRef
from pallas_gpu.mosaic.fragmented_array import FragmentedArray
from pallas_gpu.mosaic.launch_context import LaunchContext
from pallas_gpu.mosaic.memory import memrefs
from pallas_gpu.mosaic.tcgen05 import TMEMRef

# The context of the kernel that is being lowered, and of its recorder or None.
context = LaunchContext.current
# The handle of an array in registers in the layout that is declared, or of a scalar.
array = FragmentedArray.of


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
    """Returns the handle of some adjacent barriers; see `BarrierRef.at`.

    The blocks of `groups` arrive on those of a cluster; None: they are the block's.
    """
    found = BarrierRef.at(pointer, count, parities=parities)
    if groups is None:
        return found
    return CollectiveBarrierRef.of(found, groups, leader_tracked)


def parities(handle: BarrierRef | CollectiveBarrierRef) -> ir.Value:
    """Returns the bits of `barriers` after what the code has waited for."""
    barrier = handle if isinstance(handle, BarrierRef) else handle.barrier
    return memref_dialect.load(barrier.phases, [])


def is_array(x: Any) -> bool:
    """Whether something is a leaf of the results of inline code."""
    return isinstance(x, (FragmentedArray, ir.Value))


def registers(x: Any, dtype: np.dtype) -> regs.Array | None:
    """Returns a result of inline code, declared of a type, as a value of the kernel."""
    if isinstance(x, FragmentedArray):
        return x.array()
    return regs.Splat(x, dtype) if isinstance(x, ir.Value) else None
