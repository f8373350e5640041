# SPDX-License-Identifier: Apache-2.0
"""Kernels of which only the compiler knows whether code for them exists.

Whether an operation exchanges data through SMEM, and whether a thread has whole words,
depends on layouts, which the emulator does not know. Where such a kernel may be
refused, the compiler lowers it before the emulator runs it: what the emulator accepts,
the compiler accepts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

from pallas_gpu import _jax, arch, errors, types
from pallas_gpu.entry import expand
from pallas_gpu.entry.call import ABOVE, CallParams
from pallas_gpu.primitives.cluster import WORD_BYTES, async_store_smem_p
from pallas_gpu.primitives.inline import inline_mgpu_p, inline_ptx_p
from pallas_gpu.primitives.warp import WARPS, warp_map_p
from pallas_gpu.program.nodes import Op
from pallas_gpu.program.walk import uses, walk

# With so much scratch every operation has code: a round in which each thread passes on
# 16 bytes.
_ROUND_BYTES = 4 * 32 * 16

# From so many copies on their tensor maps, of which one may take several, are counted:
# the parameters of a kernel hold 255.
_MANY_COPIES = 100

# The error of each kernel that was lowered, None if it has code.
_TRIED: weakref.WeakKeyDictionary[
    _jax.Jaxpr, dict[Hashable, errors.PallasGpuError | None]
]
_TRIED = weakref.WeakKeyDictionary()


def require_code(
    params: CallParams, target: Any, in_doubt: Callable[..., bool] | None = None
) -> None:
    """Raises the compiler's error for a kernel that it may refuse, and does.

    The arrays leave too little SMEM for what the code exchanges, or no layouts satisfy
    all operations.

    Args:
      params: the parameters of the kernel.
      target: for which it is compiled.
      in_doubt: of the parameters and the target, whether it may be refused; default:
        where that depends on layouts.
    """
    in_doubt = in_doubt or _in_doubt
    found = _TRIED.setdefault(params.jaxpr, {})
    key = params.mesh, params.compiler_params, params.batch, params.aliases, target.name
    if key not in found:
        found[key] = _tried(params, target) if in_doubt(params, target) else None
    error = found[key]
    if error is not None:
        raise error


def _tried(params: CallParams, target: Any) -> errors.PallasGpuError | None:
    try:
        ABOVE.compiler(params, target)
    except errors.PallasGpuError as error:
        return error.with_traceback(None)
    return None


def _in_doubt(params: CallParams, target: arch.GpuTarget) -> bool:
    body = expand.expanded(params, target).jaxpr
    ops = [site.op for site in walk(body)]
    if any(_may_split_words(op) or _views_tiles(op) for op in ops):
        return True
    # What it is given and returns is compared with its types when it is emitted.
    if any(op.primitive in (inline_mgpu_p, inline_ptx_p) for op in ops):
        return True
    if sum(map(_copies, ops)) >= _MANY_COPIES:
        return True
    plan = expand.planned(params, target)
    needed = _ROUND_BYTES * (WARPS if uses(body, warp_map_p) else 1)
    return plan.scratch_limit_bytes // params.mesh.warpgroups < needed


def _may_split_words(op: Op) -> bool:
    """True for a store of narrow elements, whose first one may be within a word."""
    is_store = op.primitive is async_store_smem_p
    return is_store and op.params["dtype"].itemsize < WORD_BYTES


def _copies(op: Op) -> bool:
    """True for a copy between GMEM and SMEM."""
    return {types.GMEM, types.SMEM} <= {access.space for access in op.accesses}


def _views_tiles(op: Op) -> bool:
    """True for a view of an array in SMEM whose tiles the compiler chooses."""
    is_view = op.params.get("view_shape") is not None
    return any(
        (is_view or access.viewed is not None)
        and access.space is types.SMEM
        and not access.buffer.aval.transforms
        for access in op.accesses
    )
