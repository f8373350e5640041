# SPDX-License-Identifier: Apache-2.0
"""Barriers, clusters, semaphores, dependent launches."""

from __future__ import annotations

from tests.support.features.row import Row

MBARRIER = "lowering/families/mbarrier"
GENERIC = "(threads read and write, as everywhere)"
ROWS = (
    Row(
        "arrays of barriers of any rank, and many",
        ("primitives: barrier indexer", "scratch: more than 32 barriers"),
        ("barrier_arrive", "barrier_wait"),
        f"{MBARRIER}/arrays::what_names_one_barrier",
        f"{MBARRIER}/arrays::each_barrier_is_initialized_once",
        "mbarrier.init.shared.b64",
        {
            "wait": "specialised: no wait for full",
            "count": "specialised: full counts three",
        },
    ),
    Row(
        "barriers that order tcgen05",
        ("primitives: orders_tensor_core",),
        ("barrier_arrive", "barrier_wait"),
        f"{MBARRIER}/tensor_core_order::they_hand_over_values_as_others_do",
        f"{MBARRIER}/tensor_core_order::"
        "an_arrival_in_another_cta_has_the_scope_of_the_cluster",
        "mbarrier.arrive.release.cluster.shared::cluster",
        {"fence": "tensor_core: ready does not order the tensor core"},
        blackwell=True,
    ),
    Row(
        "barriers of a cluster: cross, product, leader",
        (
            "scratch: ClusterBarrier",
            "context: cluster_idx",
            "launch: cluster, prologue",
        ),
        ("barrier_arrive", "barrier_wait"),
        f"{MBARRIER}/cluster_arrivals::"
        "a_phase_has_the_arrivals_of_all_ctas_along_the_axes",
        "mosaic/cluster::a_remote_arrival_is_released_to_the_cluster",
        "mbarrier.arrive.release.cluster.shared::cluster.b64",
        {
            "wait": "cluster_refs: no wait for sent",
            "count": "cluster_handover: two arrivals of each CTA",
        },
    ),
    Row(
        "barriers that warps and their warpgroup wait for",
        ("copy: await in a warp",),
        ("barrier_wait", "warp_map"),
        f"{MBARRIER}/warps_and_warpgroups::"
        "a_wait_of_all_four_warps_is_one_of_the_warpgroup",
        "lowering/families/warp::"
        "the_warpgroup_meets_before_and_after_and_nowhere_inside",
        "mbarrier.try_wait",
        {"wait": "warps: no wait", "count": "warps: five copies expected"},
    ),
    Row(
        "SMEM of other CTAs: loads, stores, updates, atomic operations",
        ("transforms: cluster reference",),
        (),
        "lowering/families/cluster::a_cta_reads_an_array_of_another_one",
        "lowering/families/cluster::"
        "accesses_are_instructions_on_the_clusters_shared_memory",
        "ld.shared::cluster.v4",
        {
            "wait": "cluster_refs: no wait for sent",
            "commit": GENERIC,
            "fence": GENERIC,
            "count": "cluster_refs: one CTA arrives on sent",
        },
    ),
    Row(
        "clusters of 9 to 16 CTAs, of any shape",
        ("launch: 3-D cluster", "launch: non-portable cluster sizes"),
        (),
        "lowering/families/multicast::a_cluster_of_any_shape_shares_what_it_copies",
        "lowering/families/cluster::a_cluster_of_16_ctas_compiles",
        ".reqnctapercluster 16",
    ),
)
