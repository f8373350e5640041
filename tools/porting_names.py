# SPDX-License-Identifier: Apache-2.0
"""What becomes of each public name of upstream's Pallas, for docs/porting.md.

`PLGPU` has the names of jax.experimental.pallas.mosaic_gpu, `PL` those of
jax.experimental.pallas, `TRITON` those of its module triton, of both ends of the
supported range of jax. A name that this package gets has its row changed: the tests
compare the rows with both packages.
"""

from __future__ import annotations

import dataclasses
import enum


class Status(enum.Enum):
    """What becomes of a name."""

    SAME = "the same"
    DIFFERS = "the same, with differences"
    OTHER = "spelled differently"
    LATER = "comes later"
    NO = "not for this machine"


@dataclasses.dataclass(frozen=True)
class Row:
    """A name of upstream's.

    Attributes:
      status: what becomes of it.
      ours: what to write instead, if it is spelled differently.
      note: the differences, or the reason.
    """

    status: Status
    ours: str = ""
    note: str = ""


SAME = Row(Status.SAME)


def differs(note: str) -> Row:
    """A name of both packages that does not do the same in all cases."""
    return Row(Status.DIFFERS, note=note)


def other(ours: str, note: str = "") -> Row:
    """A name whose meaning this package spells in another way."""
    return Row(Status.OTHER, ours, note)


def later(reason: str) -> Row:
    """A name that this package does not have yet."""
    return Row(Status.LATER, note=reason)


def no(reason: str) -> Row:
    """A name that has no meaning here."""
    return Row(Status.NO, note=reason)


SEMAPHORES = differs("the emulator reports a semaphore that is not zero at the end")
ATOMICS = differs(
    "takes masks and parts that index arrays select; returns the old elements"
)
REDUCTIONS = differs("take `keepdims`, too; `accumulator_ilp` is a hint")

