# SPDX-License-Identifier: Apache-2.0
"""Kept texts of stages: `PALLAS_GPU_KEEP` names them, `PALLAS_GPU_DUMP_DIR` the folder.

    PALLAS_GPU_KEEP=mlir,ptx python train.py

writes `pallas_gpu_dump/<kernel>.<n>.mlir` and `.ptx` for each kernel that is compiled,
`n` counting the different kernels of one name from 0. Files of an earlier run are
overwritten. A file that cannot be written is a warning: the program goes on.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from pathlib import Path

from pallas_gpu import compiler, errors

KEEP_VARIABLE = "PALLAS_GPU_KEEP"
DIRECTORY_VARIABLE = "PALLAS_GPU_DUMP_DIR"
DEFAULT_DIRECTORY = "pallas_gpu_dump"
_STEM_BYTES = 200

# Texts written so far by (folder, kernel, stage): a text's index is its number.
_written: dict[tuple[Path, str, str], list[str]] = {}
_lock = threading.Lock()


def kept_stages() -> frozenset[str]:
    """The stages that `PALLAS_GPU_KEEP` names.

    Raises:
      ArgumentError: a name is not a stage.
    """
    words = os.environ.get(KEEP_VARIABLE, "").split(",")
    names = [word.strip() for word in words if word.strip()]
    for name in names:
        _check_stage(name, f"{KEEP_VARIABLE} names an unknown stage")
    return frozenset(names)


def is_kept(stage: str) -> bool:
    """True if `PALLAS_GPU_KEEP` names the stage.

    Raises:
      ArgumentError: `stage`, or a name in the variable, is not a stage.
    """
    _check_stage(stage, "unknown stage")
    return stage in kept_stages()


def dump(stage: str, kernel_name: str, text: str) -> Path | None:
    """Writes one stage of one kernel, if `PALLAS_GPU_KEEP` names the stage.

    A text that this process has already written is not written again.

    Args:
      stage: one of `compiler.TEXTS`; the file's ending.
      kernel_name: the kernel's name, the prefix of the file's name.
      text: the text of the stage.

    Returns:
      The file; None if the stage is not to be kept, or if the file cannot be written,
      which is a warning.

    Raises:
      ArgumentError: the stage does not exist.
    """
    if not is_kept(stage):
        return None
    folder = Path(os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY)
    with _lock:
        texts = _written.setdefault((folder, _stem(kernel_name), stage), [])
        if text not in texts:
            texts.append(text)
        number = texts.index(text)
        return _write(folder, f"{_stem(kernel_name)}.{number}.{stage}", text)


def _stem(kernel_name: str) -> str:
    """Returns a kernel's name as the beginning of a file's name.

    Users choose the names: a slash must not lead out of the folder, and file systems
    allow 255 bytes.
    """
    cleaned = re.sub(r"[^\w.-]", "_", kernel_name).encode(errors="replace")
    return cleaned[:_STEM_BYTES].decode(errors="ignore")


def _write(folder: Path, name: str, text: str) -> Path | None:
    try:
        path = folder.resolve() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        warnings.warn(
            f"cannot write {name} to the folder {folder}: {error.strerror}; set "
            f"{DIRECTORY_VARIABLE} to a folder with space that can be written to",
            stacklevel=2,
        )
        return None
    return path


def _check_stage(name: str, what: str) -> None:
    if name in compiler.TEXTS:
        return
    raise errors.ArgumentError(
        what,
        expected="some of " + ", ".join(compiler.TEXTS) + ", separated by commas",
        got=repr(name),
        hint=f"for example {KEEP_VARIABLE}=mlir,ptx",
    )
