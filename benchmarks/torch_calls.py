# SPDX-License-Identifier: Apache-2.0
"""Host time of a call from PyTorch, beside those of torch and of Triton.

    python -m benchmarks.torch_calls

Prints microseconds between the start of a call and that of the next one, the GPU idle
in between, and how many of them are beyond a launch with everything prepared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

import pallas_gpu as plgpu

N = 1024
VECTOR = jax.ShapeDtypeStruct((N,), jnp.float32)
CALLS, ROUNDS = 200, 25


@plgpu.kernel(out_type=VECTOR)
def _add(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


@plgpu.kernel(
    out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
    scratch_types=[plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()],
)
def _copy(x_ref, o_ref, smem, barrier):
    plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
    plgpu.barrier_wait(barrier)
    plgpu.copy_smem_to_gmem(smem, o_ref)
    plgpu.wait_smem_to_gmem(0)


def host_time(call: Callable[[], Any]) -> float:
    """Returns the microseconds that a call takes on the host."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times)


def _bare(kernel: Any, *args: torch.Tensor) -> Callable[[], None]:
    """A launch whose table of addresses is there already."""
    import ctypes

    from pallas_gpu.bridge.torch.run import current_stream

    results = kernel(*args)
    ((program, _),) = kernel._entries.values()
    (code,) = program.codes
    buffers = [*args, results]
    table = (ctypes.c_uint64 * len(buffers))(*[x.data_ptr() for x in buffers])
    stream = current_stream(args[0].device.index)
    return lambda: code(stream, table)


def _triton(x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    import triton
    import triton.language as tl

    @triton.jit
    def add(x_ptr, y_ptr, o_ptr, size: tl.constexpr):
        i = tl.arange(0, size)
        tl.store(o_ptr + i, tl.load(x_ptr + i) + tl.load(y_ptr + i))

    def call():
        out = torch.empty_like(x)
        add[(1,)](x, y, out, size=N)
        return out

    return call


def _upstream(x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    from jax.experimental.pallas import mosaic_gpu as upstream

    @upstream.kernel(out_type=VECTOR)
    def add(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    kernel = upstream.as_torch_kernel(add)
    return lambda: kernel(x, y)


def main() -> None:
    """Measures every row and prints the table."""
    x, y = (torch.rand(N, device="cuda") for _ in range(2))
    square = torch.rand(64, 64, device="cuda")
    ours, copy = plgpu.as_torch_kernel(_add), plgpu.as_torch_kernel(_copy)
    twice = plgpu.as_torch_kernel(lambda x, y: _add(_add(x, y), y))
    op = plgpu.as_torch_kernel(_add).custom_op("pallas_gpu_bench::add", x, y)
    softmax = plgpu.as_torch_kernel(plgpu.ops.softmax)
    wanted = square.clone().requires_grad_()
    bare = _bare(ours, x, y)
    rows: dict[str, Callable[[], Any]] = {
        "a bare launch": lambda: bare,
        "as_torch_kernel, x + y": lambda: lambda: ours(x, y),
        "as_torch_kernel, two kernels": lambda: lambda: twice(x, y),
        "custom_op, x + y": lambda: lambda: op(x, y),
        "a bare launch, two TMA descriptors": lambda: _bare(copy, square),
        "as_torch_kernel, two TMA descriptors": lambda: lambda: copy(square),
        "as_torch_kernel, ops.softmax": lambda: lambda: softmax(square),
        "as_torch_kernel, with a derivative": lambda: lambda: softmax(wanted),
        "torch.softmax": lambda: lambda: torch.softmax(square, -1),
        "torch.softmax, with a derivative": lambda: lambda: torch.softmax(wanted, -1),
        "torch.add": lambda: lambda: torch.add(x, y),
        "torch.add(out=)": lambda: lambda: torch.add(x, y, out=y),
        "Triton": lambda: _triton(x, y),
        "upstream's as_torch_kernel": lambda: _upstream(x, y),
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    launch = None
    for name, make in rows.items():
        try:
            call = make()
            call()
            taken = host_time(call)
        except Exception as error:  # a rival that is not installed
            print(f"{name:38} {type(error).__name__}: {str(error)[:300]}")
            continue
        launch = taken if launch is None else launch
        print(f"{name:38} {taken:7.2f} µs {taken - launch:7.2f} beyond a launch")


if __name__ == "__main__":
    main()