PLGPU: dict[str, Row] = {
    # Entry points and control flow
    "kernel": differs(
        "`out_type` is required, `()` for no results; takes `mesh=` and `out_shape`, "
        "too; a body that returns a value is an error; at most 8 warpgroups, as the "
        "hardware has"
    ),
    "Mesh": differs(
        "at most 8 warpgroups and 2^31 - 1 CTAs; `grid=(0,)` is a no-op; names are "
        "strings or tuples of them"
    ),
    "WarpMesh": differs(
        "the `mesh` of `plgpu.kernel`, with scratch of each warp; `core_map` "
        "is not there"
    ),
    "warp_map": differs(
        "a barrier that only some warps wait for is not waited for by the warpgroup; "
        "arrays from outside travel through SMEM"
    ),
    "nd_loop": SAME,
    "NDLoopInfo": SAME,
    "planar_snake": SAME,
    "dynamic_scheduling_loop": differs("an atomic counter on Hopper"),
    "emit_pipeline": differs("an empty grid is a no-op"),
    "emit_pipeline_warp_specialized": differs(
        "outputs may be shared by steps, and written by several warpgroups"
    ),
    "PipelinePipeline": SAME,
    "as_torch_kernel": differs(
        "any number of kernels, and simple operations around them; torch's current "
        "stream; derivatives; tensors on a CPU, see torch.md"
    ),
    "force_gpu_interpret_mode": SAME,
    "set_gpu_interpret_mode": SAME,
    # Copies
    "copy_gmem_to_smem": differs(
        "without a barrier cp.async carries it, also on Hopper, and `implementation` "
        "chooses; a copy entirely outside of the array is an error of the emulator "
        "unless `oob_mode` is given; both sides may be reshaped and bitcast: upstream "
        "refuses that of GMEM, and of a tiled dimension in SMEM"
    ),
    "copy_smem_to_gmem": differs(
        "`reduction_op` adds float64, too; reshapes as in `copy_gmem_to_smem`"
    ),
    "commit_smem": SAME,
    "commit_smem_to_gmem_group": SAME,
    "wait_smem_to_gmem": SAME,
    "wait_gmem_to_smem": SAME,
    "async_prefetch": SAME,
    "im2col_ref": differs(
        "also on jax 0.11 and under Warpgroup; takes reshaped references"
    ),
    "async_store_smem": differs(
        "arrives once; any tiling and number of cluster axes; no sums of floats"
    ),
    "cluster_ref": differs(
        "any number of cluster axes; takes masks, parts and views as any reference, "
        "and barriers to arrive on"
    ),
    "CopyPartition": SAME,
    "OOBFillMode": differs("has `NAN`, too"),
    # Barriers
    "Barrier": differs("`orders_tensor_core` needs a target with tcgen05"),
    "ClusterBarrier": differs("as `Barrier`"),
    "barrier_arrive": differs("takes `num_arrivals`, too"),
    "barrier_wait": SAME,
    "barrier_test": SAME,
    "barrier_arrive_and_wait": SAME,
    # Registers
    "load": differs("takes an index and a mask, too"),
    "store": differs("takes an index before the value, and a mask, too"),
    **dict.fromkeys(("max", "min", "prod", "sum"), REDUCTIONS),
    "layout_cast": SAME,
    "broadcasted_iota": SAME,
    "set_max_registers": differs("24 to 256, as the hardware has"),
    "print_layout": SAME,
    "Layout": SAME,
    "Tiling": SAME,
    "Replicated": SAME,
    # Tensor cores
    "wgmma": differs("operands may be bitcast, and `a` reshaped under Lane, too"),
    "wgmma_wait": SAME,
    "wgmma_accumulator_load": SAME,
    "ACC": differs("its initial value is given by `ACC.init`"),
    "WGMMAAccumulatorRef": differs("as `ACC`"),
    "mma": SAME,
    # Memory
    "MemorySpace": SAME,
    "GMEM": differs("also declares scratch, of the whole launch"),
    "SMEM": SAME,
    "REGS": SAME,
    "TMEM": SAME,
    "RefUnion": SAME,
    "TMEMLayout": differs("is `plgpu.layouts.TmemLayout`, which can be drawn"),
    "Transform": differs("tilings and swizzles only"),
    "TilingTransform": SAME,
    "SwizzleTransform": SAME,
    "find_swizzle": SAME,
    "transpose_ref": differs("not deprecated; `ref.transpose(...)` is the same"),
    "BlockSpec": differs("`pipeline_mode` is refused, as it is upstream"),
    # Parameters
    "CompilerParams": differs(
        "`target`, `line_info` and `debug_checks` are new; `dimension_semantics` is "
        "for `pallas_call`"
    ),
    "LoweringSemantics": SAME,
    "InterpretGPUParams": differs(
        "races are looked for by default; `like_upstream` accepts what upstream's "
        "interpreter does; `skip_floating_point_ops` and `on_race=\"warn\"` are refused"
    ),
    "TraceScope": SAME,
    # Atomics
    **dict.fromkeys(
        (
            "atomic_add", "atomic_and", "atomic_max", "atomic_min", "atomic_or",
            "atomic_xor",
        ),
        ATOMICS,
    ),
    # Blackwell
    "async_load_tmem": differs(
        "`reduce` is computed in registers; also whole arrays with leading dimensions, "
        "which upstream stores, and loads one matrix at a time"
    ),
    "async_store_tmem": SAME,
    "commit_tmem": SAME,
    "tcgen05_commit_arrive": SAME,
    "tcgen05_mma": differs(
        "accumulators of several tiles of rows; sparse operands of float32, and of 64 "
        "rows"
    ),
    "async_copy_scales_to_tmem": SAME,
    "async_copy_smem_to_tmem": SAME,
    "async_copy_sparse_metadata_to_tmem": SAME,
    "format_tcgen05_sparse_metadata": differs("also of 64 rows"),
    "wait_load_tmem": SAME,
    "TryClusterCancelResult": SAME,
    "query_cluster_cancel": differs(
        "the positions are undefined, and an error of the emulator, without work"
    ),
    "try_cluster_cancel": differs(
        "`collective_axes` names all axes of a cluster; under `vmap` it takes no work"
    ),
    # Several devices and launches
    **dict.fromkeys(
        (
            "multicast_ref", "multimem_load_reduce", "multimem_store",
            "semaphore_signal_multicast",
        ),
        SAME,
    ),
    "PeerMemRef": differs("`remote_ref` makes it, always of a logical id"),
    "remote_ref": differs(
        "TMA reaches a device of any id: one that changes in a loop, too"
    ),
    **dict.fromkeys(
        (
            "SemaphoreSignal", "semaphore_signal", "semaphore_signal_parallel",
            "semaphore_wait",
        ),
        SEMAPHORES,
    ),
    "SemaphoreType": SAME,
    "alloc_semaphore": differs("references of int32"),
    "griddepcontrol_launch_dependents": SAME,
    "griddepcontrol_wait": differs(
        "the emulator reports accesses to GMEM before it, also to arguments"
    ),
    # Inline code
    "RefType": SAME,
    "ShapeDtypeStruct": SAME,
    "inline_mgpu": differs(
        "the handles are those of `pallas_gpu.mosaic`; takes barriers, TMEM, scalars "
        "of the kernel that it captures, and `emulate`; runs on a CPU, see "
        "[inline.md](inline.md)"
    ),
}  # fmt: skip

