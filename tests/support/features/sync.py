# SPDX-License-Identifier: Apache-2.0
"""Barriers, clusters, semaphores, dependent launches."""

from __future__ import annotations

from tests.support.features.row import Row

MBARRIER = "lowering/families/mbarrier"
GENERIC = "(threads read and write, as everywhere)"
ROWS = (
    Row(
        "arrivals, waits, phases; counts of arrivals",
        (
            "primitives: barrier_arrive",
            "primitives: barrier_wait, phase bits",
            "scratch: TMABarrier, Barrier",
            "copy: arrive=True and False",
        ),
        ("barrier_arrive", "barrier_wait"),
        f"{MBARRIER}/counts::an_arrival_may_count_as_several",
        f"{MBARRIER}/counts::the_instruction_has_the_count",
        "mbarrier.arrive.",
        {"wait": "smem_handover: no wait for the other", "count": "lines: one arrival"},
    ),
    Row(
        "bytes that somebody else completes",
        ("copy: transaction counts by hand",),
        ("barrier_expect",),
        f"{MBARRIER}/counts::no_bytes_are_there_at_once",
        f"{MBARRIER}/counts::expected_bytes_are_no_arrival",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64",
        {"count": "lines: bytes of nobody"},
    ),
    Row(
        "tests of a barrier",
        ("primitives: barrier_test",),
        ("barrier_test",),
        f"{MBARRIER}/polling::a_loop_of_tests_waits_for_a_copy",
        f"{MBARRIER}/polling::the_instructions_of_a_test",
        "mbarrier.test_wait.parity",
        {
            "wait": "lines: no test",
            "count": f"{MBARRIER}/polling::"
            "polling_for_what_never_comes_ends_with_a_report",
        },
    ),
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
        "asynchronous stores to other CTAs, and reductions there",
        ("copy: reductions into SMEM of the cluster",),
        ("async_store_smem",),
        "lowering/families/async_stores::an_array_arrives_in_the_other_cta",
        "lowering/families/async_stores::"
        "stores_are_wide_and_counted_on_the_other_ctas_barrier",
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes",
        {
            "wait": "async_stores: no wait for full",
            "commit": "async_stores: no commit",
            "fence": "(SMEM alone)",
            "count": "async_stores: two arrivals expected",
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
    Row(
        "dependent launches",
        ("launch: uses_pdl",),
        ("griddepcontrol_wait", "griddepcontrol_launch_dependents"),
        "lowering/families/grids/griddepcontrol::"
        "a_kernel_sees_the_results_of_the_one_before",
        "lowering/families/grids/griddepcontrol::the_instructions",
        "griddepcontrol.launch_dependents;",
        {
            "wait": "lowering/families/grids/griddepcontrol::"
            "an_access_before_the_wait_is_a_race_with_the_kernel_before"
        },
    ),
    Row(
        "semaphores of a launch and of a CTA; barriers of a grid",
        ("scratch: semaphores in GMEM", "primitives: semaphore_signal_parallel"),
        (
            "semaphore_read",
            "semaphore_signal",
            "semaphore_signal_parallel",
            "semaphore_wait",
            "delay",
        ),
        "lowering/families/sync/semaphore::ctas_meet_at_a_barrier_of_the_grid",
        "lowering/families/sync/semaphore::parallel_signals_share_one_fence",
        "red.relaxed.sys.global.add.u32",
        {
            "wait": "grid_handover: no wait",
            "commit": "grid_handover: no wait for the store",
            "fence": "grid_handover: no fence",
            "count": "grid_handover: CTAs arrive twice",
        },
    ),
    Row(
        "cluster launch control",
        ("primitives: try_cluster_cancel", "primitives: query_cluster_cancel"),
        ("try_cluster_cancel", "query_cluster_cancel"),
        "lowering/families/grids/launch_control::every_position_is_worked_on",
        "lowering/families/grids/launch_control::the_instructions",
        "clusterlaunchcontrol.query_cancel.is_canceled",
        {
            "wait": "lowering/families/grids/launch_control::"
            "an_answer_read_before_it_arrives_is_a_race",
            "commit": "(no thread stores to the answer)",
            "fence": "lowering/families/grids/launch_control::"
            "a_request_over_an_answer_that_another_cta_reads_is_a_race",
            "count": "lowering/families/grids/launch_control::"
            "an_arrival_for_each_warpgroup_is_needed",
        },
        blackwell=True,
    ),
)
