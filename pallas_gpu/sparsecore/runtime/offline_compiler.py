# SPDX-License-Identifier: Apache-2.0
"""From modules to instruction bundles, without a TPU: the parent's side.

libtpu can end its process, so a child runs it, one for all chips.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pallas_gpu import errors
from pallas_gpu.arch import tpu
from pallas_gpu.runtime import store, worker
from pallas_gpu.sparsecore.runtime import bundles
from pallas_gpu.sparsecore.runtime.custom_call import CustomCall
from pallas_gpu.sparsecore.types import MACHINE

_PROGRAM = Path(__file__).with_name("compiler_process.py")
_DUMPS = {
    "bundles": "xla_sc_dump_bundles_to",
    "llvm": "xla_sc_dump_llvm_ir_to",
    "mosaic": "xla_mosaic_dump_to",
}
# libtpu asks a metadata server what machine it is on. These are the answers without
# one, and permit several processes to load it.
_VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_DROPPED = ("JAX_", "TPU_", "LIBTPU_", "XLA_FLAGS", "PALLAS_GPU_")
# Read by `compiler_process`.
_DUMPS_VARIABLE = "LIBTPU_DUMPS"
_TRACE = re.compile(
    r"=== Source Location Trace.*|\s*Suspected Python Code Location.*|"
    r"Dumping unoptimized llvm-ir to \S+\n?",
    re.DOTALL,
)
_CACHED_KERNELS = 128


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """A kernel, compiled for one chip.

    Attributes:
      name: the kernel's name.
      target: the chip's name.
      programs: the instruction bundles of each call, in the order of the compilation.
      hlo: XLA's module.
      llvm: LLVM IR of each call, before and after optimisation.
      passes: the module after each of libtpu's passes, by the name of the pass.
      code_bytes: size of the machine code, XLA's frame included.
    """

    name: str
    target: str
    programs: tuple[bundles.BundleProgram, ...]
    hlo: str
    llvm: tuple[tuple[str, str], ...]
    passes: tuple[tuple[str, str], ...]
    code_bytes: int

    @property
    def program(self) -> bundles.BundleProgram:
        """The bundles of a kernel that is one call."""
        (program,) = self.programs
        return program

    @property
    def texts(self) -> dict[str, str]:
        """The compiler's texts, by the names of the stages that can be kept."""
        return {"bundles": "\n".join(program.text for program in self.programs)}


def is_available() -> bool:
    """True if libtpu is installed."""
    spec = importlib.util.find_spec("libtpu")
    return spec is not None and spec.origin is not None


class TpuWorker(worker.Child):
    """The child process that compiles for all TPUs."""

    arguments = (str(_PROGRAM),)

    def __init__(self, *, timeout_seconds: float = worker.DEFAULT_TIMEOUT_SECONDS):
        super().__init__(
            "TPUs",
            timeout_seconds=timeout_seconds,
            compilations=worker.COMPILATIONS_PER_PROCESS,
        )

    def environment(self, folder: Path) -> dict[str, str]:
        """Returns the variables with which libtpu writes its texts to a folder."""
        flags = []
        for kind, flag in _DUMPS.items():
            (folder / kind).mkdir()
            flags.append(f"--{flag}={folder / kind}")
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith(_DROPPED)},
            **_VARIABLES,
            "LIBTPU_INIT_ARGS": " ".join(flags),
            _DUMPS_VARIABLE: str(folder),
        }

    def config(self) -> None:
        """Raises OfflineUnavailableError if libtpu is not installed."""
        if not is_available():
            raise errors.OfflineUnavailableError(
                "compiling a kernel for a SparseCore requires libtpu, which is missing",
                expected="the package libtpu",
                got="not found: libtpu",
                hint="pip install 'pallas-gpu[tpu]' (Linux on x86-64)",
            )


@functools.cache
def _compiler() -> list[str]:
    """Identifies what compiles, and the texts that it writes."""
    packages = ("jax", "jaxlib", "libtpu")
    return [*map(importlib.metadata.version, packages), *_DUMPS.values()]


def compile_kernel(
    calls: Sequence[CustomCall],
    *,
    name: str,
    target: str | tpu.TpuTarget,
    operands: Sequence[worker.ArrayType],
    results: Sequence[worker.ArrayType],
    using: TpuWorker | None = None,
) -> CompiledKernel:
    """Compiles the calls of one kernel for a chip; requires no TPU.

    Equal kernels are compiled once: the compiler's texts are in the store.

    Args:
      calls: the calls that the kernel consists of.
      name: the kernel's name, for reports and errors.
      target: e.g. `tpu7x`.
      operands: shape and dtype of each operand.
      results: shape and dtype of each result.
      using: compiles; default: the worker of this process.

    Raises:
      OfflineUnavailableError: libtpu is missing.
      CompilationError: libtpu refuses the kernel, or ends the process.
      TargetError: the target is unknown.
    """
    if using is None:
        using = worker.kept("libtpu", TpuWorker)
    return _compile_once(
        using, tuple(calls), name, tpu.target(target), tuple(operands), tuple(results)
    )


@functools.lru_cache(maxsize=_CACHED_KERNELS)
def _compile_once(
    using: TpuWorker,
    calls: tuple[CustomCall, ...],
    name: str,
    target: tpu.TpuTarget,
    operands: tuple[worker.ArrayType, ...],
    results: tuple[worker.ArrayType, ...],
) -> CompiledKernel:
    request = {
        "topology": target.topology,
        "calls": [dataclasses.asdict(call) for call in calls],
        "operands": list(operands),
        "results": list(results),
    }
    try:
        made: dict[str, Any] = store.stored(
            [MACHINE, _compiler(), request],
            lambda: using.request(request, name)["result"],
        )
    except errors.CompilationError as error:
        error.got = _TRACE.sub("", str(error.got)).strip()
        raise
    return CompiledKernel(
        name=name,
        target=target.name,
        programs=tuple(
            bundles.parse(text, target.branch_delay) for _, text in made["bundles"]
        ),
        hlo=made["hlo"],
        llvm=tuple(map(tuple, made["llvm"])),
        passes=tuple(map(tuple, made["passes"])),
        code_bytes=made["code_bytes"],
    )
