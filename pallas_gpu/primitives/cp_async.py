# SPDX-License-Identifier: Apache-2.0
"""Copies between GMEM and SMEM by all threads: cp.async, and the way back."""

from __future__ import annotations

from typing import Any

from pallas_gpu import expect, types
from pallas_gpu.primitives import _engines
from pallas_gpu.primitives import _operands as ops
from pallas_gpu.primitives import _registry as registry

__all__ = ["wait_gmem_to_smem"]

cp_async_p = registry.define(
    "cp_async",
    "cp_async",
    called="copy_gmem_to_smem",
    reads=("src",),
    writes=("dst", "barrier"),
    clipped=("src",),
    remote=("src",),
    asynchronous=True,
    proxies=("generic",),
    releases=True,
)
# Not asynchronous: threads load and store, which is done when the operation returns.
store_by_threads_p = registry.define(
    "copy_smem_to_gmem_by_threads",
    "cp_async",
    called="copy_smem_to_gmem",
    reads=("src",),
    writes=("dst",),
    clipped=("dst",),
    remote=("dst",),
)
wait_gmem_to_smem_p = registry.define("wait_gmem_to_smem", "cp_async", waits=True)


def load(
    src: types.Ref,
    dst: types.Ref,
    barrier: Any,
    predicate: Any,
    oob_mode: types.OOBFillMode | None,
) -> None:
    """Starts a copy from GMEM to SMEM by all threads of the issuer.

    PTX: cp.async of 4, 8 or 16 bytes; ld.global and st.shared of narrower parts. Then
    cp.async.mbarrier.arrive and mbarrier.arrive, or cp.async.commit_group.
    """
    ops.bind(
        cp_async_p,
        {"src": src, "dst": dst, "barrier": barrier, "predicate": predicate},
        oob_mode=oob_mode,
    )


def store(src: types.Ref, dst: types.Ref, predicate: Any, commit_group: bool) -> None:
    """Copies from SMEM to GMEM by all threads of the issuer.

    PTX: ld.shared, st.global, fence.proxy.async.global. It is complete when it returns.
    """
    ops.bind(
        store_by_threads_p,
        {"src": src, "dst": dst, "predicate": predicate},
        commit_group=commit_group,
    )


@expect.arguments(
    n=expect.integer(0, hint="wait_gmem_to_smem(0) waits for all of them")
)
def wait_gmem_to_smem(n: int) -> None:
    """Waits until at most `n` copies to SMEM without a barrier are in flight.

    PTX: cp.async.wait_group, fence.proxy.async.shared::cta. Since: sm_90.

    Issued by the warpgroup, or warp, that started the copies; afterwards all its
    threads see the data, and so do tensor cores and copies that it issues.

    Args:
      n: maximum number of copies in flight.

    Raises:
      ArgumentError: `n` is negative.

    Example:
      >>> plgpu.copy_gmem_to_smem(x_gmem.at[:, plgpu.ds(3, 5)], x_smem)
      >>> plgpu.wait_gmem_to_smem(0)
    """
    ops.bind(wait_gmem_to_smem_p, {}, n=n)


@registry.checks(cp_async_p, store_by_threads_p)
def _check_copy(op: Any, mesh: types.Mesh) -> None:
    gmem, load = op.access_to(types.GMEM), op.primitive is cp_async_p
    # A range may exceed the array: threads load zeros, and store nothing outside.
    _engines.require_elements(gmem.window)
    sides = map(_engines.Side.accessed, (gmem, op.access_to(types.SMEM)))
    _engines.check_threads(*sides, store=not load)
    if not load or op.params["oob_mode"] is None:
        _engines.require_some_inside(gmem, registry.called(op.primitive))
