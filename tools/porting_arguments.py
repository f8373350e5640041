# SPDX-License-Identifier: Apache-2.0
"""Where names in common with upstream's Pallas differ in their arguments, and why.

A test compares the signatures with the installed ones: each difference has a reason
here, and each reason is of a difference.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Change(enum.Enum):
    """How an argument differs."""

    NOT_TAKEN = "not taken"
    NEW = "new"
    DEFAULT = "another default"


Reasons = Mapping[str, tuple[Change, str]]


def _not_taken(reason: str, *names: str) -> Reasons:
    return dict.fromkeys(names, (Change.NOT_TAKEN, reason))


def _new(reason: str, *names: str) -> Reasons:
    return dict.fromkeys(names, (Change.NEW, reason))


def _default(reason: str, *names: str) -> Reasons:
    return dict.fromkeys(names, (Change.DEFAULT, reason))


_TMEM_ALONE = _not_taken(
    "of `TMEM`; upstream refuses it, too", "packed", "collective", "layout"
)
_SMEM_ALONE = _not_taken("of `SMEM`, which alone is tiled and swizzled", "transforms")
_INITIAL = {
    **_new("what scratch contains at the start of each launch", "init"),
    **_new("scratch that keeps what a launch has left in it", "kept"),
}
_ORDERED = _new("the memory order and the scope of PTX's `atom`", "sem", "scope")
_NEWER = "upstream's since jax 0.12"
_ATOMIC = {
    **_new("no access where the mask is False", "mask"),
    **_ORDERED,
    **_new(_NEWER, "optimized"),
}
_EMULATOR = _default(
    "`plgpu.InterpretParams()`, whose fields differ, see `InterpretGPUParams`", "params"
)
_BARRIER = _new(
    "the first wait passes: buffers of a pipeline are free at the start",
    "initially_complete",
)
_HINTED = _new(
    "how long the L2 keeps what is copied (`createpolicy`)",
    "cache_hint",
)
_MULTICAST_PREFETCH = _new(
    "the axis along which the CTAs of a cluster share out the copy", "partitioned_axis"
)
_CHOSEN = _default(
    "None: conflicts of banks are a `PerformanceWarning`; True refuses them, as "
    "upstream does",
    "optimized",
)

ARGUMENTS: dict[str, Reasons] = {
    # Entry points
    "kernel": {
        **_not_taken("a catch-all for fields of `Mesh`", "mesh_kwargs"),
        **_new("older upstreams call it so", "out_shape", "scratch_shapes"),
        **_new("a `Mesh` or a `WarpMesh` in place of its fields", "mesh"),
        **_new("upstream takes it through its catch-all", "kernel_name"),
        **_new("as of `pallas_call`", "name", "cost_estimate", "metadata"),
    },
    "pallas_call": {
        **_new("several warpgroups run the body", "num_threads", "thread_name"),
        **_default(
            "None: the emulator on a CPU, the GPU on CUDA",
            "interpret",
        ),
    },
    "CompilerParams": {
        **_new("waits are spans of a profiled kernel, too", "profile_waits"),
        **_new(
            "tiles of a `pallas_call` that a CTA visits, in this order",
            "persistent",
            "strip",
        ),
        **_new("loads of loops with products are copies ahead", "num_stages"),
        **_new("for arrays in symmetric memory", "is_multi_process"),
        **_new("compiles for another GPU than the attached one", "target"),
        **_new("blocks stay in GMEM, as Triton's do", "block_memory_space"),
        **_new("keeps source lines in PTX and SASS", "line_info"),
        **_new("compiles `debug_check`; a flag of JAX upstream", "debug_checks"),
        **_new("of `as_gpu_kernel` upstream", "ir_version"),
        **_default(
            "None: as much as the largest reduction takes", "reduction_scratch_bytes"
        ),
    },
    "InterpretGPUParams": {
        **_new(
            "the schedules that are tried",
            "seed",
            "schedules",
            "asynchrony",
        ),
        **_new("runs the code that a kernel is lowered to", "emitted"),
        **_new("ends loops that never end", "max_steps"),
        **_new("accepts results that are not stored as a whole", "partial_results"),
        **_new("accepts what upstream does, see docs/differences.md", "like_upstream"),
        **_new(_NEWER, "on_race"),
        **_default("True: races are reported", "detect_races"),
    },
    "as_torch_kernel": _new(
        "arguments that the function takes as a `jax.Ref`", "inout_argnums"
    ),
    "force_gpu_interpret_mode": _EMULATOR,
    "set_gpu_interpret_mode": _EMULATOR,
    # Declarations
    "BlockSpec": _default(
        "None: zeros, and the emulator reports blocks entirely outside", "oob_fill_mode"
    ),
    "Barrier": _BARRIER,
    "ClusterBarrier": {
        **_BARRIER,
        **_default("`()`, the CTA alone; required upstream", "collective_axes"),
    },
    "ANY": _INITIAL,
    "GMEM": {**_TMEM_ALONE, **_SMEM_ALONE, **_INITIAL},
    "SMEM": _TMEM_ALONE,
    "REGS": {**_TMEM_ALONE, **_SMEM_ALONE},
    "TMEM": _SMEM_ALONE,
    "dynamic_scheduling_loop": _new("loops of roles with their registers", "roles"),
    "loop": _new("loads are copies ahead, as of Triton's `tl.range`", "num_stages"),
    "semaphore_signal": _new("as of `pl.semaphore_signal`", "device_id_type"),
    "SemaphoreSignal": _default("None, this device; required upstream", "device_id"),
    # Copies and barriers
    "copy_gmem_to_smem": {
        **_HINTED,
        **_new("TMA or cp.async", "implementation"),
        **_MULTICAST_PREFETCH,
    },
    "copy_smem_to_gmem": _HINTED,
    "async_prefetch": _MULTICAST_PREFETCH,
    "enable_debug_checks": _default(
        "required, as upstream without a default", "new_val"
    ),
    "async_store_smem": {
        **_default("a hint: bank conflicts are never refused here", "optimized"),
        **_new("the memory order of the arrival", "sem"),
    },
    "barrier_arrive": _new("arrivals at once", "num_arrivals"),
    "tcgen05_commit_arrive": _new(_NEWER, "predicate"),
    "inline_mgpu": _new("what the code does, in NumPy, for the emulator", "emulate"),
    # Registers
    "load": {
        **_CHOSEN,
        **_new("no access where the mask is False, `other` there", "mask", "other"),
    },
    **dict.fromkeys(
        (f"atomic_{name}" for name in ("add", "and", "max", "min", "or", "xor")),
        _ATOMIC,
    ),
}
