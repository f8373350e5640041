# SPDX-License-Identifier: Apache-2.0
"""Threads trace, lower, compile and emulate at once; each gets what it gets alone."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_gpu as plgpu
from pallas_gpu import offline
from pallas_gpu.runtime import offline_compiler
from tests.support.semantics import BOTH, Lane

THREADS = 8
F16_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel unlike the others: what it does, how often, how wide, under what."""

    body: Callable[..., None]
    steps: int
    columns: int
    semantics: plgpu.LoweringSemantics

    def make(self) -> Callable[..., Any]:
        """A new kernel: nothing that was traced or lowered before is found again."""
        products = self.body is _products
        type_ = jnp.float16 if products else jnp.float32
        tile = (64, self.columns)
        smem = plgpu.SMEM(tile, type_, transforms=F16_TILED if products else ())
        return plgpu.kernel(
            functools.partial(self.body, self.steps),
            out_type=jax.ShapeDtypeStruct(tile, jnp.float32),
            scratch_types=[smem, plgpu.Barrier()],
            name=f"{self.body.__name__}_{self.steps}_{self.columns}",
            compiler_params=plgpu.CompilerParams(lowering_semantics=self.semantics),
        )

    def argument(self) -> np.ndarray:
        dtype = np.float16 if self.body is _products else np.float32
        rng = np.random.default_rng(self.columns)
        return rng.standard_normal((64, self.columns)).astype(dtype)


def _sums(steps, x_ref, o_ref, tile, barrier):
    plgpu.copy_gmem_to_smem(x_ref, tile, barrier)
    plgpu.barrier_wait(barrier)

    def step(i, x):
        return x * 0.5 + x.max(axis=1, keepdims=True) + i.astype(jnp.float32)

    o_ref[...] = lax.fori_loop(0, steps, step, tile[...])


def _branches(steps, x_ref, o_ref, tile, barrier):
    tile[...] = x_ref[...]
    for i in range(steps):
        x = tile[...]
        tile[...] = jnp.where(x > i, jnp.exp(x - i), x * (i + 2.0))
    o_ref[...] = tile[...]


def _products(steps, x_ref, o_ref, tile, barrier):
    plgpu.copy_gmem_to_smem(x_ref, tile, barrier)
    plgpu.barrier_wait(barrier)

    def scope(acc):
        for _ in range(steps):
            plgpu.wgmma(acc, tile.at[:, :64], tile)
        plgpu.wgmma_wait(0)
        o_ref[...] = acc[...]

    plgpu.run_scoped(scope, plgpu.ACC((64, o_ref.shape[1]), jnp.float32))


# A body, its numbers of steps and its widths: 50 kernels in all.
CASES = [
    Case(body, steps, columns, semantics)
    for body, many, widths in (
        (_sums, (1, 2, 3, 5), (16, 64, 128)),
        (_branches, (1, 2, 3), (16, 64, 128)),
        (_products, (1, 2), (64, 128)),
    )
    for steps in many
    for columns in widths
    for semantics in BOTH
]


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns a hundred times more often than by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def at_once(task: Callable[[Case], Any], cases: Sequence[Case]) -> list[Any]:
    """What a task gives for each case, from threads that begin at one time."""
    start = threading.Barrier(THREADS)
    with futures.ThreadPoolExecutor(THREADS, initializer=start.wait) as pool:
        return list(pool.map(task, cases))


def lowered_and_emulated(case: Case) -> tuple[str, bytes]:
    x = case.argument()
    kernel = case.make()
    (lowered,) = offline.lower(kernel, x)
    return lowered.mlir, np.asarray(kernel(x)).tobytes()


def ptx(case: Case) -> str:
    (report,) = offline.compile(case.make(), case.argument())
    return report.ptx


def in_a_forked_child(task: Callable[[], Any]) -> int:
    """Runs a task in a child of this process; returns the child's exit code."""
    with warnings.catch_warnings():
        # Python and JAX warn of the locks that other threads may hold.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        signal.alarm(30)
        code = 1
        try:
            task()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_kernels_lowered_and_emulated_in_threads_are_those_of_one(quick_switches):
    assert len(CASES) == 50
    results = at_once(lowered_and_emulated, CASES)
    assert results == list(map(lowered_and_emulated, CASES))
    # Both semantics may emit the same; no two kernels do.
    kernels = [(case.body, case.steps, case.columns) for case in CASES]
    modules = [mlir for mlir, _ in results]
    assert len({*zip(kernels, modules, strict=True)}) == len({*modules})


@pytest.mark.offline
def test_kernels_compiled_offline_in_threads_are_those_of_one(
    quick_switches, monkeypatch
):
    monkeypatch.setenv("PALLAS_GPU_COMPILATIONS_DIR", "off")
    # One worker compiles them all, 0.2 s each: eight kernels of the fifty.
    cases = [case for case in CASES if case.semantics is Lane][:8]
    together = at_once(ptx, cases)
    offline_compiler._compile_once.cache_clear()
    assert together == list(map(ptx, cases))
    assert len(set(together)) == len(cases)


def test_a_forked_child_lowers_as_its_parent_does():
    case = CASES[0]
    (expected,) = offline.lower(case.make(), case.argument())

    def lower():
        (lowered,) = offline.lower(case.make(), case.argument())
        assert lowered.mlir == expected.mlir

    # MLIR's threads are not in the child; it once waited for them forever.
    assert in_a_forked_child(lower) == 0


def test_a_forked_child_emulates_as_its_parent_does():
    case = CASES[0]
    x = jax.block_until_ready(jnp.asarray(case.argument()))
    expected = np.asarray(case.make()(x))

    def emulate():
        np.testing.assert_array_equal(case.make()(x), expected)

    # Computations of JAX itself wait forever there, or abort the process.
    assert in_a_forked_child(emulate) == 0
