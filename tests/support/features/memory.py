# SPDX-License-Identifier: Apache-2.0
"""Memory of kernels: unions, scopes, scratch in GMEM, memory and arrays of warps."""

from __future__ import annotations

from tests.support.features.row import Row

WARPS = "lowering/families/warp"
ROWS = (
    Row(
        "unions: arrays of other types and transforms share bytes",
        (
            "scratch: Union",
            "transforms: aliasing",
            "transforms: reshape and bitcast of references",
        ),
        ("run_scoped",),
        "entry/memory/unions::bytes_lie_where_transforms_say",
        "entry/memory/unions::it_compiles_to_shared_addresses_offline",
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
        "entry/memory/workspace::"
        "scratch_with_initial_contents_has_them_in_every_launch",
        "entry/memory/workspace::it_compiles_offline",
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
