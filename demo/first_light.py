# SPDX-License-Identifier: Apache-2.0
"""Four kernels in the emulator, compiled offline, and on a GPU.

Each kernel is compiled under both semantics: with layouts chosen by the user (Lane),
and with inferred layouts (Warpgroup).

The last one is for Blackwell, the others are for Hopper.

`make demo` runs it. Parts that cannot run on this machine are skipped with the reason;
the exit status is 1 if a check fails.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Linux's driver, and WSL's. Without either JAX should not try its CUDA plugin, which
# the extra `offline` installs without cuDNN: that would print a long traceback.
_GPU_DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
if not any(Path(file).exists() for file in _GPU_DEVICE_FILES):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402 - after JAX_PLATFORMS, which it reads once
import numpy as np  # noqa: E402

import pallas_gpu as plgpu  # noqa: E402
from demo.kernels import Job, scale_and_add_job, shifted_exp_job  # noqa: E402
from demo.matmul import blackwell_matmul_job, matmul_job  # noqa: E402

# The families of PTX instructions that show how a kernel moves data and computes.
FAMILIES = (
    "wgmma",
    "tcgen05.mma",
    "tcgen05.commit",
    "tcgen05.ld",
    "cp.async.bulk.tensor",
    "mbarrier",
    "fence.proxy",
    "bar",
    "barrier.cluster",
    "setmaxnreg",
    "ldmatrix",
    "stmatrix",
    "ld.shared",
    "st.shared",
    "ld.global",
    "st.global",
    "add",
    "mul",
    "fma",
    "ex2",
    "max",
    "shfl",
)


def main() -> int:
    """Runs every part that this machine can run; returns the exit status."""
    started = time.perf_counter()
    print(
        f"pallas_gpu {plgpu.__version__}, jax {jax.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}\n"
    )
    gpu, no_gpu = find_gpu()
    offline_note = ""
    failed = 0
    jobs = scale_and_add_job(), shifted_exp_job(), matmul_job(), blackwell_matmul_job()
    for job in jobs:
        print(f"{job.name}: {job.what}\n  {signature(job)}")
        failed += not attempt("emulator", functools.partial(run, job))
        for semantics in plgpu.LoweringSemantics:
            compiled = functools.partial(compile_offline, job, semantics)
            try:
                failed += not attempt(semantics.name, compiled)
            except plgpu.errors.OfflineUnavailableError as error:
                offline_note = str(error)
                say(semantics.name, "offline compilation skipped, see below")
            if runs_on(gpu, job):
                on_gpu = functools.partial(run, job, gpu, semantics)
                failed += not attempt("", on_gpu)
        if not runs_on(gpu, job):
            other = f"the kernel is for {job.target}"
            say("GPU", f"skipped: {no_gpu if gpu is None else other}")
        print()
    if offline_note:
        print(f"offline compilation was skipped: {offline_note}\n")
    verdict = f"checks FAILED: {failed}," if failed else "all checks passed"
    print(f"{verdict} in {time.perf_counter() - started:.1f} s")
    return 1 if failed else 0


def find_gpu() -> tuple[jax.Device | None, str]:
    """Returns JAX's first GPU, or None and the reason why kernels cannot run."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return None, "JAX has no CUDA device"
    major, minor = map(int, device.compute_capability.split("."))
    try:
        plgpu.arch.target_of_capability(major, minor)
    except plgpu.errors.TargetError as error:
        return None, f"{device.device_kind}: {error}"
    return device, ""


def runs_on(gpu: jax.Device | None, job: Job) -> bool:
    """Whether there is a GPU of the job's target."""
    if gpu is None:
        return False
    major, minor = map(int, gpu.compute_capability.split("."))
    return plgpu.arch.target_of_capability(major, minor).name == job.target


def signature(job: Job) -> str:
    """Types of arguments and result, e.g. `float32[8, 4] -> float32[8, 4]`."""
    out = jax.eval_shape(job.jitted(), *job.arguments)
    inputs = ", ".join(type_of(x) for x in job.arguments)
    return f"{inputs} -> {type_of(out)}"


def type_of(x: np.ndarray | jax.ShapeDtypeStruct) -> str:
    return f"{x.dtype}{list(x.shape)}"


def attempt(label: str, part: Callable[[], Sequence[str]]) -> bool:
    """Prints the output of a part; a part that raises has failed."""
    try:
        lines = part()
    except plgpu.errors.OfflineUnavailableError:
        raise
    except Exception as error:
        # The demo continues: the output of other parts helps to find the cause.
        say(label, f"FAILED: {type(error).__name__}: {error}")
        return False
    say(label, *lines)
    return True


def say(label: str, *lines: str) -> None:
    """Prints lines after a label."""
    for line in "\n".join(lines).splitlines():
        print(f"  {label:<9} {line}")
        label = ""


def run(
    job: Job, device: jax.Device | None = None, semantics: Any = None
) -> Sequence[str]:
    """Runs a job under jax.jit, on a GPU or, without one, in the emulator.

    Its error must not exceed the tolerance for rounding.
    """
    with jax.default_device(device):
        result = job.jitted(device is None, semantics)(*job.arguments)
    if device is not None and result.device != device:
        raise AssertionError(f"it ran on {result.device}, not on {device}")
    error = job.error(result)
    # In this form, NaN fails.
    if not error <= job.tolerance:
        raise AssertionError(f"max error {error:.2e}, {job.tolerance:.2e} allowed")
    where = "" if device is None else f"{device.device_kind}: "
    return [
        f"{where}max error {error:.2e} against NumPy in float64, "
        f"{job.tolerance:.2e} allowed"
    ]


def compile_offline(job: Job, semantics: Any) -> Sequence[str]:
    """Compiles a job offline under given semantics and summarizes the result."""
    function = job.jitted(semantics=semantics)
    (report,) = plgpu.offline.compile(function, *job.arguments, target=job.target)
    counts = report.instruction_counts
    used = report.resources
    if not counts.get("cp.async.bulk.tensor"):
        raise AssertionError("the PTX has no TMA copy (cp.async.bulk.tensor)")
    if used.spill_store_bytes or used.spill_load_bytes:
        raise AssertionError(f"registers spill:\n{used}")
    shown = [f"{name} {counts[name]}" for name in FAMILIES if name in counts]
    sass = f", {len(report.sass.splitlines())} lines of SASS" if report.sass else ""
    return [
        f"{job.target}: {sum(counts.values())} PTX instructions{sass}, among them",
        *("  " + ", ".join(batch) for batch in itertools.batched(shown, 5)),
        f"registers {used.registers_per_thread} of {used.register_limit} per thread, "
        "spills none",
        f"SMEM {used.smem_bytes} of {used.smem_limit_bytes} bytes per block, "
        f"mbarriers {used.num_barriers}, blocks per SM {used.occupancy_blocks_per_sm}",
        *([f"TMEM columns {used.tmem_columns} of 512"] if used.tmem_columns else []),
        *([report.note] if report.note else []),
    ]


if __name__ == "__main__":
    sys.exit(main())
