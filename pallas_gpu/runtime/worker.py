# SPDX-License-Identifier: Apache-2.0
"""The parent's side of the offline compiler: one child process per target.

A child takes seconds to start and tenths of a second per kernel, so it is kept; after a
number of kernels another one replaces it, since the compiler's memory only grows. It
shares only two pipes with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pallas_gpu import arch, errors
from pallas_gpu.runtime import environment, target_config, worker_process
from pallas_gpu.runtime.child_environment import child_environment
from pallas_gpu.runtime.serialize import SerializedModule, shortened

DEFAULT_TIMEOUT_SECONDS = 120.0
# XLA and the plugin keep 0.75 MB of each kernel, and a start takes 5 s (measured).
COMPILATIONS_PER_PROCESS = 256
_PROGRAM = Path(worker_process.__file__)
_PTX_LINE = re.compile(r"ptxas .*, line (\d+); ")

ArrayType = tuple[tuple[int, ...], str]
"""Shape and dtype name of an operand or a result."""


@dataclasses.dataclass(frozen=True)
class CompilerOutput:
    """The compiler's output for one kernel.

    Attributes:
      ptx: PTX text.
      ptxas: ptxas's report.
      sass: disassembly with control codes; None without nvdisasm or `disassemble`.
    """

    ptx: str
    ptxas: str
    sass: str | None


class Child:
    """A child process that compiles, started by its first kernel and kept.

    A subclass says in which environment its program runs and how it is started.

    Args:
      name: what it compiles for, in messages.
      timeout_seconds: time limit for its start and for each kernel.
      compilations: number of kernels after which another child replaces it.

    Attributes:
      arguments: the file that defines the child's `Compiler`; default: that for CUDA.
    """

    arguments: tuple[str, ...] = ()

    def __init__(self, name: str, *, timeout_seconds: float, compilations: int):
        self.name = name
        self.timeout_seconds = timeout_seconds
        self.compilations = compilations
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._compiled = 0
        with self._starting():
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as self
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def environment(self, folder: Path) -> dict[str, str]:
        """Returns the child's environment variables, given an empty folder."""
        raise NotImplementedError

    def config(self) -> Any:
        """Returns the argument of the child's `Compiler`.

        Raises:
          OfflineUnavailableError: packages are missing.
        """
        raise NotImplementedError

    @property
    def pid(self) -> int | None:
        """The child's process id; None if it is not running."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def request(self, request: dict[str, Any], name: str) -> dict[str, Any]:
        """Returns the child's answer for one kernel; starts it if it is not running.

        Raises:
          CompilationError: the compiler rejected the module, the child died, or it
            exceeded the time limit.
          OfflineUnavailableError: packages are missing, or the child cannot start.
        """
        with self._lock:
            if self.pid is None:
                self._start()
            mark = self._stderr_size()
            answer = self._ask(request, f"kernel {name!r}")
            diagnostics = self._stderr_since(mark)
            self._compiled += 1
            if self._compiled >= self.compilations:
                self.close()
        if not answer["ok"]:
            raise errors.CompilationError(
                f"kernel {name!r} does not compile for {self.name}",
                got=_failure_text(answer["error"], answer["output"], diagnostics),
                hint="please report it with the kernel; PALLAS_GPU_KEEP=mlir writes "
                "the module to a file",
            )
        return answer

    def close(self) -> None:
        """Stops the child; the next `compile` starts another."""
        process, self._process = self._process, None
        self._compiled = 0
        folder, self._folder = self._folder, None
        if process is None or folder is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        folder.cleanup()

    def _start(self) -> None:
        self.close()
        config = self.config()
        with self._starting():
            self._folder = tempfile.TemporaryDirectory(prefix="pallas-gpu-")
            self._process = self._child(Path(self._folder.name))
        mark = self._stderr_size()
        answer = self._ask({"target_config": config}, "the start")
        if not answer["ok"]:
            diagnostics = self._stderr_since(mark)
            self.close()
            raise errors.CompilationError(
                f"the offline compiler for {self.name} does not start",
                got=_failure_text(answer["error"], answer["output"], diagnostics),
                hint="check that the versions of jax, jaxlib and the compiler match",
            )

    def _child(self, folder: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            # -P: file names in this folder must not shadow other modules.
            [sys.executable, "-P", str(_PROGRAM), *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=self.environment(folder),
            bufsize=0,
            # Ctrl-C in the terminal is for this process; the child exits with its pipe.
            start_new_session=True,
        )

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """Converts errors of the operating system: no space, no permission."""
        try:
            yield
        except OSError as error:
            raise errors.OfflineUnavailableError(
                f"the offline compiler for {self.name} cannot start",
                expected="space and permission to write temporary files",
                got=f"{type(error).__name__}: {error}",
                hint="free space in the temporary folder, or name another in TMPDIR",
            ) from error

    def _ask(self, request: dict[str, Any], what: str) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin and process.stdout
        mark = self._stderr_size()
        deadline = time.monotonic() + self.timeout_seconds
        try:
            _write_all(process.stdin.fileno(), worker_process.pack_message(request))
            return _read_message(process.stdout.fileno(), deadline)
        except TimeoutError:
            self.close()
            problem = f"took longer than {self.timeout_seconds:g} s and was stopped"
        except (BrokenPipeError, EOFError):
            process.wait()
            self.close()
            problem = f"died ({_exit_text(process.returncode)})"
        except BaseException:
            # The pending answer would be mistaken for that of the next request.
            self.close()
            raise
        raise errors.CompilationError(
            f"the offline compiler for {self.name} {problem} at {what}",
            got=self._stderr_since(mark) or "nothing on its standard error",
            hint="the next call starts a new one; please report it with the kernel",
        )

    def _stderr_size(self) -> int:
        return os.fstat(self._stderr.fileno()).st_size

    def _stderr_since(self, mark: int) -> str:
        # pread: the child shares this file's offset, which must not change.
        size = self._stderr_size() - mark
        text = os.pread(self._stderr.fileno(), size, mark).decode(errors="replace")
        return shortened(text)


class Worker(Child):
    """A child process that compiles for one target.

    Args:
      timeout_seconds: time limit for its start and for each kernel.
      disassemble: print SASS if there is nvdisasm; this takes most of the time of a
        small kernel.
      compilations: number of kernels after which another child replaces it.
    """

    def __init__(
        self,
        target: str | arch.GpuTarget,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        disassemble: bool = True,
        compilations: int = COMPILATIONS_PER_PROCESS,
    ):
        self.target = arch.target(target)
        self.disassemble = disassemble
        super().__init__(
            self.target.name,
            timeout_seconds=timeout_seconds,
            compilations=compilations,
        )

    def environment(self, folder: Path) -> dict[str, str]:
        """Returns the variables with which the CUDA plugin prints its stages."""
        return child_environment(os.environ, folder, disassemble=self.disassemble)

    def config(self) -> str:
        """Returns the description of the target."""
        environment.require_offline(environment.find_cuda())
        return target_config.target_config(self.target)

    def compile(
        self,
        serialized: SerializedModule,
        *,
        name: str,
        operands: Sequence[ArrayType],
        results: Sequence[ArrayType],
    ) -> CompilerOutput:
        """Compiles one module; starts the child if it is not running.

        Raises:
          CompilationError: MLIR, LLVM or ptxas rejected the module, the child died, or
            it exceeded the time limit.
          OfflineUnavailableError: CUDA packages are missing, or the child cannot start.
        """
        request = {
            "bytecode": serialized.bytecode,
            "operands": list(operands),
            "results": list(results),
        }
        return split_output(self.request(request, name)["output"])


_workers: dict[tuple[int, str], Any] = {}
_workers_lock = threading.Lock()


def kept[ChildT: Child](name: str, make: Callable[[], ChildT]) -> ChildT:
    """Returns this process's child of that name, which `make` returns at first."""
    # Keyed by process id: after a fork the pipes still belong to the parent.
    key = (os.getpid(), name)
    with _workers_lock:
        if key not in _workers:
            _workers[key] = make()
        return _workers[key]


