# SPDX-License-Identifier: Apache-2.0
"""What the hardware can do, or upstream takes, and this package refuses; and why."""

from __future__ import annotations

from tests.support.features.row import Refused

COPIES = "lowering/families/copies"
REFUSED = (
    Refused(
        "copies of every n-th element",
        ("copy: element strides",),
        "UnsupportedError",
        "the launcher's function that encodes tensor maps takes no element strides; "
        "reads and writes take a stride",
        "types/indexing::a_copy_takes_slices_of_stride_one",
    ),
    Refused(
        "a copy by TMA that exchanges the minor dimension",
        ("copy: transposed minor dimension",),
        "UnsupportedError",
        "the innermost dimension of a tensor map is contiguous; without "
        "`implementation=TMA` threads copy it",
        f"{COPIES}/transposed::another_minor_dimension_is_refused",
    ),
    Refused(
        "a multicast that the CTAs cannot divide into equal pieces",
        ("copy: multicast that cannot be divided",),
        "LayoutError",
        "each CTA copies a piece of whole multiples of 16 bytes, at 128 bytes of SMEM",
        "lowering/families/multicast::"
        "what_the_compiler_cannot_divide_the_emulator_refuses",
    ),
    Refused(
        "a multicast by cp.async",
        ("copy: multicast by cp.async",),
        "UnsupportedError",
        "cp.async writes the SMEM of its own CTA",
        "primitives/tma::threads_cannot_copy_a_multicast",
    ),
    Refused(
        "gathers and scatters with multicast, reduction, fill modes",
        ("copy: gather with other options",),
        "UnsupportedError",
        "a row is a copy of its own, or one of four, and has none of these forms",
        f"{COPIES}/rows::a_gather_has_no_bounds_to_fill",
    ),
    Refused(
        "a fill with NaN of integers, or by threads",
        (),
        "UnsupportedError",
        "cp.async fills with zeros alone",
        f"{COPIES}/nan_fill::threads_fill_with_zeros_alone",
    ),
    Refused(
        "reductions of other element types",
        (),
        "DTypeError",
        "PTX has no such cp.reduce.async.bulk: float32 has a sum alone",
        "lowering/families/copy_reductions::no_reduction_takes_narrow_integers",
    ),
    Refused(
        "sums of float64 that are not of adjacent bytes in bounds",
        (),
        "LayoutError",
        "tensor maps have no sum of float64; bulk copies do",
        "lowering/families/copy_reductions::"
        "float64_is_added_to_adjacent_elements_alone",
    ),
    Refused(
        "multicasts, reductions, fills with NaN of instances of vmap at odd addresses",
        (),
        "LayoutError",
        "TMA cannot address them, and threads do not do these",
        "memory/instances::what_threads_cannot_copy_is_refused",
    ),
    Refused(
        "copies to and from the SMEM of another CTA",
        ("copy: SMEM of another CTA",),
        "UnsupportedError",
        "`async_store_smem` stores and combines there; a copy from SMEM to SMEM has no "
        "name upstream either",
        "emulator/gpu/cluster_refs::a_copy_does_not_take_it",
    ),
    Refused(
        "sums of floats by async_store_smem",
        (),
        "DTypeError",
        "PTX has no red.async of floats; `atomic_add` of a `cluster_ref` adds them",
        "lowering/families/async_stores::there_are_no_sums_of_floats",
    ),
    Refused(
        "prefetches of transposed parts",
        ("context: prefetch of gathered and transposed parts",),
        "UnsupportedError",
        "the same bytes are prefetched in their own order",
        f"{COPIES}/prefetch::a_transposed_part_is_fetched_untransposed",
    ),
    Refused(
        "leader_tracked on Hopper",
        ("copy: pairs on other targets, other pairs",),
        "TargetError",
        "cta_group::2 is of tcgen05",
        "lowering/families/leader_tracked::hopper_has_no_pairs",
    ),
    Refused(
        "clusters of more than 16 CTAs",
        (),
        "ArgumentError",
        "the hardware's largest; above 8 the launch allows non-portable sizes",
        "entry/cluster::a_cluster_fits_the_target",
    ),
    Refused(
        "more than 2**20 - 1 arrivals, or bytes in flight, of a phase",
        ("scratch: counts of a barrier",),
        "BarrierError",
        "an mbarrier counts no more (PTX ISA, mbarrier)",
        "lowering/families/mbarrier/counts::a_barrier_counts_less_than_a_mebibyte",
    ),
    Refused(
        "scratch in GMEM that a warp_map declares",
        ("scratch: GMEM of single warps",),
        "UnsupportedError",
        "a launch allocates one array for each declaration; declare it around, with an "
        "axis of warps",
        "primitives/warp_scopes::a_warp_declares_no_scratch_in_gmem",
    ),
    Refused(
        "loads and stores of TMEM in warp_map",
        (),
        "UnsupportedError",
        "tcgen05.ld and tcgen05.st of a warp reach the 32 lanes of its number, a "
        'quarter of each array (PTX ISA, tcgen05.ld, "Access restrictions"); upstream '
        "refuses them, too",
        "primitives/warp::a_warp_does_not_load_or_store_tensor_memory",
    ),
    Refused(
        "a barrier that some warps wait for in warp_map, and the warpgroup outside",
        ("scratch: barriers that some warps wait for",),
        "BarrierError",
        "the parities of the warps' registers would differ",
        "lowering/families/mbarrier/warps_and_warpgroups::"
        "waits_that_warps_may_not_all_make_are_refused",
    ),
)

# The rules of upstream's launch context, primitives and scratch kinds that have no row:
# the tensor core, inline code and the profiler have rules of their own.
OBSOLETE = {
    "transforms: classes to apply to a copy": "copies are planned as a whole",
    "primitives: rules for printing and discharge": "bodies are traced over references",
    "launch: grid divisible by the cluster": "a grid counts clusters, so all divide it",
    "context: an object for inline code": "inline code: docs/porting.md",
}
# With those of the rows; a rule that comes or goes changes the number.
RULES = 95
