# SPDX-License-Identifier: Apache-2.0
"""Copies of arrays of which `jax.vmap` makes one for each instance.

The instances of an array are adjacent in GMEM. If its size is not a multiple of 16
bytes, all but the first start where TMA cannot address them, whichever part a copy
takes: threads copy it then, as they copy other parts that TMA cannot address.
"""

from __future__ import annotations

import math

from pallas_gpu import _jax, errors, types
from pallas_gpu.layouts.gmem.tma_view import INNER_BOX_BYTES
from pallas_gpu.primitives import _engines, cp_async, tma
from pallas_gpu.primitives.copies.prefetch import async_prefetch_p
from pallas_gpu.program.bodies import kept
from pallas_gpu.program.build import region_of
from pallas_gpu.program.nodes import Op, Value
from pallas_gpu.program.rewrite import with_equations
from pallas_gpu.program.walk import Site, walk

_COPIES = (tma.copy_gmem_to_smem_p, tma.copy_smem_to_gmem_p, async_prefetch_p)


@kept
def for_instances(jaxpr: _jax.Jaxpr, batched: tuple[bool, ...]) -> _jax.Jaxpr:
    """Returns a kernel's body in which TMA copies only what it can address.

    `batched` says for each of its references whether each instance has its own. Scratch
    in GMEM is always the instance's own.
    """
    pairs = zip(region_of(jaxpr).inputs, batched, strict=True)
    shared = {array for array, own in pairs if not own}
    changed = {
        id(site.eqn): _by_threads(site)
        for site in walk(jaxpr)
        if site.op.primitive in _COPIES and not _is_aligned(site, shared)
    }
    return with_equations(jaxpr, changed)


def _is_aligned(site: Site, shared: set[Value]) -> bool:
    """Returns whether all instances of a copy's array start where TMA can."""
    array = site.op.access_to(types.GMEM).buffer
    return site.origin(array) in shared or _bits(array) % (8 * INNER_BOX_BYTES) == 0


def _bits(array: Value) -> int:
    return math.prod(array.shape) * types.itemsize_bits(array.dtype)


def _by_threads(site: Site) -> _jax.JaxprEqn | None:
    """Returns the copy by threads that replaces one by TMA; None for a prefetch."""
    op, params = site.op, site.op.params
    if op.primitive is async_prefetch_p:
        return None  # a hint
    if op.primitive is tma.copy_gmem_to_smem_p:
        refused = params["collective_axes"] or (
            params["oob_mode"] is types.OOBFillMode.NAN
        )
        primitive, kept = cp_async.cp_async_p, ("tree", "oob_mode")
    else:
        refused = params["reduction_op"]
        primitive, kept = cp_async.store_by_threads_p, ("tree", "commit_group")
    if refused or not _threads_can(op):
        raise _cannot(site)
    params = {name: site.eqn.params[name] for name in kept}
    return site.eqn.replace(primitive=primitive, params=params)


def _threads_can(op: Op) -> bool:
    gmem, smem = op.access_to(types.GMEM), op.access_to(types.SMEM)
    sides = _engines.Side.accessed(gmem), _engines.Side.accessed(smem)
    return _engines.for_threads(*sides, store=gmem.writes)


def _cannot(site: Site) -> errors.LayoutError:
    array = site.op.access_to(types.GMEM).buffer
    return errors.LayoutError(
        "jax.vmap: instances start where TMA cannot address them",
        expected="arrays whose size is a multiple of 16 bytes, for a multicast, a "
        "reduction, or a fill with NaN, which threads do not copy",
        got=f"{_bits(array) / 8:g} bytes: {types.describe(array.aval)}",
        hint="pad the array, e.g. its last dimension, or let the grid have the axis",
        where=site.where,
    )
