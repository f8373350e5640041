# SPDX-License-Identifier: Apache-2.0
"""What becomes of each name of upstream's Mosaic GPU, for docs/porting.md.

`MOSAIC` has the names of jax.experimental.mosaic.gpu, `TCGEN05` those of its module.
The tests compare them with jax 0.11.
"""

from __future__ import annotations

from tools.porting_names import SAME, Row, differs, no, other

_DIALECT = no("the dialect of another compiler: bodies of both semantics emit MLIR")
MOSAIC: dict[str, Row] = {
    **dict.fromkeys(
        (
            *("Barrier", "ClusterBarrier", "TMABarrier", "TMEM", "TMAReductionOp"),
            *("ShapeDtypeStruct", "AsyncCopyImplementation", "CopyPartition"),
            *("LoweringSemantics", "GLOBAL_BROADCAST", "CollectiveBarrierRef"),
            *("TCGEN05_COL_LAYOUT", "TCGEN05_LAYOUT", "TCGEN05_ROW_LAYOUT"),
            *("TCGEN05_TRANSPOSED_LAYOUT", "TMA_INDICES_4_LAYOUT"),
            *("TMA_INDICES_LAYOUT", "TMEM_NATIVE_LAYOUT", "WGMMA_COL_LAYOUT"),
            *("WGMMA_LAYOUT", "WGMMA_LAYOUT_8BIT", "WGMMA_LAYOUT_UPCAST_2X"),
            *("WGMMA_LAYOUT_UPCAST_4X", "WGMMA_ROW_LAYOUT", "WGMMA_TRANSPOSED_LAYOUT"),
            *("tmem_native_layout", "DynamicSlice", "Partition", "Partition1D"),
            *("ThreadSubset", "bitwidth", "bytewidth", "c", "commit_shared", "ds"),
            *("debug_print", "fori", "memref_fold", "memref_slice", "memref_reshape"),
            *("memref_transpose", "memref_unfold", "memref_unsqueeze", "nanosleep"),
            *("query_cluster_cancel", "try_cluster_cancel", "single_thread"),
            *("single_thread_predicate", "thread_idx", "tile_shape", "warp_idx"),
            *(
                "warpgroup_barrier",
                "warpgroup_idx",
                "when",
                "copy_tiled",
                "concatenate",
            ),
            *("optimization_barrier", "MMALayouts", "mma"),
        ),
        SAME,
    ),
    "as_gpu_kernel": differs(
        "the body is called when the kernel is lowered; runs on a CPU; Lane semantics "
        "alone; see [mosaic.md](mosaic.md)"
    ),
    "Union": differs("arrays in SMEM share memory, barriers and TMEM do not"),
    "OOBFillMode": differs("also `NAN`"),
    "FragmentedArray": differs(
        "more operations keep a layout (`reshape`, slices, reductions of any axes), "
        "padding of layouts included; `to_layout` finds every way between lanes of a "
        "warp; `reduce` takes names, not functions; `astype` rounds to nearest; "
        "`store_tiled_async` and the generators `transfer_*` "
        "are not there"
    ),
    "FragmentedLayout": differs(
        "also a `LinearLayout`, which operations leave that no tiles describe"
    ),
    "TiledLayout": differs(
        "`plgpu.layouts.TiledLayout`: in any notation, and without the methods that "
        "emit code (`thread_idxs`, `lane_indices`): `FragmentedArray.foreach` has the "
        "indices"
    ),
    "WGSplatFragLayout": differs("`plgpu.layouts.WGSplatLayout`, see `TiledLayout`"),
    "WGStridedFragLayout": differs(
        "`plgpu.layouts.WGStridedLayout`, see `TiledLayout`"
    ),
    "Rounding": differs("`astype` takes the usual one of a type"),
    "LaunchContext": differs(
        "references and slices may be computed in the kernel: a copy finds the "
        "parameter that they are parts of; copies that need several instructions are "
        "split; also `cluster_idx`; without other devices"
    ),
    "MemRefTransform": differs("a function of shapes; it emits nothing"),
    "TileTransform": differs("rounds down only; see `MemRefTransform`"),
    "TransposeTransform": differs("see `MemRefTransform`"),
    "BarrierRef": differs("`at(address, n)` makes one of an address"),
    "SemaphoreRef": differs("without `signal_multimem`"),
    "WGMMAAccumulator": differs(
        "reads of `value` stay behind the wait before them; a product fences its "
        "accumulator itself"
    ),
    "wgmma": differs(
        "a, too, may be transposed in SMEM; N is any number that instructions divide; "
        "tiles of more than 8 rows may be several along K"
    ),
    "get_cluster_ref": differs(
        "the reference is one to the SMEM of the cluster, `generic` or not"
    ),
    "is_known_divisible": differs("looks through any number of operations"),
    "tcgen05": differs("see below"),
    "as_torch_gpu_kernel": differs(
        "`plgpu.as_torch_kernel(as_gpu_kernel(...))`: on torch's current stream; "
        "also of CPU tensors; without `prof_spec`; see [torch.md](torch.md)"
    ),
    "is_nvshmem_available": no(
        "XLA tells kernels the addresses of other devices' memory"
    ),
    "MultimemReductionOp": SAME,
    "DialectBarrierRef": other("`mosaic.BarrierRef`", "for both semantics"),
    **dict.fromkeys(
        ("dialect", "infer_layout", "lower_mgpu_dialect", "to_layout_attr"), _DIALECT
    ),
}

TCGEN05: dict[str, Row] = {
    **dict.fromkeys(
        (
            *("mma", "commit_arrive", "tmem_alloc", "tmem_dealloc"),
            *("tmem_relinquish_alloc_permit", "tmem_alloc_exact_ncols"),
            *("tmem_default_layout", "tmem_half_lane_layout", "scales_layout"),
            *("tmem_m64_collective_layout", "b_scales_m64_collective_layout"),
            *("fa_m64_collective_layout", "sparse_meta_layout", "commit_tmem"),
            *("wait_load_tmem", "async_copy_scales_smem_to_tmem"),
            *("async_copy_sparse_metadata_smem_to_tmem", "async_copy_smem_to_tmem"),
        ),
        SAME,
    ),
    "TMEMLayout": differs("`plgpu.layouts.TmemLayout`, which names its kind"),
    "TMEMRef": differs("`load` finds every layout that an instruction leaves"),
    **dict.fromkeys(
        (
            "create_instr_descriptor",
            "create_scaled_f4_instr_descriptor",
            "create_scaled_f8f6f4_instr_descriptor",
            "sparse_group_elems",
        ),
        no("a part of `mma`"),
    ),
}
