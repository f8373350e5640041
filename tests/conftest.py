# SPDX-License-Identifier: Apache-2.0
"""What every test shares: the platform, the marks that skip, Hypothesis's profiles.

Environment variables are set here, before any test module imports jax, which reads
them once. `PALLAS_GPU_TEST_PLATFORM=cuda` runs the suite on a GPU machine, where the
tests marked `gpu` run too; without it everything runs on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import os
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

PLATFORM = os.environ.get("PALLAS_GPU_TEST_PLATFORM", "cpu")
# The CPU stays the default device: references are computed there, and what means the
# GPU says so.
os.environ["JAX_PLATFORMS"] = "cpu,cuda" if PLATFORM == "cuda" else PLATFORM
# Several test processes share one GPU: none may reserve most of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# The tests' processes occupy the cores, and their products are small.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# JAX on the CPU computes references and what the emulator evaluates, on small arrays:
# LLVM's optimisations take longer than they save, and so do the MLIR pipeline of each
# fusion (the emitters before it need none) and threads. A compilation takes a third of
# the time: 18 ms, not 50. On a GPU they are what is tested.
if PLATFORM == "cpu":
    _CHEAP = (
        "--xla_backend_optimization_level=0",
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
        "--xla_cpu_parallel_codegen_split_count=1",
    )
    os.environ["XLA_FLAGS"] = " ".join(
        [*_CHEAP, os.environ.get("XLA_FLAGS", "")]
    ).strip()
# Without a folder for compiled programs JAX still computes the key of each.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
# What a developer has set for their own debugging must not change what is tested.
for _name in ("INTERPRET", "KEEP", "DUMP_DIR", "LINEINFO"):
    os.environ.pop(f"PALLAS_GPU_{_name}", None)

# Seldom, from before the tests are collected: what modules and tests are made of stays.
gc.set_threshold(300_000)
# After so much growth a process gives back what it no longer needs.
_GROWTH_MB = 150

import hypothesis  # noqa: E402 - after the environment, it may import numpy and jax
import numpy as np  # noqa: E402

from tests.support import (  # noqa: E402
    executions,
    golden,
    tiers,
)

hypothesis.settings.register_profile("local", deadline=None, max_examples=30)
# In CI the same examples run every time, so a red run is red for its change.
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=30, derandomize=True, database=None
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@functools.cache
def no_gpu_reason() -> str | None:
    """Why tests that need a CUDA device cannot run here, None when they can."""
    if PLATFORM != "cuda":
        return "runs on a GPU: set PALLAS_GPU_TEST_PLATFORM=cuda"
    import jax

    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"no CUDA device: {error}"
    return None


@functools.cache
def no_offline_reason() -> str | None:
    """Why kernels cannot be compiled without a GPU here, None when they can."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "offline compilation needs jax-cuda13-plugin (extra `offline`)"
    if _cuda_program("ptxas") is None:
        return "offline compilation needs ptxas (extra `offline` or a CUDA toolkit)"
    return None


def _cuda_program(name: str) -> str | None:
    """The path of a CUDA program from the wheels, else from PATH."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob(f"*/bin/{name}")):
            return str(path)
    return shutil.which(name)


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.add_option(parser)
    parser.addoption(
        "--golden", action="store_true", help="write the texts that tests expect"
    )


def pytest_configure(config: pytest.Config) -> None:
    folder = config.cache.mkdir("tiers") if hasattr(config, "cache") else None
    tiers.configure(config, folder)
    executions.configure(folder)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Refuses a file whose import starts a backend of JAX, with its threads.

    Where none is started a process that has collected the tests can be forked.
    """
    from jax._src import xla_bridge

    before = xla_bridge.backends_are_initialized()
    report = yield
    if xla_bridge.backends_are_initialized() and not before:
        report.outcome = "failed"
        report.longrepr = (
            f"importing {collector.nodeid} starts a backend of JAX: arrays at the top "
            "of a module are NumPy's, and those of JAX are made in a test"
        )
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves the tests of the tier; skips what cannot run here, with the reason."""
    addresses = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addresses:
        # They differ between pytest-xdist's processes, which then refuse to start.
        raise pytest.UsageError(f"an address in the name of a test: {addresses[0]}")
    golden.collect(items)
    if config.getoption("golden"):
        items[:] = [item for item in items if golden.has_text(item)]
    tiers.deselect(config, items)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        for name, reason in (("gpu", no_gpu_reason), ("offline", no_offline_reason)):
            if name in marks and (why := reason()) is not None:
                item.add_marker(pytest.mark.skip(reason=why))


def pytest_collection_finish() -> None:
    """Keeps the garbage collector from the thousands of collected tests.

    Without this its visits of them are a twentieth of the suite's time.
    """
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None]:
    report = yield
    if report.when == "call" and report.passed:
        tiers.passed(item.nodeid)
    return report


def resident_mb() -> float:
    """The memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _bounded_caches() -> list[functools._lru_cache_wrapper]:
    """The caches of the package's functions that forget by themselves, too."""
    modules = [m for name, m in sys.modules.items() if name.startswith("pallas_gpu")]
    values = [x for module in modules for x in vars(module).values()]
    caches = [x for x in values if isinstance(x, functools._lru_cache_wrapper)]
    return [x for x in caches if x.cache_parameters()["maxsize"] is not None]


class _Memory:
    """Frees memory once a process has grown: a test worker stays below 1.5 GB.

    The collector counts objects and does not see how large arrays are; the C library
    keeps what is freed; JAX keeps compiled programs, and the package plans of layouts.

    Attributes:
      least: the memory after the last time, in MB.
    """

    least = 0.0

    def watch(self) -> None:
        """Called after each test."""
        if resident_mb() < self.least + _GROWTH_MB:
            return
        import jax

        jax.clear_caches()
        for cache in _bounded_caches():
            cache.cache_clear()
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        if trim is not None:
            trim(0)
        self.least = resident_mb()


_MEMORY = _Memory()


def pytest_runtest_logfinish() -> None:
    """Frees memory between tests."""
    _MEMORY.watch()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Disassembles only for the tests that read SASS."""
    tiers.begin()
    if item.get_closest_marker("offline") is not None:
        from tests.support import disassembly

        disassembly.disassemble(item.get_closest_marker("sass") is not None)


@pytest.fixture(autouse=True)
def checked_by_jax(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs the smoke set with JAX's internal checks, as JAX runs its own tests."""
    if request.node.get_closest_marker("smoke") is None:
        yield
        return
    import jax

    with jax.enable_checks(True):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers that are the same in every run."""
    return np.random.default_rng(0)
