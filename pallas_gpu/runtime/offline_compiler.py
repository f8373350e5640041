# SPDX-License-Identifier: Apache-2.0
"""From a serialized module to PTX, SASS and a resource report, without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from pallas_gpu import arch, errors
from pallas_gpu.runtime import dumps, resources_report, store, worker
from pallas_gpu.runtime.resources_report import Resources
from pallas_gpu.runtime.serialize import SerializedModule

# Texts of a large kernel are about 1 MB.
_CACHED_MODULES = 32
# The prefix of an instruction in nvdisasm's scheduling view: barriers to wait for
# (`2&1` are two), read barrier, write barrier, yield, stall cycles.
_CONTROL_CODES = re.compile(
    r"^\s*[-\w&]+:[-\d]:[-\d]:[-Y]:\w\w(?=\s+/\*)", re.MULTILINE
)
# The line of the code after it.
_SOURCE_LINES = re.compile(r"^\s*//## File .*\n", re.MULTILINE)
_NO_SASS = (
    "no SASS: nvdisasm was not found (pip install 'pallas-gpu[offline]', or a CUDA "
    "toolkit on PATH)"
)


class ArrayLike(Protocol):
    """An object with a shape and a dtype: arrays, avals, ShapeDtypeStructs."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class CompiledModule:
    """One kernel, compiled for one target.

    Attributes:
      name: the kernel's name.
      target: the target's name.
      ptx: PTX text.
      sass: disassembled machine code; None if nvdisasm is missing.
      sass_with_control: the same with each instruction's control codes (barriers to
        wait for, barriers set, yield, stall cycles), and with lines of the source where
        the module has them.
      ptxas: ptxas's report.
      resources: registers, spills, SMEM and other resources.
      note: the reason if something is missing, else None.
    """

    name: str
    target: str
    ptx: str
    sass: str | None
    sass_with_control: str | None
    ptxas: str
    resources: Resources
    note: str | None = None

    @property
    def texts(self) -> Mapping[str, str]:
        """The compiler's texts, by the names of the stages that can be kept."""
        return {"ptx": self.ptx, "ptxas": self.ptxas, "sass": self.sass or ""}


def compile_module(
    serialized: SerializedModule,
    *,
    name: str,
    target: str | arch.GpuTarget,
    operand_avals: Sequence[ArrayLike],
    result_avals: Sequence[ArrayLike],
    using: worker.Worker | None = None,
    **planned: int,
) -> CompiledModule:
    """Compiles a serialized module for a target; requires no GPU.

    Equal modules for the same target are compiled once: their texts are in the store,
    and those of the last modules in memory.

    Args:
      serialized: the result of `serialize`.
      name: the kernel's name, for reports and errors.
      target: e.g. `sm_90a`.
      operand_avals: shape and dtype of each operand.
      result_avals: shape and dtype of each result.
      using: compiles; default: the worker of this process for the target.
      **planned: the planner's figures, as of `resources_report.resources`.

    Raises:
      OfflineUnavailableError: CUDA packages are missing.
      CompilationError: the module does not compile, or exceeds the time limit.
      TargetError: the target is unknown.
    """
    target = arch.target(target)
    operands, results = _types(operand_avals), _types(result_avals)
    compiled_by = _compile_once if using is None else store.compile_stored
    using = worker.worker_for(target) if using is None else using
    output = compiled_by(using, serialized, name, operands, results)
    return CompiledModule(
        name=name,
        target=target.name,
        ptx=output.ptx,
        sass=None if output.sass is None else without_control_codes(output.sass),
        sass_with_control=output.sass,
        ptxas=output.ptxas,
        resources=resources_report.resources(output.ptxas, target=target, **planned),
        note=_NO_SASS if output.sass is None else None,
    )


def keep_device_code(
    serialized: SerializedModule,
    *,
    name: str,
    target: str | arch.GpuTarget,
    operand_avals: Sequence[ArrayLike],
    result_avals: Sequence[ArrayLike],
) -> None:
    """Writes PTX, ptxas's report and SASS if `PALLAS_GPU_KEEP` names them.

    On a GPU machine XLA compiles the kernel and does not expose these, so the offline
    worker compiles it a second time. A failure to write them is a warning: the kernel
    may still run.
    """
    stages = dumps.kept_stages() & {"ptx", "ptxas", "sass"}
    if not stages:
        return
    try:
        output = _compile_once(
            worker.worker_for(target),
            serialized,
            name,
            _types(operand_avals),
            _types(result_avals),
        )
    except (errors.OfflineUnavailableError, errors.InternalError) as error:
        warnings.warn(
            f"cannot keep {', '.join(sorted(stages))} of kernel {name!r}: {error}",
            stacklevel=2,
        )
        return
    texts = {"ptx": output.ptx, "ptxas": output.ptxas, "sass": output.sass}
    for stage in sorted(stages):
        text = texts[stage]
        if text is None:
            warnings.warn(f"kernel {name!r}: {_NO_SASS}", stacklevel=2)
            continue
        dumps.dump(stage, name, text)


def without_control_codes(sass: str) -> str:
    """SASS without control codes (barriers, yields, stalls) and lines of the source."""
    return _CONTROL_CODES.sub("", _SOURCE_LINES.sub("", sass))


@functools.lru_cache(maxsize=_CACHED_MODULES)
def _compile_once(
    using: worker.Worker,
    serialized: SerializedModule,
    name: str,
    operands: tuple[worker.ArrayType, ...],
    results: tuple[worker.ArrayType, ...],
) -> worker.CompilerOutput:
    return store.compile_stored(using, serialized, name, operands, results)


def _types(avals: Sequence[ArrayLike]) -> tuple[worker.ArrayType, ...]:
    return tuple(
        (tuple(int(n) for n in aval.shape), np.dtype(aval.dtype).name) for aval in avals
    )
