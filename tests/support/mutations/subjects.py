# SPDX-License-Identifier: Apache-2.0
"""All kernels that have mutants."""

from __future__ import annotations

from tests.support.mutations import (
    async_stores,
    attention,
    cluster_handover,
    cluster_refs,
    copy_reductions,
    delayed_release,
    grid_handover,
    lines,
    matmul,
    multicast,
    persistent,
    reshaped_copies,
    ring_by_hand,
    row_copies,
    smem_handover,
    softmax,
    specialised,
    thread_copies,
    tma_pipeline,
    unions,
    warp_exchange,
    warp_scopes,
    warps,
    workspace,
)
from tests.support.mutations.tensor_cores import (
    leader_loads,
    pair_product,
    ring,
    tensor_core,
)

SUBJECTS = tuple(
    module.SUBJECT
    for module in (
        tma_pipeline,
        specialised,
        matmul,
        attention,
        multicast,
        cluster_handover,
        grid_handover,
        cluster_refs,
        smem_handover,
        softmax,
        persistent,
        warps,
        copy_reductions,
        delayed_release,
        reshaped_copies,
        row_copies,
        thread_copies,
        unions,
        warp_exchange,
        async_stores,
        lines,
        ring_by_hand,
        workspace,
        warp_scopes,
        tensor_core,
        pair_product,
        leader_loads,
        ring,
    )
)
