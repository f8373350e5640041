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

from pallas_gpu import _jax, arch, errors, resources, types, walk
from pallas_gpu.entry import expand
from pallas_gpu.entry.call import CallParams
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry
from pallas_gpu.primitives.cluster import WORD_BYTES, async_store_smem_p
from pallas_gpu.primitives.warp import WARPS, warp_map_p

Lower = Callable[[CallParams, arch.GpuTarget], Any]

# With so much scratch every operation has code: a round in which each thread passes on
# 16 bytes.
_ROUND_BYTES = 4 * 32 * 16

# From so many copies on their tensor maps, of which one may take several, are counted:
# the parameters of a kernel hold 255.
_MANY_COPIES = 100
_TENSOR_CORES = arch.Feature.WGMMA, arch.Feature.TCGEN05

_LOWER: list[Lower] = []
# The error of each kernel that was lowered, None if it has code.
_TRIED: weakref.WeakKeyDictionary[
    _jax.Jaxpr, dict[Hashable, errors.PallasGpuError | None]
]
_TRIED = weakref.WeakKeyDictionary()


def register_compiler(lower: Lower) -> None:
    """Registers what lowers a kernel for a target, or raises."""
    _LOWER[:] = [lower]


def require_code(params: CallParams, target: arch.GpuTarget) -> None:
    """Raises the compiler's error for a kernel that it may refuse, and does.

    Raises:
      OutOfResources: the arrays leave too little SMEM for what the code exchanges.
      LayoutError: no layouts satisfy all operations.
    """
    found = _TRIED.setdefault(params.jaxpr, {})
    key = params.mesh, params.compiler_params, params.batch, params.aliases, target.name
    if key not in found:
        found[key] = _tried(params, target) if _in_doubt(params, target) else None
    error = found[key]
    if error is not None:
        raise error


def _tried(params: CallParams, target: arch.GpuTarget) -> errors.PallasGpuError | None:
    try:
        _LOWER[0](params, target)
    except errors.PallasGpuError as error:
        return error.with_traceback(None)
    return None


def _in_doubt(params: CallParams, target: arch.GpuTarget) -> bool:
    sites = walk.walk(expand.expanded(params, target).jaxpr)
    if any(_may_split_words(site.eqn) for site in sites):
        return True
    if any(map(_cuts_tiles, sites)) and any(map(_reads_tiles, sites)):
        return True
    if sum(map(_copies, sites)) >= _MANY_COPIES:
        return True
    if not any(_has_arrays(site.eqn) for site in sites):
        return False
    needed = _ROUND_BYTES
    if any(site.eqn.primitive is warp_map_p for site in sites):
        needed *= WARPS
    plan = resources.plan(
        expand.expanded(params, target).jaxpr,
        target,
        params.name,
        params.compiler_params.reduction_scratch_bytes,
        params.mesh.warpgroups,
    )
    return plan.scratch_limit_bytes // params.mesh.warpgroups < needed


def _may_split_words(eqn: _jax.JaxprEqn) -> bool:
    """True for a store of narrow elements whose first one is known at run time only."""
    if eqn.primitive is not async_store_smem_p:
        return False
    if eqn.params["dtype"].itemsize >= WORD_BYTES:
        return False
    return any(
        not isinstance(x, _jax.Literal) and _is_index(x.aval) for x in eqn.invars
    )


def _copies(site: walk.Site) -> bool:
    operation = registry.operation(site.eqn.primitive)
    return operation is not None and operation.copies


def _cuts_tiles(site: walk.Site) -> bool:
    """True for a copy of a reshaped array in SMEM whose tiles the compiler chooses."""
    eqn = site.eqn
    if not _copies(site):
        return False
    operands = ops.unflatten(eqn.params["tree"], list(eqn.invars))
    sides = [operands["src"], operands["dst"]]
    return any(
        side.viewed is not None
        and side.ref.aval.memory_space is types.SMEM
        and not side.ref.aval.transforms
        for side in sides
    )


def _reads_tiles(site: walk.Site) -> bool:
    """True for what reads SMEM in tiles: products, and copies to TMEM."""
    operation = registry.operation(site.eqn.primitive)
    return operation is not None and bool(
        operation.feature in _TENSOR_CORES and operation.reads
    )


def _is_index(aval: Any) -> bool:
    return getattr(aval, "shape", None) == () and aval.dtype.kind in "iu"


def _has_arrays(eqn: _jax.JaxprEqn) -> bool:
    """True if an equation has arrays in registers."""
    avals = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    return any(
        not isinstance(aval, _jax.AbstractRef) and getattr(aval, "shape", ())
        for aval in avals
    )
