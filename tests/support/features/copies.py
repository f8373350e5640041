# SPDX-License-Identifier: Apache-2.0
"""Copies between GMEM and SMEM."""

from __future__ import annotations

from tests.support.features.row import Row, omissions

COPIES = "lowering/families/copies"
LOAD, STORE = "copy_gmem_to_smem", "copy_smem_to_gmem"


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
        "mosaic/tma::one_instruction_moves_a_tiled_block",
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
        "mosaic/tma::one_instruction_moves_a_tiled_block",
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
        "entry/memory/workspace::tma_copies_to_and_from_scratch",
        "mosaic/tensor_map::a_kernel_fetches_its_descriptors_first",
        "prefetch.tensormap",
    ),
    Row(
        "instances of vmap that TMA cannot address",
        ("copy: GMEM addresses are multiples of 16 bytes",),
        (LOAD, STORE),
        "entry/memory/instances::bytes_that_are_aligned_in_the_first_instance_alone",
        "entry/memory/instances::the_instructions_are_those_of_threads",
        "cp.async.ca.shared.global",
    ),
    Row(
        "multicasts of any shape along any cluster axes",
        ("copy: multicast", "primitives: copy_gmem_to_smem(collective_axes)"),
        (LOAD,),
        "lowering/families/multicast::"
        "a_multicast_along_any_axes_reaches_the_ctas_along_them",
        "mosaic/cluster::a_multicast_copy_names_its_blocks",
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
)
