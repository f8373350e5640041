# SPDX-License-Identifier: Apache-2.0
"""The store of compilations: no process compiles what another one has compiled.

An entry's key is the SHA-256 of all that determines the compiler's output. Its file
holds a checksum and the texts, compressed. What cannot be read, or is damaged, is
compiled again, and what cannot be written is not stored: neither is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

from pallas_gpu import arch
from pallas_gpu.runtime import cache_files, environment, target_config
from pallas_gpu.runtime.child_environment import child_environment
from pallas_gpu.runtime.serialize import SerializedModule
from pallas_gpu.runtime.worker import ArrayType, CompilerOutput, Worker

FOLDER_VARIABLE = "PALLAS_GPU_COMPILATIONS_DIR"
LIMIT_BYTES = 256 << 20
# Raise it when `worker_process`, `worker.split_output`, nvdisasm's arguments or the
# file's layout change.
_FORMAT = 2
# Keys are random: one write of 256 prunes the store, which takes 0.08 s for 10,000
# entries, of 4 KB on average.
_PRUNING = "00"
_LEFT_AFTER_PRUNING = 0.75
_ABANDONED_SECONDS = 3600.0
_SUFFIX = ".compilation"
# Nobody else's file is deleted: the user names the folder.
_OUR_FILE = re.compile(rf"\.?[0-9a-f]{{64}}{re.escape(_SUFFIX)}(\.\w+)?")
_CHECKSUM_BYTES = 32
# Paths differ between installations that compile alike.
_PATH_VARIABLES = (environment.RUNTIME_LIB_VARIABLE, environment.CUDA_ROOT_VARIABLE)


def folder() -> Path | None:
    """Returns the folder of the store; None if it is turned off."""
    if os.environ.get(FOLDER_VARIABLE) == "off":
        return None
    return cache_files.folder("compilations", FOLDER_VARIABLE)


def compile_stored(
    using: Worker,
    serialized: SerializedModule,
    name: str,
    operands: Sequence[ArrayType],
    results: Sequence[ArrayType],
) -> CompilerOutput:
    """Returns what is stored, or what `Worker.compile` returns, which is then stored.

    An output with SASS serves a worker that does not disassemble, too.
    """
    compiled = functools.partial(
        using.compile, serialized, name=name, operands=operands, results=results
    )
    place = folder()
    if place is None:
        return compiled()
    keys = _keys(using.target, serialized, operands, results)
    if keys is None:
        return compiled()
    plain, disassembled = (place / (key + _SUFFIX) for key in keys)
    for path in (disassembled,) if using.disassemble else (plain, disassembled):
        if (output := load(path)) is not None:
            sass = output.sass if using.disassemble else None
            return dataclasses.replace(output, sass=sass)
    output = compiled()
    save(plain if output.sass is None else disassembled, output)
    return output


def stored(key: Any, make: Callable[[], Any]) -> Any:
    """Returns what is stored under a key, or what `make` returns, which is then stored.

    Args:
      key: the machine, its compiler, and all that determines the compiler's output, in
        the form of JSON, as is the output.
      make: compiles.
    """
    place = folder()
    if place is None:
        return make()
    path = place / (_sha256(json.dumps([_FORMAT, key]).encode()) + _SUFFIX)
    found = _read(path)
    if found is None:
        found = make()
        _write(path, found)
    return found


def load(path: Path) -> CompilerOutput | None:
    """Returns an entry, which becomes the most recently used; None if there is none."""
    with contextlib.suppress(TypeError):
        return CompilerOutput(**_read(path))
    return None


def save(path: Path, output: CompilerOutput) -> None:
    """Writes an entry, if possible; one in 256 prunes the store."""
    _write(path, dataclasses.asdict(output))


def _read(path: Path) -> Any:
    with contextlib.suppress(OSError, ValueError, zlib.error):
        content = path.read_bytes()
        packed = content[_CHECKSUM_BYTES:]
        if content[:_CHECKSUM_BYTES] == _checksum(path, packed):
            with contextlib.suppress(OSError):  # a folder that is only read
                os.utime(path)
            return json.loads(zlib.decompress(packed))
    return None


def _write(path: Path, value: Any) -> None:
    packed = zlib.compress(json.dumps(value).encode())
    with contextlib.suppress(OSError):
        cache_files.replace(path, _checksum(path, packed) + packed)
        if path.name.startswith(_PRUNING):
            prune(path.parent, LIMIT_BYTES)


def prune(place: Path, limit_bytes: int) -> None:
    """Deletes what killed processes have left, and the least recently used entries.

    Entries are deleted if all of them exceed the limit, until a quarter of it is free.
    """
    entries = []
    for file in os.scandir(place):
        if not _OUR_FILE.fullmatch(file.name):
            continue
        with contextlib.suppress(OSError):  # another process prunes, too
            status = file.stat()
            if not file.name.startswith("."):
                entries.append((status.st_mtime_ns, status.st_size, file.path))
            elif time.time() - status.st_mtime > _ABANDONED_SECONDS:
                os.unlink(file)
    total = sum(size for _, size, _ in entries)
    if total <= limit_bytes:
        return
    for _, size, path in sorted(entries):
        if total <= _LEFT_AFTER_PRUNING * limit_bytes:
            return
        with contextlib.suppress(OSError):
            os.unlink(path)
            total -= size


def _checksum(path: Path, packed: bytes) -> bytes:
    """The name is part of it: an entry under another key is a damaged one."""
    return hashlib.sha256(path.name.encode() + packed).digest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _keys(
    target: arch.GpuTarget, serialized: SerializedModule, *types: Sequence[ArrayType]
) -> tuple[str, str] | None:
    """Returns the keys of a module's output without SASS and of that with it.

    They are equal without nvdisasm, and None if another part of CUDA is missing.
    """
    env = child_environment(os.environ)
    disassembles = env.pop("MOSAIC_GPU_DUMP_SASS_CTRL", None)
    flags = {
        name: value
        for name, value in sorted(env.items())
        if name.startswith(("MOSAIC_GPU_", "LLVM_")) and name not in _PATH_VARIABLES
    }
    config = target_config.target_config(target)
    module = (serialized.hash.hex(), types)
    try:
        plain = [_FORMAT, module, config, flags, _compiler(env), _tool("ptxas", env)]
        whole = [*plain, _tool("nvdisasm", env)] if disassembles else plain
    except (OSError, subprocess.SubprocessError):
        return None
    return _sha256(json.dumps(plain).encode()), _sha256(json.dumps(whole).encode())


def _compiler(env: Mapping[str, str]) -> list[object]:
    """Identifies the libraries that a child with an environment compiles with."""
    found = environment.find_cuda()
    root = env.get(environment.CUDA_ROOT_VARIABLE)
    if found.plugin is None or found.pjrt is None or root is None:
        raise FileNotFoundError("JAX's CUDA plugin or libdevice")
    versions = [folder / "version.py" for folder in (found.plugin, found.pjrt)]
    files = [*versions, Path(root, environment.LIBDEVICE)]
    library_bytes = (found.pjrt / "xla_cuda_plugin.so").stat().st_size
    digests = [_digest(file, *_stamp(file)) for file in files]
    return [jax.__version__, jaxlib.__version__, library_bytes, *digests]


def _tool(name: str, env: Mapping[str, str]) -> list[str]:
    """The versions of a program; the plugin searches the CUDA root before PATH."""
    root = env[environment.CUDA_ROOT_VARIABLE]
    found = (shutil.which(name, path=p) for p in (f"{root}/bin", env["PATH"]))
    return [_version(Path(p), *_stamp(Path(p))) for p in found if p is not None]


def _stamp(file: Path) -> tuple[int, int]:
    """Changes when a file is replaced while this process runs."""
    status = file.stat()
    return status.st_mtime_ns, status.st_size


@functools.cache
def _digest(file: Path, *_: int) -> str:
    return _sha256(file.read_bytes())


@functools.cache
def _version(program: Path, *_: int) -> str:
    """What a program says of its version: 6 ms, once per process."""
    command = [str(program), "--version"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=10)
    return done.stdout.decode(errors="replace")