def worker_for(target: str | arch.GpuTarget) -> Worker:
    """Returns this process's worker for a target; it starts with its first kernel."""
    target = arch.target(target)
    return kept(target.name, lambda: Worker(target))


@atexit.register
def close_all() -> None:
    """Stops all workers of this process."""
    for (owner, _), worker in list(_workers.items()):
        if owner == os.getpid():
            worker.close()


def split_output(output: str) -> CompilerOutput:
    """Splits the plugin's output into PTX, ptxas's report and SASS.

    Raises:
      InternalError: the PTX or the report is missing.
    """
    lines = output.splitlines()
    first = next((i for i, s in enumerate(lines) if s.startswith("ptxas ")), None)
    if first is None or not any(".entry" in line for line in lines[:first]):
        raise errors.InternalError(
            "the compiler's output has no PTX or no ptxas report",
            expected="PTX, then lines that begin with 'ptxas'",
            got=output[:500] or "nothing",
        )
    # nvdisasm's output starts with the target, unlike any line of ptxas's report.
    sass_at = next(
        (i for i in range(first, len(lines)) if lines[i].lstrip()[:8] == ".target\t"),
        len(lines),
    )
    sass = "\n".join(lines[sass_at:]).strip("\n")
    # The only line that differs between runs.
    report = [s for s in lines[first:sass_at] if "Compile time =" not in s]
    return CompilerOutput(
        ptx="\n".join(lines[:first]).strip("\n") + "\n",
        ptxas="\n".join(report).strip("\n") + "\n",
        sass=sass + "\n" if sass else None,
    )


def _failure_text(error: str, output: str, diagnostics: str) -> str:
    """The error, the standard error output, and the PTX line that it refers to."""
    parts = [shortened(error), diagnostics]
    ptx = output.splitlines()
    if (line := _PTX_LINE.search(diagnostics)) and int(line[1]) <= len(ptx):
        parts.append(f"PTX line {line[1]}: {ptx[int(line[1]) - 1].strip()}")
    return "\n".join(part for part in parts if part)


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_message(fd: int, deadline: float) -> dict[str, Any]:
    (size,) = worker_process.LENGTH.unpack(
        _read_exactly(fd, worker_process.LENGTH.size, deadline)
    )
    return worker_process.unpack_body(_read_exactly(fd, size, deadline))


def _read_exactly(fd: int, size: int, deadline: float) -> bytes:
    # poll, not select: select fails for descriptors above 1023.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    chunks = bytearray()
    while len(chunks) < size:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError
        chunk = os.read(fd, min(size - len(chunks), 1 << 20))
        if not chunk:
            raise EOFError
        chunks += chunk
    return bytes(chunks)