PL: dict[str, Row] = {
    # Entry points
    "pallas_call": differs(
        'a parallel axis is an axis of the launch, an "arbitrary" one a pipelined loop '
        'in each CTA; an output\'s index map may leave out "arbitrary" axes only'
    ),
    "kernel": differs(
        "as `kernel` of the table above; one body and one mesh: on GPUs upstream "
        "refuses more"
    ),
    "BlockSpec": differs("as `BlockSpec` of the table above, whose fields it has"),
    "GridSpec": SAME,
    "no_block_spec": differs(
        "in GMEM if the grid has a parallel axis, or if argument and result are one "
        "array, else in SMEM; also the specs that `pallas_call` is not given"
    ),
    "BlockDim": SAME,
    "Blocked": SAME,
    "Element": SAME,
    "BoundedSlice": differs("of arguments; the body's reference has the full size"),
    "Squeezed": SAME,
    "squeezed": SAME,
    "Indirect": no(
        "upstream has no GPU lowering; index a reference in GMEM by an array"
    ),
    "Buffered": other(
        "`plgpu.CompilerParams(max_concurrent_steps=2)`, or the argument of "
        "`plgpu.emit_pipeline`",
        "one number for all blocks; upstream refuses `pipeline_mode` on GPUs",
    ),
    "RevisitMode": no("outputs always stay in SMEM until their block changes"),
    "CompilerParams": differs("as `CompilerParams` of the table above"),
    "CostEstimate": differs("a hint that this compiler does not use"),
    "estimate_cost": differs("XLA's counts of operations, also in loops and calls"),
    "pallas_call_p": no("a primitive of upstream's; ours are not public"),
    "lower_as_mlir": differs("for CUDA; shapes are static, and `device` is None"),
    "pallas_export_experimental": differs("shapes are static"),
    "mosaic_gpu": other("`import pallas_gpu as plgpu`"),
    # Control flow and positions
    "when": SAME,
    "loop": SAME,
    "program_id": SAME,
    "num_programs": SAME,
    "run_scoped": differs("inside `warp_map`, each warp of the block has its own"),
    "with_scoped": SAME,
    "run_state": differs(
        "in a kernel, of accumulators; outside, of arrays; a function that returns a "
        "value is an error here, upstream fails on it"
    ),
    "get_global": differs("of semaphores, and of arrays: `plgpu.GMEM(shape, dtype)`"),
    "delay": differs("at most 1 ms, as the hardware"),
    "select_ref": no("upstream has no GPU lowering; write `plgpu.when` for each case"),
    # Indices and integers
    "ds": differs("references take strides, too, which upstream refuses"),
    "dslice": differs("as `ds`"),
    "Slice": SAME,
    "cdiv": differs("rounds up for negative numbers, too"),
    "align_to": SAME,
    "next_power_of_2": SAME,
    "strides_from_shape": SAME,
    "multiple_of": differs("the emulator checks the promise"),
    "broadcast_to": other("`jax.numpy.broadcast_to`", "upstream has no GPU lowering"),
    # Memory
    "MemoryRef": differs("a function that declares; not a class"),
    "MemorySpace": differs(
        "that of the table above; `ANY` is another name of `GMEM`, `DEFAULT` of "
        "`SMEM`"
    ),
    "ANY": differs("another name of `plgpu.GMEM`"),
    "HOST": no("kernels do not access the host's memory; upstream refuses it, too"),
    "empty": SAME,
    "empty_like": SAME,
    "empty_ref_like": differs("references in GMEM, outside kernels"),
    # Semaphores
    **dict.fromkeys(
        ("semaphore_read", "semaphore_signal", "semaphore_wait"), SEMAPHORES
    ),
    "DeviceIdType": SAME,
    "semaphore": no(
        "a class of element types, of which upstream makes no array either; declare a "
        "`plgpu.SemaphoreType`"
    ),
    # Debugging
    "debug_print": differs(
        "formats such as `{:.2f}`; scalars, arrays of one shape and references in TMEM "
        "in a line; the emulator prints the same text"
    ),
    "debug_check": differs("the emulator always checks"),
    "enable_debug_checks": differs("a function; JAX's flag counts, too"),
    "enable_poison_buffers": no(
        "the emulator always fills fresh memory with poison: "
        "`plgpu.InterpretParams(uninitialized_memory=\"zero\")` turns it off"
    ),
}  # fmt: skip

