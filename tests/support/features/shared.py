# SPDX-License-Identifier: Apache-2.0
"""Features of several operations: copies, barriers and clusters, memory."""

from __future__ import annotations

from tests.support.features.row import Row, omissions

COPIES = "lowering/families/copies"
LOAD, STORE = "copy_gmem_to_smem", "copy_smem_to_gmem"
MBARRIER = "lowering/families/mbarrier"
GENERIC = "(threads read and write, as everywhere)"
WARPS = "lowering/families/warp"
ROWS = (
    Row(
        "load by TMA: tiles, swizzles, squeezed dimensions, edges",
        (
            "copy: direction, element type, barrier",
            "copy: plain load and store",
            "copy: squeezed dimensions",
            "copy: at most 256 elements a dimension",
            "copy: swizzled minor dimension",
            "copy: contiguous SMEM",
            "transforms: tiles, also ragged ones",
            "transforms: SMEM tiling, swizzle",
            "copy: expected bytes",
            "primitives: bytes % 128",
        ),
        (LOAD,),
        f"{COPIES}/transposed::parts_travel_through_smem",
        "emitters/tma::one_instruction_moves_a_tiled_block",
        "cp.async.bulk.tensor.4d.shared::cluster.global",
        omissions("load box"),
    ),
    Row(
        "store by TMA, in groups",
        (
            "copy: commit group",
            "copy: await with allow_groups, read_only",
            "primitives: wait_smem_to_gmem",
            "primitives: commit_smem_to_gmem_group",
            "primitives: commit_smem",
            "primitives: copy_smem_to_gmem",
        ),
        (
            STORE,
            "wait_smem_to_gmem",
            "commit_smem_to_gmem_group",
            "commit_smem",
            "commit_gmem",
            "fence_smem",
        ),
        f"{COPIES}/transposed::parts_travel_through_smem",
        "emitters/tma::one_instruction_moves_a_tiled_block",
        "cp.async.bulk.tensor.4d.global.shared::cta",
        omissions("store box"),
    ),
    Row(
        "transposed views of GMEM; more than five dimensions",
        (
            "transforms: transposed GMEM",
            "transforms: collapsed leading dimensions",
            "copy: rank above 5",
        ),
        (LOAD, STORE),
        f"{COPIES}/transposed::parts_travel_through_smem",
        f"{COPIES}/transposed::ptx_has_one_copy_of_a_box",
        "bulk.tensor",
        {"wait": f"{COPIES}/transposed::without_the_wait_a_transposed_copy_is_a_race"},
    ),
    Row(
        "copies of reshaped and bitcast references",
        ("copy: reshaped and bitcast references",),
        (LOAD, STORE),
        f"{COPIES}/reshaped::a_reshaped_part_travels_through_smem",
        f"{COPIES}/reshaped::a_reshaped_part_is_one_tensor_copy",
        "cp.async.bulk.tensor.4d.shared",
        {
            "wait": "reshaped_copies: no wait for the load",
            "commit": "reshaped_copies: no commit",
            "count": "reshaped_copies: wait leaves one store",
        },
    ),
    Row(
        "copies of adjacent bytes without a tensor map",
        ("copy: bulk copies without a tensor map",),
        (LOAD, STORE),
        f"{COPIES}/bulk::parts_travel_through_smem",
        f"{COPIES}/bulk::ptx_has_bulk_copies_and_no_descriptor",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
        omissions("load bytes"),
    ),
    Row(
        "elements of 2 and 4 bits",
        ("descriptors: element types",),
        (LOAD, STORE),
        f"{COPIES}/packed::a_part_over_the_edge_is_filled_with_zeros",
        f"{COPIES}/packed::the_map_is_one_of_bytes",
        "cp.async.bulk.tensor.2d",
    ),
    Row(
        "fill with NaN outside of the array",
        ("copy: fill modes",),
        (LOAD,),
        f"{COPIES}/nan_fill::elements_outside_are_read_as_the_mode_says",
        f"{COPIES}/nan_fill::the_driver_encodes_the_map_with_its_fill",
        "cp.async.bulk.tensor.2d.shared::cluster.global",
        omissions("load nan fill"),
    ),
    Row(
        "hints to the L2 cache",
        ("copy: cache hints",),
        (LOAD, STORE),
        f"{COPIES}/cache_hints::results_do_not_depend_on_hints",
        f"{COPIES}/cache_hints::the_instructions_carry_policies",
        "createpolicy.fractional.L2::",
        omissions("store hint"),
    ),
    Row(
        "predicates: a skipped copy still arrives",
        ("copy: predicate",),
        (LOAD, STORE),
        "lowering/families/mbarrier/counts::a_skipped_copy_arrives_without_bytes",
        "lowering/families/mbarrier/counts::a_skipped_copy_announces_no_bytes",
        "mbarrier.arrive.expect_tx",
        {"count": "matmul: three arrivals for two copies"},
    ),
    Row(
        "reductions of stores: add, min, max, inc, dec, and, or, xor",
        ("descriptors: reductions by element type", "copy: store with a reduction"),
        (STORE,),
        "lowering/families/copy_reductions::"
        "a_copy_combines_its_elements_with_those_in_gmem",
        "lowering/families/copy_reductions::the_instruction_reduces",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta",
        omissions("store added"),
    ),
    Row(
        "rows that indices name, four at a time",
        ("copy: gather4, its indices and multiples", "copy: scatter4"),
        ("gather_rows", "scatter_rows"),
        f"{COPIES}/four_rows::rows_are_gathered",
        "differential/four_rows::copies_of_four_rows",
        "tile::gather4",
        omissions("load four rows"),
        blackwell=True,
    ),
    Row(
        "tensor maps: one for equal copies, fetched at the start of the kernel",
        (
            "descriptors: scratch, finalized",
            "descriptors: cache",
            "descriptors: kernel argument of a reference",
            "descriptors: prefetch",
        ),
        (LOAD, STORE),
        "memory/workspace::tma_copies_to_and_from_scratch",
        "emitters/tensor_map::a_kernel_fetches_its_descriptors_first",
        "prefetch.tensormap",
    ),
    Row(
        "instances of vmap that TMA cannot address",
        ("copy: GMEM addresses are multiples of 16 bytes",),
        (LOAD, STORE),
        "memory/instances::bytes_that_are_aligned_in_the_first_instance_alone",
        "memory/instances::the_instructions_are_those_of_threads",
        "cp.async.ca.shared.global",
    ),
    Row(
        "multicasts of any shape along any cluster axes",
        ("copy: multicast", "primitives: copy_gmem_to_smem(collective_axes)"),
        (LOAD,),
        "lowering/families/multicast::"
        "a_multicast_along_any_axes_reaches_the_ctas_along_them",
        "emitters/cluster::a_multicast_copy_names_its_blocks",
        "multicast::cluster",
        omissions("load multicast"),
    ),
    Row(
        "loads of two CTAs that the leader's barrier tracks",
        (
            "copy: partitioned and replicated loads of two CTAs",
            "primitives: partitioned_axis, leader_tracked",
        ),
        (LOAD, "async_prefetch"),
        "lowering/families/leader_tracked::"
        "each_cta_gets_its_part_and_the_leader_counts_both",
        "lowering/families/leader_tracked::the_instruction_signals_the_leader",
        ".cta_group::2",
        omissions("load leader"),
        blackwell=True,
    ),
    # Barriers, clusters
    Row(
        "arrays of barriers of any rank, and many",
        ("primitives: barrier indexer", "scratch: more than 32 barriers"),
        ("barrier_arrive", "barrier_wait"),
        f"{MBARRIER}/arrays::what_names_one_barrier",
        f"{MBARRIER}/arrays::warps_initialize_barriers_in_turns",
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
        "emitters/cluster::a_remote_arrival_is_released_to_the_cluster",
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
    # Memory: unions, scopes, scratch in GMEM, memory and arrays of warps
    Row(
        "unions: arrays of other types and transforms share bytes",
        (
            "scratch: Union",
            "transforms: aliasing",
            "transforms: reshape and bitcast of references",
        ),
        ("run_scoped",),
        "memory/unions::bytes_lie_where_transforms_say",
        "memory/unions::it_compiles_to_shared_addresses_offline",
        "st.shared",
        {
            "wait": "unions: no wait for the copy",
            "commit": "unions: no commit between the members",
        },
    ),
    Row(
        "scopes that follow each other share SMEM",
        ("scratch: SMEM arrays, packed, in trees",),
        ("run_scoped",),
        "lowering/reuse::scopes_take_turns",
        "lowering/reuse::two_scopes_compile_to_the_memory_of_one",
        "bar.sync",
        {"wait": "emulator/gpu/freed_memory::the_next_scope_may_have_the_same_memory"},
    ),
    Row(
        "scratch in GMEM, with initial contents",
        ("descriptors: general GMEM scratch", "scratch: GMEM"),
        ("run_scoped", "get_global"),
        "memory/workspace::scratch_with_initial_contents_has_them_in_every_launch",
        "memory/workspace::it_compiles_offline",
        "st.global",
        {
            "wait": "workspace: no wait for the others",
            "fence": "workspace: no fence",
            "count": "workspace: two arrivals of each CTA",
        },
    ),
    Row(
        "scopes and kernels of single warps",
        ("scratch: WarpMesh",),
        ("run_scoped", "warp_map"),
        "primitives/warp_scopes::a_kernel_over_warps_has_scratch_in_each_warp",
        "primitives/warp_scopes::each_warp_waits_for_its_own_barrier",
        "mbarrier.try_wait",
        {
            "wait": "warp_scopes: no wait",
            "commit": "warp_scopes: no commit",
            "count": "warp_scopes: two copies expected",
        },
    ),
    Row(
        "arrays of single warps",
        ("scratch: arrays in warp_map",),
        ("warp_map",),
        "primitives/warp_arrays::a_softmax_of_rows",
        f"{WARPS}::arrays_of_a_warp_do_not_make_the_warpgroup_meet",
        "shfl",
        {"wait": "warp_exchange: no wait for the others"},
    ),
    Row(
        "arrays updated in place",
        ("launch: in-out arrays",),
        (),
        "lowering/families/copy_reductions::"
        "ctas_combine_into_the_same_elements_at_once",
        "lowering/families/copy_reductions::every_reduction_of_rows_assembles",
        "cp.reduce.async.bulk.global.shared::cta",
    ),
    Row(
        "transposed references in SMEM; inferred transforms",
        (
            "transforms: transposed references",
            "transforms: inferred, explicit ones hard",
        ),
        (),
        "lowering/families/copies/cp_async::a_transposed_reference_is_copied",
        f"{WARPS}::a_warp_copies_to_a_tiled_array_in_its_transforms",
        "cp.async.bulk.tensor",
    ),
)
