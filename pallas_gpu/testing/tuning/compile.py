# SPDX-License-Identifier: Apache-2.0
"""Traces the candidates, and compiles their kernels offline in parallel processes.

Nothing runs here: what does not trace, exceeds the target's resources, does not compile
or spills registers is out before the GPU is used.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from pallas_gpu import _jax, arch, compiler, errors, offline
from pallas_gpu.entry import assumed_target
from pallas_gpu.lowering.machine import Build
from pallas_gpu.runtime import environment, register, stages
from pallas_gpu.runtime.resources_report import Resources
from pallas_gpu.runtime.worker import Worker
from pallas_gpu.testing.tuning.arguments import Call
from pallas_gpu.testing.tuning.candidates import Candidate, Outcome
from pallas_gpu.testing.tuning.progress import Progress

_TOO_LATE = "the time was over before it was compiled"


def default_processes() -> int:
    """Half of the cores: the other half traces, and compiles for the GPU."""
    return max(1, min(8, (os.cpu_count() or 1) // 2))


def target_of(params: Any, target: Any = None) -> Any:
    """Returns the given target, or else a kernel's own, or else the attached one."""
    if target is None:
        return compiler.target_of(params, register.attached_target)
    offline.require_target(params, target)
    return target


def trace(candidate: Candidate, call: Call, target: Any = None) -> None:
    """Traces the call with a candidate, and plans the memory of its kernels."""
    try:
        function = call.with_config(candidate.config)
        with assumed_target.assuming(target) if target else contextlib.nullcontext():
            make = jax.make_jaxpr(function, return_shape=True)
            candidate.traced, results = make(*call.types)
        candidate.results = jax.tree.structure(results)
        candidate.kernels = tuple(offline.launches(candidate.traced))
        builds = [Build(p, target_of(p, target)) for p in candidate.kernels]
        candidate.builds = tuple(compiler.run(b, until="plan") for b in builds)
    except Exception as error:
        candidate.fail(error)


def compile_offline(
    candidates: Sequence[Candidate],
    processes: int,
    deadline: float,
    progress: Progress,
) -> None:
    """Compiles the kernels of the candidates, and takes those out that do not suit.

    Args:
      candidates: traced, in the order in which they are compiled.
      processes: number of child processes; with 0 nothing is compiled.
      deadline: on the monotonic clock; what is not compiled by then is left out.
      progress: advances with every candidate.
    """
    left = [c for c in candidates if c.kernels]
    if not processes or not left or not _is_available():
        return
    progress.begin("compile offline", len(left))
    found: dict[int, list[Resources]] = {}

    def finish(candidate: Candidate, builds: Sequence[Build]) -> None:
        try:
            with pool.worker(builds[0].target) as worker:
                found[candidate.index] = [
                    stages.compiled_module(build, worker).resources for build in builds
                ]
        except errors.OfflineUnavailableError:
            pass  # the device's own compiler will tell
        except Exception as error:
            candidate.fail(error)
        progress.advance()

    with (
        _Pool(processes) as pool,
        concurrent.futures.ThreadPoolExecutor(processes) as threads,
    ):
        for candidate in left:
            if time.monotonic() >= deadline:
                candidate.end(Outcome.LEFT_OUT, _TOO_LATE)
                continue
            try:
                builds = [
                    register.lower_ahead(params, target_of(params))
                    for params in candidate.kernels
                ]
            except Exception as error:
                candidate.fail(error)
                progress.advance()
                continue
            threads.submit(finish, candidate, builds)
    _take_out_spills(left, found)


def _is_available() -> bool:
    try:
        environment.require_offline(environment.find_cuda())
    except errors.OfflineUnavailableError:
        return False
    return True


def _take_out_spills(
    candidates: Sequence[Candidate], found: dict[int, list[Resources]]
) -> None:
    """Takes candidates with spills out, unless all have some."""
    spilled = {
        index: sum(r.spill_store_bytes + r.spill_load_bytes for r in resources)
        for index, resources in found.items()
    }
    if all(spilled.values()):
        return
    for candidate in candidates:
        if candidate.is_left and (spills := spilled.get(candidate.index, 0)):
            text = f"{spills} bytes of registers of a thread go to memory"
            candidate.end(Outcome.SPILLS, text)


class _Pool:
    """Workers of the offline compiler; each compiles one kernel at a time."""

    def __init__(self, processes: int):
        self._processes = processes
        self._free: dict[str, queue.SimpleQueue[Worker]] = {}
        self._workers: list[Worker] = []

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: Any) -> None:
        for worker in self._workers:
            worker.close()

    @contextlib.contextmanager
    def worker(self, target: arch.Target) -> Iterator[Worker]:
        """Lends a worker for a target: there are as many as threads that ask."""
        free = self._free.setdefault(target.name, queue.SimpleQueue())
        try:
            worker = free.get_nowait()
        except queue.Empty:
            worker = Worker(target.name, disassemble=False)
            self._workers.append(worker)
        try:
            yield worker
        finally:
            free.put(worker)


def compile_for_device(
    candidates: Sequence[Candidate],
    arrays: Sequence[Any],
    deadline: float,
    progress: Progress,
) -> None:
    """Compiles the calls with the candidates for the device that has the arrays."""
    left = [c for c in candidates if c.is_left]
    progress.begin("compile", len(left))
    settings = _settings()

    def build(candidate: Candidate) -> None:
        if time.monotonic() >= deadline and candidate is not left[0]:
            candidate.end(Outcome.LEFT_OUT, _TOO_LATE)
            return
        try:
            with settings():
                candidate.run = jax.jit(_again(candidate)).lower(*arrays).compile()
        except Exception as error:
            candidate.fail(error)
        progress.advance()

    # In threads, which begin outside of any trace that surrounds the call.
    with concurrent.futures.ThreadPoolExecutor(default_processes()) as threads:
        list(threads.map(build, left))


def _again(candidate: Candidate) -> Callable[..., Any]:
    """Returns the traced call: its kernels are those that have been lowered."""
    traced, tree = candidate.traced, candidate.results

    def call(*arrays: Any) -> Any:
        flat = _jax.eval_jaxpr(traced.jaxpr, traced.consts, *arrays)
        return jax.tree.unflatten(tree, flat)

    return call


def _settings() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Returns JAX's settings of this thread, for others."""
    wide, device = jax.config.jax_enable_x64, jax.config.jax_default_device

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with jax.enable_x64(bool(wide)), jax.default_device(device):
            yield

    return settings