# Names that older versions of upstream had.
_GPU_INFO = other("`plgpu.arch.target`", "the limits of a GPU by its name")
_UNUSED = "%s: hints that this compiler does not use"

TRITON: dict[str, Row] = {
    "CompilerParams": differs(
        "blocks stay in GMEM; `num_warps`: a hint that this compiler does not use"
    ),
    "load": differs(
        _UNUSED % "`cache_modifier`, `eviction_policy`" + "; `volatile` is refused"
    ),
    "store": differs(_UNUSED % "`eviction_policy`"),
    "dot": SAME,
    **dict.fromkeys(
        (
            "atomic_add", "atomic_and", "atomic_cas", "atomic_max", "atomic_min",
            "atomic_or", "atomic_xchg", "atomic_xor",
        ),
        differs("also of bfloat16 where PTX has it; `atomic_cas` of arrays"),
    ),
    "approx_tanh": differs("`jnp.tanh`; not of float64"),
    "max_contiguous": differs("adjacent elements are found in the index itself"),
    "debug_barrier": differs(
        "does nothing: a warpgroup synchronizes where operations exchange elements"
    ),
    "elementwise_inline_asm": differs(
        "`plgpu.inline_ptx`: constraints follow from the element types"
    ),
    "CUSTOM_CALL_TARGET_NAME": no("of upstream's Triton compiler"),
    **dict.fromkeys(
        (
            "GpuInfo", "GpuVersion", "get_gpu_info", "get_gpu_info_from_version",
            "is_gpu_device",
        ),
        _GPU_INFO,
    ),
}  # fmt: skip

OLDER: dict[str, Row] = {
    "pl.core_map(mesh)(body)": other("`plgpu.kernel(body, out_type=(), mesh=mesh)()`"),
    "pl.load(ref, idx), pl.store(ref, idx, x)": other(
        "`plgpu.load(ref, idx)`, `plgpu.store(ref, idx, x)`, also with `mask=`"
    ),
    "plgpu.wgmma_accumulator_deref(acc)": SAME,
    "plgpu.transpose_ref(ref, permutation)": SAME,
    "plgpu.kernel(body, out_shape, scratch_shapes=...)": SAME,
    "plgpu.Barrier(num_barriers=1), without index": SAME,
    "plgpu.load(ref, idx)": SAME,
}

# Names that one end of the supported range does not have.
ONLY_IN_0_11 = {"DeviceIdType"}
ONLY_IN_0_12 = {
    "alloc_semaphore", "barrier_arrive_and_wait", "im2col_ref", "max", "min", "prod",
    "store", "sum",
}  # fmt: skip
