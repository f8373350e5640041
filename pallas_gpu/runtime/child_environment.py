# SPDX-License-Identifier: Apache-2.0
"""The environment variables of the offline compiler's child process."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from pallas_gpu.runtime import environment

# These would change the child's code or output, or make it use a device.
_DROPPED_PREFIXES = ("JAX_", "MOSAIC_GPU_DUMP", "MOSAIC_GPU_LLVM_DEBUG", "PALLAS_GPU_")
_DROPPED_NAMES = ("XLA_FLAGS",)

# The plugin leaves a folder /tmp/mosaic-gpu-XXXXXX for each disassembled kernel,
# regardless of TMPDIR; it is unused once nvdisasm has exited. -g: with the lines of
# code that has them.
_TIDY_NVDISASM = """\
#!/bin/sh
{nvdisasm} -g "$@"
status=$?
for file; do
  case $file in
    /tmp/mosaic-gpu-??????/kernel.bin) rm -f "$file" && rmdir "${{file%/*}}" ;;
  esac
done
exit $status
"""


def child_environment(
    base: Mapping[str, str],
    folder: Path | None = None,
    *,
    disassemble: bool = True,
) -> dict[str, str]:
    """The parent's variables, except those that would change the child's output.

    Args:
      base: the parent's variables.
      folder: an empty folder for a CUDA root whose `nvdisasm` removes the files that
        the plugin leaves; without it they are kept.
      disassemble: the child prints SASS, if there is nvdisasm.
    """
    env = {
        name: value
        for name, value in base.items()
        if not name.startswith(_DROPPED_PREFIXES) and name not in _DROPPED_NAMES
    }
    # On CPU the CUDA plugin registers without searching for a device.
    env["JAX_PLATFORMS"] = "cpu"
    # Nothing is printed for a kernel that is found in JAX's own cache.
    env["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    # Separately, and to standard output: with MOSAIC_GPU_DUMP_TO the plugin also prints
    # the IR after every pass, 24 MB and 0.5 s for a matmul.
    for stage in ("PTX", "PTXAS", "SASS_CTRL"):
        env[f"MOSAIC_GPU_DUMP_{stage}"] = "1"
    found = environment.prepare_environment(env, pinned_tools=True)
    if found.nvdisasm is None or not disassemble:
        del env["MOSAIC_GPU_DUMP_SASS_CTRL"]
    elif folder is not None and (root := env.get(environment.CUDA_ROOT_VARIABLE)):
        # The plugin searches the CUDA root for nvdisasm before PATH.
        (folder / "nvvm").symlink_to(Path(root).resolve() / "nvvm")
        if _write_tidy_nvdisasm(found.nvdisasm, folder / "bin"):
            env[environment.CUDA_ROOT_VARIABLE] = str(folder)
    return env


def _write_tidy_nvdisasm(nvdisasm: Path, folder: Path) -> bool:
    """Writes the script; returns False if files in the folder cannot be executed."""
    folder.mkdir(exist_ok=True)
    script = folder / "nvdisasm"
    script.write_text(_TIDY_NVDISASM.format(nvdisasm=shlex.quote(str(nvdisasm))))
    script.chmod(0o700)
    return os.access(script, os.X_OK)
