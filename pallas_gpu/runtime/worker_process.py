# SPDX-License-Identifier: Apache-2.0
"""The program of the offline compiler's child process, started by `worker.py`.

One process compiles for one target: the first compilation fixes the compute capability
of the plugin's last pass. It reads requests from standard input and writes answers to
standard output, both as length-prefixed pickles of plain data:

    {"target_config": str}                              -> {"ok": True}
    {"bytecode": bytes, "operands": [(shape, dtype)],
     "results": [(shape, dtype)]}                       -> {"ok": True, "output": str}
                                                       or {"ok": False, "error": str}

`output` is what the plugin prints during compilation: PTX, ptxas's report, SASS.
An argument names a file that defines another `Compiler`, for another machine; what its
`compile` returns is the answer's `result`.
The file runs as a script and does not import the package, so that it starts as fast as
JAX itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import pickle
import queue
import struct
import sys
import tempfile
import threading
import traceback
from typing import Any, BinaryIO

LENGTH = struct.Struct("<Q")


def read_message(stream: BinaryIO) -> Any | None:
    """Reads one message; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = stream.read(size)
    return unpack_body(body) if len(body) == size else None


def unpack_body(body: bytes) -> Any:
    """The message after a length prefix."""
    return pickle.loads(body)


def pack_message(message: Any) -> bytes:
    """A message as bytes, with a length prefix."""
    body = pickle.dumps(message)
    return LENGTH.pack(len(body)) + body


class CapturedOutput:
    """A file that replaces standard output, to which the plugin's C++ writes."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives with the process
        os.dup2(self._file.fileno(), 1)
        self._libc = ctypes.CDLL(None)

    def clear(self) -> None:
        """Discards the output so far."""
        self._flush()
        os.ftruncate(1, 0)
        os.lseek(1, 0, os.SEEK_SET)

    def text(self) -> str:
        """The output since the last `clear`."""
        self._flush()
        size = os.fstat(1).st_size
        return os.pread(1, size, 0).decode(errors="replace")

    def _flush(self) -> None:
        sys.stdout.flush()
        self._libc.fflush(None)


class Compiler:
    """JAX with one compile-only device."""

    def __init__(self, target_config: str):
        import jax
        import numpy as np
        from jax.experimental import topologies

        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="offline",
            topology="1x1x1",
            target_config=target_config,
        )
        mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("device",))
        self._jax = jax
        self._sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._count = 0

    def compile(
        self,
        bytecode: bytes,
        operands: list[tuple[tuple[int, ...], str]],
        results: list[tuple[tuple[int, ...], str]],
    ) -> None:
        """Compiles to a cubin; the plugin prints the intermediate stages."""
        jax = self._jax
        # The plugin caches compiled kernels by this hash and prints nothing for cached
        # ones: a counter makes each request compile.
        self._count += 1
        salt = self._count.to_bytes(8, "little")
        kernel_hash = hashlib.sha256(bytecode + salt).digest()
        out_types = [self._type(shape, dtype) for shape, dtype in results]

        def program(_: Any, *args: Any) -> Any:
            return jax.ffi.ffi_call("mosaic_gpu_v2", out_types, has_side_effect=True)(
                *args,
                kernel_hash=kernel_hash,
                module=bytecode,
                use_custom_barrier=False,
                skip_device_barrier=False,
                uses_xla_collective_metadata=False,
            )

        # The first operand is a dummy: without operands, JAX compiles for the host.
        avals = [
            self._type(shape, dtype, sharding=self._sharding)
            for shape, dtype in [((), "int32"), *operands]
        ]
        jitted = jax.jit(program, out_shardings=self._sharding, keep_unused=True)
        jitted.lower(*avals).compile()

    def _type(self, shape: tuple[int, ...], dtype: str, **kw: Any) -> Any:
        jnp = self._jax.numpy
        return self._jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), **kw)


def _compiler_class() -> Any:
    if len(sys.argv) < 2:
        return Compiler
    spec = importlib.util.spec_from_file_location("compiler", sys.argv[1])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Compiler


def _handle(
    request: dict[str, Any], compiler: Any, output: CapturedOutput
) -> tuple[dict[str, Any], Any]:
    output.clear()
    try:
        if "target_config" in request:
            return {"ok": True}, _compiler_class()(request["target_config"])
        assert compiler is not None, "the first message must have the target"
        result = compiler.compile(**request)
        return {"ok": True, "output": output.text(), "result": result}, compiler
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, (AssertionError, ImportError, TypeError)):
            text = traceback.format_exc()
        return {"ok": False, "error": text, "output": output.text()}, compiler


def _read_requests(stream: BinaryIO, requests: queue.Queue[Any]) -> None:
    while (request := read_message(stream)) is not None:
        requests.put(request)
    # The parent has closed the pipe or exited: exit even during a compilation.
    os._exit(0)


def main() -> None:
    """Answers requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    output = CapturedOutput()
    requests: queue.Queue[Any] = queue.Queue()
    threading.Thread(
        target=_read_requests, args=(sys.stdin.buffer, requests), daemon=True
    ).start()
    compiler: Any = None
    while True:
        answer, compiler = _handle(requests.get(), compiler, output)
        answers.write(pack_message(answer))
        answers.flush()


if __name__ == "__main__":
    main()
