# SPDX-License-Identifier: Apache-2.0
"""The description of a target with which XLA compiles for it without a device."""

from __future__ import annotations

from pallas_gpu import arch

# What XLA's description of a device has and `arch.GpuTarget` does not: equal for every
# supported target. CUDA programming guide, "Technical Specifications per Compute
# Capability"; 48 KiB is the SMEM a block has without opting in.
_THREADS_PER_WARP = 32
_DEFAULT_SMEM_BYTES_PER_BLOCK = 48 * 1024
_FP32_UNITS_PER_SM = 128
_GRID_LIMITS = {"x": 2**31 - 1, "y": 65535, "z": 65535}


def target_config(target: str | arch.GpuTarget) -> str:
    """Returns XLA's GPU target config of a target, as a text proto.

    Most of the figures are for XLA's own cost model; our kernels depend only on the
    compute capability and the SMEM limits.

    Raises:
      TargetError: the target is unknown.
    """
    target = arch.target(target)
    major, minor = target.compute_capability
    limits = [f"  block_dim_limit_{axis}: {n}" for axis, n in _GRID_LIMITS.items()]
    opt_in_bytes = target.smem_bytes_per_block + arch.STATIC_SMEM_BYTES
    lines = [
        "gpu_device_info {",
        f"  threads_per_block_limit: {target.max_threads_per_block}",
        f"  threads_per_warp: {_THREADS_PER_WARP}",
        f"  threads_per_core_limit: {target.max_threads_per_sm}",
        f"  shared_memory_per_block: {_DEFAULT_SMEM_BYTES_PER_BLOCK}",
        f"  shared_memory_per_block_optin: {opt_in_bytes}",
        f"  shared_memory_per_core: {target.smem_bytes_per_sm}",
        f"  core_count: {target.sm_count}",
        f"  fpus_per_core: {_FP32_UNITS_PER_SM}",
        *limits,
        f"  memory_bandwidth: {target.memory_bytes_per_second}",
        f"  l2_cache_size: {target.l2_bytes}",
        f"  clock_rate_ghz: {target.clock_ghz}",
        f"  device_memory_size: {target.memory_bytes}",
        f"  registers_per_core_limit: {target.registers_per_sm}",
        f"  registers_per_block_limit: {target.registers_per_sm}",
        f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
        "}",
        'platform_name: "CUDA"',
        # Required by the message; our kernels do not call cuDNN.
        "dnn_version_info { major: 9 minor: 0 patch: 0 }",
        f'device_description_str: "{target.card}"',
    ]
    return "\n".join(lines) + "\n"
