# SPDX-License-Identifier: Apache-2.0
"""What every test shares: the platform, the marks that skip, Hypothesis's profiles.

Environment variables are set here, before any test module imports jax, which reads
them once. `PALLAS_GPU_TEST_PLATFORM=cuda` runs the suite on a GPU machine, where the
tests marked `gpu` run too; without it everything runs on the CPU.
"""

from __future__ import annotations

import collections
import functools
import gc
import importlib.util
import os
import shutil
from collections.abc import Iterator
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

import hypothesis  # noqa: E402 - after the environment, it may import numpy and jax
import numpy as np  # noqa: E402

from tests.support import golden, quick  # noqa: E402

hypothesis.settings.register_profile("local", deadline=None, max_examples=30)
# In CI the same examples run every time, so a red run is red for its change.
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=30, derandomize=True, database=None
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--golden`."""
    parser.addoption(
        "--golden", action="store_true", help="write the texts that tests expect"
    )


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what cannot run here, with the reason; marks cases of large tables slow."""
    golden.collect(items)
    if items and items[0].config.getoption("golden"):
        items[:] = [item for item in items if golden.has_text(item)]
    seen: collections.Counter[str] = collections.Counter()
    addresses = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addresses:
        # They differ between pytest-xdist's processes, which then refuse to start.
        raise pytest.UsageError(f"an address in the name of a test: {addresses[0]}")
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            function = item.nodeid.partition("[")[0]
            if seen[function] % sampled.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[function] += 1
    for item in quick.choose(items):
        item.add_marker(pytest.mark.quick)
    for mark, reason in (("gpu", no_gpu_reason), ("offline", no_offline_reason)):
        marked = [item for item in items if item.get_closest_marker(mark)]
        if marked and (why := reason()) is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=why))


def pytest_collection_finish() -> None:
    """Keeps the garbage collector from the thousands of collected tests.

    Without this its visits of them are a twentieth of the suite's time.
    """
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Disassembles only for the tests that read SASS."""
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
