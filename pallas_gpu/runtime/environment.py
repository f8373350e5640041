# SPDX-License-Identifier: Apache-2.0
"""Finds JAX's CUDA plugin and the CUDA tools, and sets the plugin's variables.

The plugin compiles kernels and reads the locations of its launcher, libdevice and the
CUDA tools from environment variables. This module does not import the plugin or use a
GPU: packages are found by their files.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
from collections.abc import MutableMapping
from pathlib import Path

from pallas_gpu import errors

# CUDA 13 first: with both installed, the newer plugin is used.
_CUDA_MAJORS = (13, 12)
LIBDEVICE = Path("nvvm/libdevice/libdevice.10.bc")
_INSTALL = "pip install 'pallas-gpu[offline]'"

RUNTIME_LIB_VARIABLE = "MOSAIC_GPU_RUNTIME_LIB_PATH"
CUDA_ROOT_VARIABLE = "MOSAIC_GPU_CUDA_ROOT"


@dataclasses.dataclass(frozen=True)
class CudaInstallation:
    """The parts of JAX's CUDA plugin and of CUDA that were found, None if missing.

    Attributes:
      plugin: the folder of `jax_cuda13_plugin` or `jax_cuda12_plugin`.
      runtime_library: the plugin's launcher library.
      pjrt: the folder of the matching PJRT plugin, which holds the compiler.
      cuda_root: a folder that contains libdevice.
      wheel_bin: the folder with the programs of pip's CUDA packages.
      ptxas: the assembler; pip's is preferred to the one on PATH.
      nvdisasm: the disassembler, likewise.
    """

    plugin: Path | None
    runtime_library: Path | None
    pjrt: Path | None
    cuda_root: Path | None
    wheel_bin: Path | None
    ptxas: Path | None
    nvdisasm: Path | None


def find_cuda() -> CudaInstallation:
    """Finds the plugin and the CUDA tools, without importing or running them."""
    plugin = library = pjrt = None
    for major in _CUDA_MAJORS:
        plugin = _package_folder(f"jax_cuda{major}_plugin")
        if plugin is None:
            continue
        library = _existing(plugin / "libmosaic_gpu_runtime.so")
        pjrt = _package_folder("jax_plugins", f"xla_cuda{major}")
        break
    roots = _wheel_roots()
    wheel_bin = next((r / "bin" for r in roots if (r / "bin/ptxas").exists()), None)
    ptxas = _program("ptxas", roots)
    return CudaInstallation(
        plugin=plugin,
        runtime_library=library,
        pjrt=pjrt,
        cuda_root=_cuda_root(roots, ptxas),
        wheel_bin=wheel_bin,
        ptxas=ptxas,
        nvdisasm=_program("nvdisasm", roots),
    )


def require_offline(found: CudaInstallation) -> None:
    """Raises OfflineUnavailableError unless kernels can be compiled without a GPU."""
    parts = {
        "JAX's CUDA plugin (jax-cuda13-plugin)": found.runtime_library,
        "JAX's CUDA compiler (jax-cuda13-pjrt)": found.pjrt,
        "ptxas (nvidia-cuda-nvcc, or a CUDA toolkit on PATH)": found.ptxas,
        "libdevice (nvidia-nvvm, or a CUDA toolkit)": found.cuda_root,
    }
    missing = [name for name, path in parts.items() if path is None]
    if not missing:
        return
    raise errors.OfflineUnavailableError(
        "compiling a kernel without a GPU requires CUDA packages that are missing",
        expected=", ".join(parts),
        got="not found: " + ", ".join(missing),
        hint=f"{_INSTALL} (Linux on x86-64 or arm64)",
    )


def prepare_environment(
    environ: MutableMapping[str, str] | None = None, *, pinned_tools: bool = False
) -> CudaInstallation:
    """Sets the variables that JAX's CUDA plugin reads when it compiles a kernel.

    Sets `MOSAIC_GPU_RUNTIME_LIB_PATH` (the launcher; without it the first compilation
    fails with "Symbols not found: mosaic_gpu_launch_kernel") and `MOSAIC_GPU_CUDA_ROOT`
    (libdevice), unless they are set, and adds the folders of `ptxas` and `nvdisasm` to
    `PATH` unless they are on it. The function is idempotent.

    Args:
      environ: the variables to set, `os.environ` by default.
      pinned_tools: prepend pip's CUDA programs to PATH, so that the PTX version and the
        registers do not depend on the machine's toolkit.

    Returns:
      The parts that were found. Missing parts are not an error: on a machine without a
      GPU they are not needed until a kernel is compiled.
    """
    environ = os.environ if environ is None else environ
    found = find_cuda()
    if found.runtime_library is not None:
        environ.setdefault(RUNTIME_LIB_VARIABLE, str(found.runtime_library))
    if found.cuda_root is not None:
        environ.setdefault(CUDA_ROOT_VARIABLE, str(found.cuda_root))
    # An unset PATH must not become an empty entry, which is the current folder.
    path = environ["PATH"].split(os.pathsep) if environ.get("PATH") else []
    if pinned_tools and found.wheel_bin is not None:
        path = [str(found.wheel_bin), *(p for p in path if p != str(found.wheel_bin))]
    for program in (found.ptxas, found.nvdisasm):
        if program is None or str(program.parent) in path:
            continue
        if shutil.which(program.name, path=os.pathsep.join(path)) is None:
            path.append(str(program.parent))
    environ["PATH"] = os.pathsep.join(path)
    return found


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None


def _package_folder(name: str, *inner: str) -> Path | None:
    """The folder of a regular or namespace package, without importing it."""
    spec = importlib.util.find_spec(name)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, *inner)
        if path.is_dir():
            return path
    return None


def _wheel_roots() -> list[Path]:
    """The CUDA folders of pip's packages: one for CUDA 13, one per package before."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or []) if spec else []
    roots = []
    for folder in folders:
        roots += [Path(folder, name) for name in ("cu13", "cuda_nvcc", "nvdisasm")]
    return [root for root in roots if root.is_dir()]


def _program(name: str, roots: list[Path]) -> Path | None:
    for root in roots:
        if (root / "bin" / name).exists():
            return root / "bin" / name
    on_path = shutil.which(name)
    return None if on_path is None else Path(on_path)


def _cuda_root(roots: list[Path], ptxas: Path | None) -> Path | None:
    """The first folder that has libdevice: pip's, a named toolkit, ptxas's own."""
    candidates = list(roots)
    for variable in ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"):
        if value := os.environ.get(variable):
            candidates.append(Path(value))
    if ptxas is not None:
        candidates.append(ptxas.resolve().parent.parent)
    candidates.append(Path("/usr/local/cuda"))
    return next((c for c in candidates if (c / LIBDEVICE).exists()), None)
